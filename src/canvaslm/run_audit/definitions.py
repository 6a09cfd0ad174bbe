"""What should an update be, by the definition of its optimiser and in float64?

AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2. Muon: Jordan et al. 2024
(https://kellerjordan.github.io/posts/muon), in the size of Liu et al. 2025 (arXiv 2502.16982), eq.
4. Both are written from the gradient and the moments before the step.

A run steps in float32. What that may round away is worked out beside each direction, so that it is
never taken for a fault.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from canvaslm.run_audit.drill import StepSeen
from canvaslm.training.plan import PretrainParams

Rule = Literal["adamw", "muon"]

FLOAT = torch.finfo(torch.float32)
_ROUNDED = 4  # operations that each may round an operand by half a unit in its last place, twice
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_STEEPEST = _QUINTIC[0] ** _ITERATIONS  # what an error of the normed matrix grows to at most


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Where a rule moves a parameter at a rate of 1, decay apart.

    Attributes:
        value: against the update.
        slack: by how much float32 may miss it, value by value.
    """

    value: Tensor
    slack: Tensor


def due_rule(name: str, weight: Tensor, params: PretrainParams) -> Rule:
    """Muon moves the matrices inside the blocks, where it is asked for; AdamW all else."""
    inside = name.startswith("blocks.") and weight.ndim == 2
    return "muon" if params.optimizer == "muon" and inside else "adamw"


def due_rules(params: PretrainParams) -> tuple[Rule, ...]:
    """The rules of a run."""
    return ("adamw", "muon") if params.optimizer == "muon" else ("adamw",)


def highest_rate(rule: Rule, params: PretrainParams) -> float:
    """The highest learning rate that a rule has."""
    return params.muon_learning_rate if rule == "muon" else params.learning_rate


def due_decay(name: str, weight: Tensor, params: PretrainParams) -> float:
    """Matrices decay, the table among them; norms, biases and the guess's projection do not."""
    decays = weight.ndim >= 2 and not name.startswith("self_conditioning.")
    return params.weight_decay if decays else 0.0


def due_direction(seen: StepSeen, name: str, params: PretrainParams) -> Direction:
    """Where a step should have moved a parameter, by its rule."""
    gradient = seen.gradients[name]
    assert gradient is not None
    if due_rule(name, seen.before[name], params) == "muon":
        return _muon(seen, name, gradient.double(), params)
    return _adamw(seen, name, gradient.double(), params)


def due_moments(
    seen: StepSeen, name: str, gradient: Tensor, params: PretrainParams
) -> list[tuple[Tensor, Tensor]]:
    """Each moment of a parameter after a step, as found and as due of a gradient in float64."""
    before, after = seen.moments_before[name], seen.moments_after[name]
    if before.square is None or after.square is None:
        return [(after.mean, _follow(before.mean, gradient, params.muon_momentum))]
    mean = _follow(before.mean, gradient, params.beta1)
    return [(after.mean, mean), (after.square, _follow(before.square, gradient**2, params.beta2))]


def rule_found(seen: StepSeen, name: str) -> Rule:
    """The rule whose moments a parameter has: Muon keeps no second one."""
    return "muon" if seen.moments_after[name].square is None else "adamw"


def _adamw(seen: StepSeen, name: str, gradient: Tensor, params: PretrainParams) -> Direction:
    """The first moment over the root of the second, both corrected for their start at 0.

    Float32 rounds each operand of a sum to seven digits, which counts where the sum cancels, and
    has no square below its smallest number.
    """
    before = seen.moments_before[name]
    assert before.square is not None
    mean = _follow(before.mean, gradient, params.beta1)
    square = _follow(before.square, gradient**2, params.beta2)
    n_updates = before.n_updates + 1
    bias1, bias2 = 1 - params.beta1**n_updates, 1 - params.beta2**n_updates
    root = (square / bias2).sqrt() + params.adam_eps
    operands = _follow(before.mean.abs(), gradient.abs(), params.beta1)
    lowest = (square * (1 - _ROUNDED * FLOAT.eps) - FLOAT.tiny).clamp(min=0)
    least_root = (lowest / bias2).sqrt() + params.adam_eps
    highest = (mean.abs() + _ROUNDED * FLOAT.eps * operands) / bias1 / least_root
    value = mean / bias1 / root
    return Direction(value=value, slack=highest - value.abs() + _ROUNDED * FLOAT.eps * value.abs())


def _muon(seen: StepSeen, name: str, gradient: Tensor, params: PretrainParams) -> Direction:
    """The mean, looked ahead, made orthogonal, in the size of an AdamW update.

    The iteration makes an error of the normed matrix larger by its slope at 0, at most; so an error
    of the mean counts by what it is beside the mean's own length.
    """
    before, memory = seen.moments_before[name].mean, params.muon_momentum
    ahead = _follow(_follow(before, gradient, memory), gradient, memory)
    operands = _follow(_follow(before.abs(), gradient.abs(), memory), gradient.abs(), memory)
    scale = 0.2 * math.sqrt(max(ahead.shape))
    length = max(float(ahead.norm()), FLOAT.tiny)
    error = _ROUNDED * FLOAT.eps * float(operands.norm()) / length
    value = scale * _orthogonal(ahead)
    return Direction(value=value, slack=torch.full_like(value, scale * _STEEPEST * error))


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz iterations from the matrix at length 1; none of a matrix of 0."""
    a, b, c = _QUINTIC
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
        change = b * gram + c * gram @ gram
        x = a * x + (x @ change if x.shape[0] > x.shape[1] else change @ x)
    return x


def _follow(mean: Tensor, values: Tensor, memory: float) -> Tensor:
    """A running mean in float64, after some more values."""
    return memory * mean.double() + (1 - memory) * values
