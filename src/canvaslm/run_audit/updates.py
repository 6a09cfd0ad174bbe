"""Do gradients become the updates that they should, at the rate of the plan?

The order is that of causes: a gradient that is missing, then sums that depend on the cut, then a
rate of 0, then what clipping and AdamW make of a gradient, then the schedule, and last what the run
as a whole came to.
"""

import math
from collections.abc import Callable
from functools import cached_property

from canvaslm.run_audit.adamw import (
    Rate,
    applied_decay,
    applied_rate,
    due_decay,
    norm,
    unexplained,
    unexplained_moments,
)
from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.digest import Digest, Drilled, digest, digest_all
from canvaslm.run_audit.drill import (
    StepSeen,
    drill,
    drill_numbers,
    drill_steps,
    highest_step,
)
from canvaslm.run_audit.gradients import check_accumulation, check_finite, check_reach
from canvaslm.run_audit.outcome import check_loss, check_moved
from canvaslm.run_audit.rates import check_applied, check_schedule
from canvaslm.run_audit.subject import Subject
from canvaslm.training.plan import PretrainParams

_CLIPPED_SHARE = 0.01  # of its norm is left of a gradient that is clipped in a drill
_NORM_GAP = 1e-3  # between norms in float32 and in float64
_UPDATE_GAP = 0.01  # of the rate, between an update and the definition
_DECAY_GAP = 0.25  # of the decay, that is left to rounding, and as much again to be told
_SOME_DECAY = 0.01  # that would be told where none is due
_SHOWN = 4
_CLIP = (
    "python -m pytest -q tests/training/test_optimizer.py::test_clipping_scales_only_a_larger_norm"
)
_ADAMW = (
    "python -m pytest -q tests/training/test_optimizer.py::test_first_update_equals_adamw_by_hand"
)
_DECAY = (
    "python -m pytest -q tests/training/test_optimizer.py::test_matrices_decay_and_nothing_else"
)


