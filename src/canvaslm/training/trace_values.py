"""What is kept of one tensor, so that a step can be told by its numbers afterwards?"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Stream = Literal["clean", "first", "noisy", "loss", "parameters", ""]  # "": outside of any pass

# What a parameter has before a step: its value, moments of its gradient, its average.
STANDING = ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema")
_WINDOWS, _POSITIONS = 2, 4  # of a sample: a five hundredth of a tensor of the laptop's shape
SAMPLED_ROWS = _WINDOWS * _POSITIONS
_VALUES = 1024  # of a tensor that has no positions
SAMPLED = f"at most {_POSITIONS} positions, evenly apart, of the first {_WINDOWS} windows, in full"


@dataclass(frozen=True, kw_only=True)
class Values:
    """Statistics of a tensor's values; those over finite values are None where there is none."""

    abs_max: float | None  # over the finite values
    mean: float | None  # over the finite values
    n_nonfinite: int
    n_values: int

    @property
    def nonfinite_share(self) -> float | None:
        """Share of values that are NaN or infinite; None for a tensor without values."""
        return self.n_nonfinite / self.n_values if self.n_values else None


@dataclass(frozen=True, kw_only=True)
class TracedTensor:
    """One tensor of one step, in the order of time.

    Attributes:
        step: the optimiser step.
        micro_batch: which part of the step, from 0.
        stream: the pass; ``first`` is that of self-conditioning.
        order: its place among all tensors of the step; a module comes after its own parts.
        module: name of the module, of a pass of the whole model, or of a parameter.
        tensor: ``input``, ``output``, ``gradient`` of a module's output; ``gradient`` of a
            parameter, or what it has before a step, as listed above.
        values: its statistics.
        sampled: whether they are those of a sample.
        windows: numbers of the windows that values which are not finite belong to: those of the
            rows that hold them, or of the whole micro-batch where rows are no windows.
    """

    step: int
    micro_batch: int
    stream: Stream
    order: int
    module: str
    tensor: str
    values: Values
    sampled: bool
    windows: tuple[int, ...]

    @property
    def stood_before(self) -> bool:
        """Whether it is a weight or a moment, which the step found as it is."""
        return self.tensor in STANDING


def summarise(tensor: Tensor) -> Values:
    """Statistics over all values of a tensor."""
    tensor = tensor.detach()
    n_values = tensor.numel()
    finite = tensor.isfinite()
    n_finite = int(finite.sum())
    if not n_finite:
        return Values(abs_max=None, mean=None, n_nonfinite=n_values, n_values=n_values)
    kept = torch.where(finite, tensor, 0)
    return Values(
        abs_max=kept.abs().max().item(),
        mean=kept.sum(dtype=torch.float64).item() / n_finite,
        n_nonfinite=n_values - n_finite,
        n_values=n_values,
    )


def sample(tensor: Tensor) -> Tensor:
    """A view of a few positions of the first windows of (B, ..., S, D), at full width."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.ndim < 3:
        return tensor.flatten()[:_VALUES]
    size, strides = list(tensor.shape), list(tensor.stride())
    apart = -(-size[-2] // _POSITIONS)
    size[0], size[-2] = min(size[0], _WINDOWS), -(-size[-2] // apart)
    strides[-2] *= apart
    return tensor.as_strided(size, strides)  # one call, where slices are one for each dimension


def bad_rows(tensor: Tensor) -> np.ndarray | None:
    """(B,) bool, the rows of (B, S, D) with a value that is not finite; None without rows."""
    if tensor.ndim < 3:
        return None
    return (~tensor.detach().isfinite().flatten(1).all(1)).cpu().numpy()
