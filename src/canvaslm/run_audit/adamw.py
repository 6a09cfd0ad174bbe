"""What should an update be, by the definition of AdamW and in float64?

Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2, written from the gradient and the
moments before the step. The rate is not taken from anybody's word: it is the length of the update
in the direction that the definition gives, and the decay is what is left along the weights.
"""

import math

import torch
from torch import Tensor

from canvaslm.run_audit.drill import StepSeen
from canvaslm.training.plan import PretrainParams


def applied_rate(seen: StepSeen, params: PretrainParams) -> float:
    """The learning rate that explains a step best, by least squares over all parameters.

    Args:
        seen: the step.
        params: betas, eps and decay.
    """
    along = length = 0.0
    for name, weight in seen.before.items():
        if name not in seen.moments_after or seen.gradients[name] is None:
            continue
        direction = _ratio(seen, name, params) + due_decay(name, weight, params) * weight.double()
        along -= float((_moved(seen, name) * direction).sum())
        length += float((direction * direction).sum())
    return along / length if length > 0 else 0.0


def applied_decay(seen: StepSeen, name: str, rate: float, params: PretrainParams) -> float | None:
    """The decay that explains what a step does along one parameter's own weights.

    Args:
        seen: the step.
        name: the parameter.
        rate: the learning rate of the step, above 0.
        params: betas and eps.

    Returns:
        The decay, or None for weights of 0, which no decay moves.
    """
    weight = seen.before[name].double()
    length = float((weight * weight).sum())
    if length == 0:
        return None
    left = _moved(seen, name) / -rate - _ratio(seen, name, params)
    return float((left * weight).sum()) / length


def unexplained(seen: StepSeen, name: str, rate: float, params: PretrainParams) -> float:
    """How far a parameter's update is off the definition, as a share of the step's rate.

    What float32 must round away is not counted: one unit in the last place of each weight.
    """
    weight = seen.before[name]
    due = _ratio(seen, name, params) + due_decay(name, weight, params) * weight.double()
    rounding = torch.finfo(weight.dtype).eps * weight.double().abs()
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
            off = float((found.double() - due).abs().max())
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


def _ratio(seen: StepSeen, name: str, params: PretrainParams) -> Tensor:
    """The first moment over the root of the second, both corrected for their start at 0."""
    gradient = seen.gradients[name]
    assert gradient is not None
    mean, square = _moments(seen, name, gradient.double(), params)
    n_updates = seen.moments_before[name].n_updates + 1
    mean = mean / (1 - params.beta1**n_updates)
    square = square / (1 - params.beta2**n_updates)
    return mean / (square.sqrt() + params.adam_eps)


def _moments(
    seen: StepSeen, name: str, gradient: Tensor, params: PretrainParams
) -> tuple[Tensor, Tensor]:
    """Both moments after a gradient."""
    before = seen.moments_before[name]
    mean = params.beta1 * before.mean.double() + (1 - params.beta1) * gradient
    square = params.beta2 * before.square.double() + (1 - params.beta2) * gradient**2
    return mean, square