class _Drills:
    """Each drill is run once, when a check first asks for it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._params = subject.recipe.pretrain
        self._steps = drill_steps(subject)

    @cached_property
    def whole(self) -> Drilled:
        """Fresh weights, a step in one pass."""
        return digest_all(drill(self._subject, steps=self._steps, passes=1), self._params)

    @cached_property
    def cut(self) -> Drilled:
        """Fresh weights, a step in as many passes as it has windows."""
        n = len(drill_numbers(self._subject))
        return digest_all(drill(self._subject, steps=self._steps, passes=n), self._params)

    @cached_property
    def clipped(self) -> StepSeen:
        """Fresh weights, with little left of the gradient."""
        limit = _CLIPPED_SHARE * norm(self.whole.gradients)
        return next(drill(self._subject, steps=self._steps[:1], passes=1, max_norm=limit))

    @cached_property
    def finished(self) -> StepSeen:
        """The finished weights and moments, clipped as the run is, at the highest rate."""
        return next(
            drill(
                self._subject,
                steps=[highest_step(self._subject)],
                passes=1,
                max_norm=self._params.max_gradient_norm,
                from_checkpoint=True,
            )
        )

    @property
    def all(self) -> list[Digest]:
        """Steps of fresh weights, then the one of the finished ones."""
        return [*self.whole.steps, digest(self.finished, self._params)]


def check_updates(subject: Subject) -> list[Check]:
    """Drill a few steps at the run's own shape, and look at what its whole training came to.

    The drills run in float32 on the CPU, on at most 1,024 tokens a step, or two windows.
    """
    drills = _Drills(subject)
    makes: dict[str, Callable[[str], Check]] = {
        "gradients_reach_every_parameter": lambda name: check_reach(subject, drills.all, name),
        "gradients_are_finite": lambda name: check_finite(drills.all, name),
        "accumulation_is_only_a_cut": lambda name: check_accumulation(
            subject, drills.whole, drills.cut, name
        ),
        "learning_rate_is_applied": lambda name: check_applied(subject, drills.whole.steps, name),
        "clipping_precedes_the_update": lambda name: _check_clipping(subject, drills, name),
        "update_is_adamw": lambda name: _check_adamw(subject, drills.finished, name),
        "learning_rate_follows_schedule": lambda name: check_schedule(
            subject, drills.whole.steps, drills.cut.steps, name
        ),
        "every_trainable_parameter_moved": lambda name: check_moved(subject, name),
        "training_loss_is_below_uniform": lambda name: check_loss(subject, name),
    }
    return [
        attempt("updates", name, lambda make=make, name=name: make(name))
        for name, make in makes.items()
    ]


def _check_clipping(subject: Subject, drills: _Drills, name: str) -> Check:
    """The norm is taken before, and what enters the moments is what clipping leaves."""
    own, seen = norm(drills.whole.gradients), drills.clipped
    left = norm({key: grad for key, grad in seen.gradients.items() if grad is not None})
    scaled = {key: grad * _CLIPPED_SHARE for key, grad in drills.whole.gradients.items()}
    off = unexplained_moments(seen, scaled, subject.recipe.pretrain)
    logged = seen.record.gradient_norm or math.nan
    due = _CLIPPED_SHARE * own
    told = "the step was refused" if math.isnan(logged) else f"logged norm {logged:.5g}"
    return decide(
        "updates",
        name,
        holds=_is_near(logged, own) and _is_near(left, due) and off <= _NORM_GAP,
        measured=f"{told}, norm of the gradient that is left {left:.5g}, the moments after it off "
        f"by up to {off:.2g} of the largest",
        expected=f"{own:.5g} before clipping and {due:.5g} after it, within {_NORM_GAP:g}, and "
        "moments that have seen only what was left",
        first_test=_CLIP,
    )


def _check_adamw(subject: Subject, seen: StepSeen, name: str) -> Check:
    """The update from the finished state, against the definition; and its size, for the reader."""
    params = subject.recipe.pretrain
    applied = applied_rate(seen, params)
    rate = applied.value
    if not rate > 0:
        return _without_rate(name)
    off = {key: unexplained(seen, key, rate, params) for key in seen.before}
    worst = max(off, key=off.__getitem__)
    decays, n_told = _wrong_decays(seen, applied, params)
    told = (
        f"off by up to {off[worst]:.2g} of the rate beyond what float32 rounds ({worst}); the "
        f"decay can be told of {n_told} of {len(seen.before)} parameters; {_ratios(seen)}"
    )
    if decays:
        told += f"; another decay: {', '.join(decays[:_SHOWN])}"
    return decide(
        "updates",
        name,
        holds=off[worst] <= _UPDATE_GAP and not decays,
        measured=told,
        expected=f"an AdamW step in float64 within {_UPDATE_GAP:g} of the rate {rate:.4g}, with "
        f"decay {params.weight_decay:g} on matrices alone",
        first_test=_DECAY if decays else _ADAMW,
    )


def _without_rate(name: str) -> Check:
    """An update of no length says nothing about its form."""
    return decide(
        "updates",
        name,
        holds=False,
        measured="the update has no length",
        expected="an update, whose form can be looked at",
        first_test=_ADAMW,
    )


def _wrong_decays(seen: StepSeen, rate: Rate, params: PretrainParams) -> tuple[list[str], int]:
    """Parameters whose update along themselves is not that of their decay, and how many tell it.

    Where rounding could feign a large part of the decay, or hide it, nothing is said.
    """
    wrong, n_told = [], 0
    gap = _DECAY_GAP * (params.weight_decay or _SOME_DECAY)
    for name, weight in seen.before.items():
        found = applied_decay(seen, name, rate, params)
        if not found.slack <= gap:
            continue
        n_told += 1
        due = due_decay(name, weight, params)
        if abs(found.value - due) > gap + found.slack:
            wrong.append(f"{name} {found.value:.3g}")
    return wrong, n_told


def _ratios(seen: StepSeen) -> str:
    """The smallest and the largest update as a share of its weights."""
    ratios = []
    for name, before in seen.before.items():
        length = float(before.double().norm())
        if length > 0:
            ratios.append(float((seen.after[name] - before).double().norm()) / length)
    return f"updates are {min(ratios):.2g} to {max(ratios):.2g} of their weights"


def _is_near(found: float, due: float) -> bool:
    """NaN is near to nothing."""
    return abs(found - due) <= _NORM_GAP * due
