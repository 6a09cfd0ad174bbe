"""What should an update be, by the definition of AdamW and in float64?

Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2, written from the gradient and the
moments before the step. The rate is not taken from anybody's word: it is the length of the update
in the direction that the definition gives, and the decay is what is left along the weights.

A run steps in float32, and a small step is rounded to the spacing of its weights. What rounding may
do is worked out beside each figure, so that it is never taken for a fault: a small rate moves a
norm's weight of 1 by a few units in its last place, and of weights that are still almost 0 the
direction, known to seven digits, is larger than all that decay could do to them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.run_audit.drill import StepSeen
from canvaslm.training.plan import PretrainParams

_FLOAT = torch.finfo(torch.float32)
_ROUNDED = 4  # operations that each may round an operand by half a unit in its last place, twice


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate that explains a step best.

    Attributes:
        value: the rate, by least squares over all parameters; 0 of a step without a length.
        slack: by how much rounding may have moved it, in the worst case.
    """

    value: float
    slack: float


def applied_rate(seen: StepSeen, params: PretrainParams) -> Rate:
    """Read the learning rate off a step.

    Args:
        seen: the step.
        params: betas, eps and decay.
    """
    along = doubt = length = 0.0
    for name, weight in seen.before.items():
        if name not in seen.moments_after or seen.gradients[name] is None:
            continue
        ratio = _ratio(seen, name, params)
        direction = ratio.value + due_decay(name, weight, params) * weight.double()
        rounding = _rounding(weight) + params.learning_rate * ratio.slack
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
        rate: the learning rate of the step, above 0.
        params: betas and eps.
    """
    weight = seen.before[name].double()
    length = float((weight * weight).sum())
    if length == 0:
        return Decay(value=0.0, slack=math.inf)
    ratio, moved = _ratio(seen, name, params), _moved(seen, name)
    left = moved / -rate.value - ratio.value
    rounding = _rounding(seen.before[name]) / rate.value + ratio.slack
    doubt = float((rounding * weight.abs()).sum())
    doubt += rate.slack / rate.value**2 * abs(float((moved * weight).sum()))
    return Decay(value=float((left * weight).sum()) / length, slack=doubt / length)


def unexplained(seen: StepSeen, name: str, rate: float, params: PretrainParams) -> float:
    """How far a parameter's update is off the definition, as a share of the step's rate.

    What float32 must round away is not counted.
    """
    weight, ratio = seen.before[name], _ratio(seen, name, params)
    due = ratio.value + due_decay(name, weight, params) * weight.double()
    rounding = _rounding(weight) + rate * ratio.slack
    off = ((_moved(seen, name) + rate * due).abs() - rounding).clamp(min=0)
    return float(off.max()) / rate


def unexplained_moments(
    seen: StepSeen, gradients: dict[str, Tensor], params: PretrainParams
) -> float:
    """How far the moments after a step are off those of given gradients, as a share of the largest.

    Args:
        seen: the step.
        gradients: what should have entered the moments.
        params: the betas.
    """
    worst = 0.0
    for name, after in seen.moments_after.items():
        mean, square = _moments(seen, name, gradients[name].double(), params)
        for found, due in ((after.mean, mean), (after.square, square)):
            largest = float(due.abs().max())
            off = float(((found.double() - due).abs() - _FLOAT.tiny).clamp(min=0).max())
            worst = max(worst, off / largest if largest > 0 else off)
    return worst


def due_decay(name: str, weight: Tensor, params: PretrainParams) -> float:
    """Matrices decay, the table among them; norms, biases and the guess's projection do not."""
    decays = weight.ndim >= 2 and not name.startswith("self_conditioning.")
    return params.weight_decay if decays else 0.0


def norm(tensors: dict[str, Tensor]) -> float:
    """The Euclidean norm of all together, in float64."""
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors.values()))


def _moved(seen: StepSeen, name: str) -> Tensor:
    return seen.after[name].double() - seen.before[name].double()


@dataclass(frozen=True, kw_only=True)
class _Ratio:
    """The direction of AdamW without decay, and by how much float32 may miss it."""

    value: Tensor
    slack: Tensor


def _ratio(seen: StepSeen, name: str, params: PretrainParams) -> _Ratio:
    """The first moment over the root of the second, both corrected for their start at 0.

    Float32 rounds each operand of a sum to seven digits, which counts where the sum cancels, and
    has no square below its smallest number.
    """
    gradient = seen.gradients[name]
    assert gradient is not None
    gradient, before = gradient.double(), seen.moments_before[name]
    mean, square = _moments(seen, name, gradient, params)
    n_updates = before.n_updates + 1
    bias1, bias2 = 1 - params.beta1**n_updates, 1 - params.beta2**n_updates
    root = (square / bias2).sqrt() + params.adam_eps
    operands = params.beta1 * before.mean.double().abs() + (1 - params.beta1) * gradient.abs()
    lowest = (square * (1 - _ROUNDED * _FLOAT.eps) - _FLOAT.tiny).clamp(min=0)
    least_root = (lowest / bias2).sqrt() + params.adam_eps
    highest = (mean.abs() + _ROUNDED * _FLOAT.eps * operands) / bias1 / least_root
    value = mean / bias1 / root
    return _Ratio(value=value, slack=highest - value.abs() + _ROUNDED * _FLOAT.eps * value.abs())


def _rounding(weight: Tensor) -> Tensor:
    """What a step in the weights' own type may round: decay's factor, its product, and the sum."""
    return 1.5 * torch.finfo(weight.dtype).eps * weight.double().abs()


def _moments(
    seen: StepSeen, name: str, gradient: Tensor, params: PretrainParams
) -> tuple[Tensor, Tensor]:
    """Both moments after a gradient."""
    before = seen.moments_before[name]
    mean = params.beta1 * before.mean.double() + (1 - params.beta1) * gradient
    square = params.beta2 * before.square.double() + (1 - params.beta2) * gradient**2
    return mean, square
