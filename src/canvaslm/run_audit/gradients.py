"""Does the loss reach every parameter, whole, finite and however a step is cut?"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from canvaslm.objective.targets import LossSum
from canvaslm.run_audit.adamw import norm
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.drill import StepSeen, drill, drill_numbers
from canvaslm.run_audit.own_loss import has_guess
from canvaslm.run_audit.subject import Subject
from canvaslm.training.learner import Objective

_LARGEST_GAP = 1e-5  # of the whole gradient's norm, for one parameter, between two cuts of a step
_SHOWN = 4
_REACH = (
    "python -m pytest -q "
    "tests/training/test_learner.py::test_bfloat16_arithmetic_reaches_every_parameter"
)
_CUT = (
    "python -m pytest -q "
    "tests/training/test_learner.py::test_gradients_do_not_depend_on_the_cut_into_micro_batches"
)


def check_reach(subject: Subject, steps: Sequence[StepSeen], name: str) -> Check:
    """Every parameter asks for a gradient, gets one that is not 0, and is listed once to be moved.

    Args:
        subject: the run.
        steps: drilled steps; one gradient in any of them is enough.
        name: of the check.
    """
    without: dict[str, str] = {}
    for parameter in steps[0].before:
        fault = _fault(parameter, steps)
        if fault is not None:
            without[parameter] = fault
    excused = _without_guess(subject) if without else set()
    missing = {key: told for key, told in without.items() if key not in excused}
    n_due = len(steps[0].before) - len(excused & set(without))
    told = "; ".join(f"{key} {fault}" for key, fault in list(missing.items())[:_SHOWN])
    return decide(
        "updates",
        name,
        holds=not missing,
        measured=f"{n_due - len(missing)} of {n_due} parameters in {len(steps)} steps"
        + (f"; {told}" if missing else f", {_smallest(steps)}"),
        expected="every parameter is trainable, listed once by the optimiser, and has a gradient "
        "other than 0 in one of the steps"
        + (", but for the guess's projection, since no window has a guess" if excused else ""),
        first_test=_REACH,
    )


def check_finite(steps: Sequence[StepSeen], name: str) -> Check:
    """No gradient of any parameter holds NaN or infinity; norms as they are before clipping."""
    broken = sorted(
        {
            parameter
            for seen in steps
            for parameter, gradient in seen.gradients.items()
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        }
    )
    causes = [seen.record.cause for seen in steps if seen.record.cause]
    norms = [seen.record.gradient_norm for seen in steps if seen.record.gradient_norm is not None]
    told = f"norms before clipping {min(norms):.3g} to {max(norms):.3g}" if norms else "no norm"
    if broken:
        told += f"; not finite: {', '.join(broken[:_SHOWN])}"
    if causes:
        told += f"; a step was refused: {causes[0]}"
    return decide(
        "updates",
        name,
        holds=not broken and not causes,
        measured=f"{told}, in {len(steps)} steps, of fresh weights and of the finished ones",
        expected="every gradient finite, and no step refused",
        first_test="run one step on one window with torch.autograd.detect_anomaly, which names "
        "the operation whose gradient is the first that is not finite",
    )


def check_accumulation(subject: Subject, whole: StepSeen, cut: StepSeen, name: str) -> Check:
    """One pass over n windows, or n passes over one: the same sums, divided once.

    It is tried on the windows as they are, and with some of them counted three times, so that a
    mean of means could not pass for the mean.
    """
    n = len(drill_numbers(subject))
    if n < 2:
        return Check(
            group="updates",
            name=name,
            measured="a step of this run has one window, which cannot be cut",
            expected="equal gradients from one pass and from many",
            verdict="not_measured",
            first_test=_CUT,
        )
    uneven, step = _Uneven(subject.job.objective), whole.record.step
    few, many = (drill(subject, steps=[step], passes=k, objective=uneven)[0] for k in (2, n))
    pairs = [(whole, cut), (few, many)]
    gap = max(_gap(*pair) for pair in pairs)
    targets = [(a.record.targets, b.record.targets) for a, b in pairs]
    return decide(
        "updates",
        name,
        holds=gap <= _LARGEST_GAP and all(a == b for a, b in targets),
        measured=f"gradients of few passes and of {n} differ by up to {gap:.2g} of the norm of "
        "all, with uneven targets too; targets: " + ", ".join(f"{a} and {b}" for a, b in targets),
        expected=f"at most {_LARGEST_GAP:g}, and equal numbers of targets",
        first_test=_CUT,
    )


class _Uneven:
    """An objective in which every third window counts three times, nats and targets alike.

    Windows go through one by one, so that no other difference between the cuts is left.
    """

    def __init__(self, inner: Objective) -> None:
        self._inner = inner

    def loss(self, model: Backbone, windows: Tensor, numbers: np.ndarray) -> LossSum:
        nats, n_targets = torch.zeros((), dtype=torch.float64), 0
        for row, number in enumerate(numbers):
            part = self._inner.loss(model, windows[row : row + 1], numbers[row : row + 1])
            times = 3 if number % 3 == 0 else 1
            nats, n_targets = nats + times * part.nats, n_targets + times * part.n_targets
        return LossSum(nats=nats, n_targets=n_targets)

    def flops_per_window(self, params: ModelParams) -> float:
        return self._inner.flops_per_window(params)


def _fault(parameter: str, steps: Sequence[StepSeen]) -> str | None:
    """What keeps a parameter from being learned, in words."""
    if not steps[0].trainable[parameter]:
        return "asks for no gradient"
    if steps[0].n_listed[parameter] != 1:
        return f"is listed {steps[0].n_listed[parameter]} times by the optimiser"
    gradients = [seen.gradients[parameter] for seen in steps]
    if all(gradient is None for gradient in gradients):
        return "has no gradient"
    if not any(gradient is not None and bool(gradient.any()) for gradient in gradients):
        return "has a gradient of exactly 0"
    return None


def _without_guess(subject: Subject) -> set[str]:
    """Parameters that this run gives no gradient: the guess's, where no window has a guess."""
    if any(has_guess(subject, int(number)) for number in drill_numbers(subject)):
        return set()
    names = (name for name, _ in subject.model.named_parameters())
    return {name for name in names if name.startswith("self_conditioning.")}


def _smallest(steps: Sequence[StepSeen]) -> str:
    """The parameter with the smallest gradient, and the largest, in the last step."""
    norms = {
        name: float(gradient.double().norm())
        for name, gradient in steps[-1].gradients.items()
        if gradient is not None
    }
    finite = {name: value for name, value in norms.items() if math.isfinite(value)}
    if not finite:
        return "none of them finite"
    low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    return f"norms from {finite[low]:.2g} ({low}) to {finite[high]:.2g} ({high})"


def _gap(first: StepSeen, second: StepSeen) -> float:
    """The largest difference of one parameter's gradient, as a share of the norm of all."""
    pairs = [
        (gradient, second.gradients[name])
        for name, gradient in first.gradients.items()
        if gradient is not None
    ]
    total = norm({str(n): gradient for n, (gradient, _) in enumerate(pairs)})
    worst = max(math.inf if b is None else float((a.double() - b).norm()) for a, b in pairs)
    return worst / total if total > 0 else worst
