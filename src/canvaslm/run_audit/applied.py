"""What can be read off a step: its rate, its decay, and what its definition leaves unexplained?

The rate is not taken from anybody's word: it is the length of the update in the direction that the
definition gives, and the decay is what is left along the weights.

Of each figure it is said what rounding may have done to it. A small rate moves a norm's weight of 1
by a few units in its last place, and of weights that are still almost 0 the direction, known to
seven digits, is larger than all that decay could do to them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.run_audit.definitions import (
    FLOAT,
    Rule,
    due_decay,
    due_direction,
    due_moments,
    due_rule,
    highest_rate,
    rule_found,
)
from canvaslm.run_audit.drill import StepSeen
from canvaslm.training.plan import PretrainParams


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate that explains a step best.

    Attributes:
        value: the rate, by least squares over the parameters; 0 of a step without a length.
        slack: by how much rounding may have moved it, in the worst case.
    """

    value: float
    slack: float


def names_of(seen: StepSeen, rule: Rule, params: PretrainParams) -> list[str]:
    """The parameters that a rule should move, with moments of that rule and a gradient."""
    return [
        name
        for name, weight in seen.before.items()
        if due_rule(name, weight, params) == rule
        and name in seen.moments_after
        and rule_found(seen, name) == rule
        and seen.gradients[name] is not None
    ]


def applied_rate(seen: StepSeen, params: PretrainParams, *, rule: Rule = "adamw") -> Rate:
    """Read the learning rate of a rule off a step.

    Args:
        seen: the step.
        params: betas, momentum, eps and decay.
        rule: whose parameters.
    """
    along = doubt = length = 0.0
    for name in names_of(seen, rule, params):
        weight, due = seen.before[name], due_direction(seen, name, params)
        direction = due.value + due_decay(name, weight, params) * weight.double()
        rounding = _rounding(weight) + highest_rate(rule, params) * due.slack
        along -= float((_moved(seen, name) * direction).sum())
        doubt += float((rounding * direction.abs()).sum())
        length += float((direction * direction).sum())
    if not length > 0:
        return Rate(value=0.0, slack=0.0)
    return Rate(value=along / length, slack=doubt / length)


@dataclass(frozen=True, kw_only=True)
class Decay:
    """The decay that explains what a step does along one parameter's own weights.

    Attributes:
        value: the decay.
        slack: by how much rounding may have moved it; infinite for weights of 0.
    """

    value: float
    slack: float


def applied_decay(seen: StepSeen, name: str, rate: Rate, params: PretrainParams) -> Decay:
    """Read the decay of one parameter off a step.

    Args:
        seen: the step.
        name: the parameter.
        rate: the learning rate of its rule in the step, above 0.
        params: betas, momentum and eps.
    """
    weight = seen.before[name].double()
    length = float((weight * weight).sum())
    if length == 0:
        return Decay(value=0.0, slack=math.inf)
    due, moved = due_direction(seen, name, params), _moved(seen, name)
    left = moved / -rate.value - due.value
    rounding = _rounding(seen.before[name]) / rate.value + due.slack
    doubt = float((rounding * weight.abs()).sum())
    doubt += rate.slack / rate.value**2 * abs(float((moved * weight).sum()))
    return Decay(value=float((left * weight).sum()) / length, slack=doubt / length)


def unexplained(seen: StepSeen, name: str, rate: float, params: PretrainParams) -> float:
    """How far a parameter's update is off the definition, as a share of the step's rate.

    What float32 must round away is not counted.
    """
    weight, due = seen.before[name], due_direction(seen, name, params)
    whole = due.value + due_decay(name, weight, params) * weight.double()
    rounding = _rounding(weight) + rate * due.slack
    off = ((_moved(seen, name) + rate * whole).abs() - rounding).clamp(min=0)
    return float(off.max()) / rate


def unexplained_moments(
    seen: StepSeen, gradients: dict[str, Tensor], params: PretrainParams
) -> float:
    """How far the moments after a step are off those of given gradients, as a share of the largest.

    Args:
        seen: the step.
        gradients: what should have entered the moments.
        params: the betas and the momentum.
    """
    worst = 0.0
    for name in seen.moments_after:
        for found, due in due_moments(seen, name, gradients[name].double(), params):
            largest = float(due.abs().max())
            off = float(((found.double() - due).abs() - FLOAT.tiny).clamp(min=0).max())
            worst = max(worst, off / largest if largest > 0 else off)
    return worst


def stray_average(seen: StepSeen, params: PretrainParams) -> float:
    """How far the averages of the weights are off their definition, as a share of their way.

    After update t an average is moved towards the new weights by ``max(1 - decay, 10 / (t + 9))``
    of what lies between them. Infinite where a parameter has no average or no update was counted.
    """
    counted = [x.n_updates for x in seen.moments_after.values() if not math.isnan(x.n_updates)]
    if not counted or counted[0] < 1 or seen.moments_after.keys() != seen.after.keys():
        return math.inf
    share, worst = max(1 - params.ema_decay, 10 / (counted[0] + 9)), 0.0
    for name, weight in seen.after.items():
        before, after = seen.moments_before[name].average, seen.moments_after[name].average
        if before is None or after is None:
            return math.inf
        before, way = before.double(), weight.double() - before.double()
        rounding = 2 * FLOAT.eps * (before.abs() + weight.double().abs())
        off = float(((after.double() - before - share * way).abs() - rounding).clamp(min=0).max())
        if off:
            longest = float((share * way).abs().max())
            worst = max(worst, off / longest if longest else math.inf)
    return worst


def norm(tensors: dict[str, Tensor]) -> float:
    """The Euclidean norm of all together, in float64."""
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors.values()))


def _moved(seen: StepSeen, name: str) -> Tensor:
    return seen.after[name].double() - seen.before[name].double()


def _rounding(weight: Tensor) -> Tensor:
    """What a step in the weights' own type may round: decay's factor, its product, and the sum."""
    return 1.5 * torch.finfo(weight.dtype).eps * weight.double().abs()
