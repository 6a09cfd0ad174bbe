"""Are the numbers inside the network and the loss what they should be?"""

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from canvaslm.model.backbone import Backbone
from canvaslm.run_audit.activations import BOUND, Watch, largest_score
from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.held_out import HeldOutLoss, check_floor, check_possible, measure_held_out
from canvaslm.run_audit.own_loss import (
    OwnLoss,
    has_guess,
    own_companion,
    own_loss,
    sharpened,
    uniform_loss,
)
from canvaslm.run_audit.reading import (
    denoised_logits,
    encoded_logits,
    fresh_model,
    on_cpu,
    read_window,
    windows_of,
)
from canvaslm.run_audit.subject import Subject

_LARGEST_GAP = 1e-3  # nats per target, between float32 in chunks and float64 by the definition
_EPS = float(torch.finfo(torch.float32).eps)
_ROUNDED = 16  # units in the last place of the largest logit, which a loss is a difference of
_SHARPER = 4.0  # probabilities near uniform hide what a loss does to logits
_START_SHARE = 0.15  # of ln V: what tied random rows do for a token that is seen itself
_LOSS = "python -m pytest -q tests/test_loss.py::test_dense_loss_is_the_definition"
_START = (
    "python -m pytest -q tests/model/test_backbone.py::test_initial_weights_have_the_stated_spread"
)

_EXTREME = (
    "lower `pretrain.learning_rate` and `pretrain.muon_learning_rate` tenfold, or raise "
    "`pretrain.warmup_steps`, and train again: "
    f"what stays extreme was so from the start, for {_START}"
)


def check_values(subject: Subject) -> list[Check]:
    """Look at activations, hold the loss against its definition, and at what held-out text costs.

    Everything but the held-out loss is computed in float32 on the CPU, whatever the run was trained
    on and in.
    """
    model, numbers, held_out = on_cpu(subject.model), _numbers(subject), _HeldOut(subject)
    makes: dict[str, Callable[[str], Check]] = {
        "no_activation_is_extreme": lambda name: _check_activations(subject, model, numbers, name),
        "loss_is_cross_entropy": lambda name: _check_loss(subject, model, numbers, name),
        "initial_loss_is_uniform": lambda name: _check_start(subject, numbers, name),
        "held_out_loss_is_possible": lambda name: check_possible(subject, held_out.loss, name),
        "held_out_loss_is_above_the_floor": lambda name: check_floor(subject, held_out.loss, name),
    }
    return [
        attempt("values", name, lambda make=make, name=name: make(name))
        for name, make in makes.items()
    ]


class _HeldOut:
    """The held-out loss, measured once, when a check first asks for it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    @cached_property
    def loss(self) -> HeldOutLoss:
        return measure_held_out(self._subject)


def _numbers(subject: Subject) -> list[int]:
    """The first windows of each phase of the run, some with a guess and some without one."""
    consumed, n = subject.state.progress.windows_consumed, subject.params.n_windows
    second = min(subject.recipe.first_phase_windows, consumed)
    n_first = min(second, n // 2)
    numbers = [*range(n_first), *range(second, min(second + n - n_first, consumed))]
    for kind in (True, False):
        if all(has_guess(subject, number) != kind for number in numbers):
            others = range(max(numbers, default=-1) + 1, consumed)
            numbers += [n for n in others if has_guess(subject, n) == kind][:1]
    return numbers


def _check_activations(subject: Subject, model: Backbone, numbers: list[int], name: str) -> Check:
    windows = torch.from_numpy(windows_of(subject, np.array(numbers)))
    with Watch(model) as watch, torch.no_grad():
        subject.job.objective.loss(model, windows, np.array(numbers))
    seen, reading = watch.result(), read_window(subject)
    read = denoised_logits if reading.has_noise else encoded_logits
    sizes = {
        "residual stream": seen.largest.get("blocks", math.inf),
        "attention scores": largest_score(model, reading),
        "logits": float(read(model, reading).abs().max()),
    }
    told = ", ".join(f"{key} {_size(value)}" for key, value in sizes.items())
    first = seen.first or "none of them is extreme"
    return decide(
        "values",
        name,
        holds=seen.first is None and all(size <= BOUND for size in sizes.values()),
        measured=f"{seen.n_outputs} outputs of modules on {len(numbers)} windows: {first}; {told}",
        expected=f"all finite and at most {BOUND:g} in size, in float32",
        first_test=_EXTREME,
    )


def _size(value: float) -> str:
    return f"up to {value:.3g}" if math.isfinite(value) else "not finite"


def _check_loss(subject: Subject, model: Backbone, numbers: list[int], name: str) -> Check:
    """Window by window, as the model is and with logits further from uniform."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    largest = 0.0
    for factor in (1.0, _SHARPER):
        with sharpened(model, factor):
            for number in numbers:
                gap, own = _gap(subject, model, number)
                gaps[has_guess(subject, number)].append(gap)
                largest = max(largest, own.largest_logit)
    found = [gap for kind in gaps.values() for gap in kind]
    worst = max(found, key=_nan_last)
    allowed = max(_LARGEST_GAP, _ROUNDED * _EPS * largest)
    told = f"off by up to {worst:.2g} nats per target" if math.isfinite(worst) else "not finite"
    return decide(
        "values",
        name,
        holds=worst <= allowed,
        measured=f"{told}, on {len(gaps[False])} windows without a guess and {len(gaps[True])} "
        f"with one, logits up to {largest:.3g}",
        expected=f"at most {allowed:g} off a log-softmax in float64, summed over the targets",
        first_test=_LOSS,
    )


def _nan_last(gap: float) -> float:
    return math.inf if math.isnan(gap) else gap


def _gap(subject: Subject, model: Backbone, number: int) -> tuple[float, OwnLoss]:
    """By how many nats per target the objective and the definition differ on one window."""
    numbers = np.array([number])
    window = torch.from_numpy(windows_of(subject, numbers))
    own = own_loss(subject, model, window, number)
    with torch.no_grad():
        loss = subject.job.objective.loss(model, window, numbers)
    if loss.n_targets != own.n_targets:
        return math.inf, own
    beside = 0.0 if loss.companion is None else float(loss.companion)
    gaps = float(loss.nats) - own.nats, beside - own_companion(subject, model, window, number)
    return max(map(abs, gaps), key=_nan_last) / max(own.n_targets, 1), own


def _check_start(subject: Subject, numbers: list[int], name: str) -> Check:
    """A model that knows nothing yet pays for a token about what a uniform guess does."""
    fresh = fresh_model(subject)
    nats = n_targets = uniform = 0.0
    for number in numbers:
        window = torch.from_numpy(windows_of(subject, np.array([number])))
        own = own_loss(subject, fresh, window, number)
        nats, n_targets = nats + own.nats, n_targets + own.n_targets
        uniform += uniform_loss(subject, fresh, window, number).nats
    mean, uniform = nats / max(n_targets, 1), uniform / max(n_targets, 1)
    return decide(
        "values",
        name,
        holds=abs(mean - uniform) <= _START_SHARE * uniform,
        measured=f"{mean:.4f} nats per target on {len(numbers)} windows"
        if math.isfinite(mean)
        else "not finite",
        expected=f"{uniform:.4f}, the price of logits of 0, within {_START_SHARE:.0%} of it: a "
        "tied table lets a fresh model lean to the token that it reads",
        first_test=_START,
    )
