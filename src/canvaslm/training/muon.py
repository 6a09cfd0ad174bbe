"""How does the gradient of a matrix become an orthogonal update?

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): a running mean of the gradient
with Nesterov's look ahead, brought near to the orthogonal matrix beside it. All directions of a
matrix then move by about the same length, whatever the few largest singular values say.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0, so that few iterations are enough
_ITERATIONS = 5
_LEAST_NORM = 1e-7  # a gradient of 0 stays 0
_ADAMW_RMS = 0.2  # of an AdamW update's values, in units of its rate (Liu et al. 2025, section 2.2)


class Muon(torch.optim.Optimizer):
    """Muon as in ``torch.optim.Muon``, with the iteration in a type that one can choose.

    The update is scaled to the size of an AdamW update at the same rate (``match_rms_adamw``, Liu
    et al. 2025, arXiv 2502.16982), whatever the shape of the matrix.

    Args:
        groups: parameter groups, of matrices alone.
        lr: learning rate.
        momentum: memory of the gradient's mean.
        weight_decay: decoupled decay.
        dtype: the type of the iteration.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every matrix that has a gradient."""
        assert closure is None, "the loss is not taken again"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group)

    def _move(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[matrix]["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(mean, group["momentum"])
        update = orthogonalise(ahead.to(self._dtype))
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * _ADAMW_RMS * math.sqrt(max(matrix.shape)))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Bring the singular values of a matrix near to 1, in its own type.

    Five Newton-Schulz iterations of a quintic polynomial. They end between about 0.7 and 1.2 and
    do not converge further; the largest gain on the way is what small ones need.

    Args:
        matrix: (A, B).

    Returns:
        (A, B), of the same singular vectors.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the smaller of two possible Gram matrices
    x = x / x.norm().clamp(min=_LEAST_NORM)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def orthogonalisation_flops(shape: torch.Size) -> float:
    """Floating-point operations of :func:`orthogonalise` for a matrix (A, B)."""
    short, long = min(shape), max(shape)
    return _ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)
