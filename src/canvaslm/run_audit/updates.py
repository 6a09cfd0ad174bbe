"""Do gradients become the updates that they should, at the rate of the plan?

The order is that of causes: a gradient that is missing, then sums that depend on the cut, then a
rate of 0, then what clipping and the optimiser make of a gradient, then the schedule, and last what
the run as a whole came to.
"""

import math
from collections.abc import Callable
from functools import cached_property

from canvaslm.run_audit.applied import norm, unexplained_moments
from canvaslm.run_audit.average import check_average
from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.definitions import due_rules
from canvaslm.run_audit.digest import Digest, Drilled, digest, digest_all
from canvaslm.run_audit.drill import (
    StepSeen,
    drill,
    drill_numbers,
    drill_steps,
    highest_step,
)
from canvaslm.run_audit.form import check_form
from canvaslm.run_audit.gradients import check_accumulation, check_finite, check_reach
from canvaslm.run_audit.outcome import check_loss, check_moved
from canvaslm.run_audit.rates import check_applied, check_schedule
from canvaslm.run_audit.subject import Subject

_CLIPPED_SHARE = 0.01  # of its norm is left of a gradient that is clipped in a drill
_NORM_GAP = 1e-3  # between norms in float32 and in float64
_CLIP = (
    "python -m pytest -q tests/training/test_optimizer.py::test_clipping_scales_only_a_larger_norm"
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
        **{
            f"update_is_{rule}": lambda name, rule=rule: check_form(
                subject, drills.finished, name, rule
            )
            for rule in due_rules(subject.recipe.pretrain)
        },
        "learning_rate_follows_schedule": lambda name: check_schedule(
            subject, drills.whole.steps, drills.cut.steps, name
        ),
        **_of_average(subject, drills),
        "every_trainable_parameter_moved": lambda name: check_moved(subject, name),
        "training_loss_is_below_uniform": lambda name: check_loss(subject, name),
    }
    return [
        attempt("updates", name, lambda make=make, name=name: make(name))
        for name, make in makes.items()
    ]


def _of_average(subject: Subject, drills: _Drills) -> dict[str, Callable[[str], Check]]:
    """What is asked of a run that keeps an average of its weights."""
    if not subject.recipe.pretrain.ema_decay:
        return {}
    return {"average_follows_the_weights": lambda name: check_average(subject, drills.all, name)}


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


def _is_near(found: float, due: float) -> bool:
    """NaN is near to nothing."""
    return abs(found - due) <= _NORM_GAP * due
