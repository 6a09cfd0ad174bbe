"""What is kept of a drilled step when its tensors are let go?

A step that was seen whole is several times the model. Of most steps a few numbers for each
parameter are enough, so that a large model can be drilled too.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from canvaslm.run_audit.applied import Rate, applied_rate, stray_average
from canvaslm.run_audit.definitions import Rule, due_rules
from canvaslm.run_audit.drill import StepSeen
from canvaslm.training.plan import PretrainParams
from canvaslm.training.run_state import StepRecord


@dataclass(frozen=True, kw_only=True)
class Digest:
    """One drilled step in numbers; those of parameters by name.

    Attributes:
        record: what the learner says of it.
        rates: the learning rate of each rule, read off the update; NaN of a refused step.
        stray: how far the average of the weights is off its definition; None where none is due.
        norms: of each gradient, not finite where one of its values is not; None without one.
        n_listed: how many times the optimiser lists the parameter.
        trainable: whether the parameter asks for a gradient.
    """

    record: StepRecord
    rates: dict[Rule, Rate]
    stray: float | None
    norms: dict[str, float | None]
    n_listed: dict[str, int]
    trainable: dict[str, bool]


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """A drill in numbers, and the gradients of its first step."""

    steps: list[Digest]
    gradients: dict[str, Tensor]


def digest(seen: StepSeen, params: PretrainParams) -> Digest:
    """Reduce one step to numbers."""
    refused = Rate(value=math.nan, slack=0.0)
    return Digest(
        record=seen.record,
        rates={
            rule: refused if seen.record.cause else applied_rate(seen, params, rule=rule)
            for rule in due_rules(params)
        },
        stray=stray_average(seen, params) if params.ema_decay else None,
        norms={
            name: None if gradient is None else float(gradient.double().norm())
            for name, gradient in seen.gradients.items()
        },
        n_listed=seen.n_listed,
        trainable=seen.trainable,
    )


def digest_all(drill: Iterable[StepSeen], params: PretrainParams) -> Drilled:
    """Reduce the steps of a drill to numbers, one after the other."""
    steps: list[Digest] = []
    gradients: dict[str, Tensor] = {}
    for seen in drill:
        if not steps:
            gradients = {name: g for name, g in seen.gradients.items() if g is not None}
        steps.append(digest(seen, params))
    return Drilled(steps=steps, gradients=gradients)
