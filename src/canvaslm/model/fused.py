"""What do a norm, a rotation and a gate need to keep, and how often must they touch memory?

Between its matrix products a block is bound by memory. Autograd keeps every operand of a formula
and writes every term of its derivative into fresh memory; here each formula keeps what its
derivative needs and no more, and works in place. The formulas themselves stand in
``docs/model.md``; ``tests/model/test_fused.py`` holds each against autograd's own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class ScaledNorm(torch.autograd.Function):
    """``weight · x / sqrt(mean(x²) + eps)`` over the last dimension; keeps x and one number a row.

    Arguments: x (..., D) float32 or float64, weight (D,) of the same type, eps.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The normed x (..., D)."""
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """The gradients of x and weight."""
        x, weight, inverse = ctx.saved_tensors
        product = gradients[0] * x
        rows = product.reshape(-1, x.shape[-1])  # a copy only where x is a view of heads
        d_weight = rows.T.mv(inverse.flatten())
        # Along x itself the norm undoes a part of every change; `along` is that part's size.
        along = rows.mv(weight).view_as(inverse)
        along.mul_(inverse.pow(3).div_(-x.shape[-1]))
        d_x = torch.mul(gradients[0], weight, out=product).mul_(inverse).addcmul_(x, along)
        return d_x, d_weight, None


class Rotate(torch.autograd.Function):
    """Turn the pair (i, i + E/2) of each head by its position's angle; keeps the tables alone.

    Arguments: x (B, H, S, E) in any order of strides, cos and sin (S, E/2) of the wide type. The
    result has the type of x. Its gradient is the turn by the opposite angle, and lies in memory as
    (B, S, H, E), the order in which the projection before it wants it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The turned x (B, H, S, E)."""
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1, torch.empty(x.shape, dtype=cos.dtype, device=x.device))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        """The gradient of x."""
        cos, sin = ctx.saved_tensors
        (gradient,) = gradients
        B, H, S, E = gradient.shape
        room = torch.empty(B, S, H, E, dtype=cos.dtype, device=gradient.device).transpose(1, 2)
        return _turn(gradient, cos, sin, -1, room), None, None


class Gated(torch.autograd.Function):
    """``silu(gate) · up``; keeps both operands. Arguments: gate and up (..., F) of one type."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """The gated up (..., F)."""
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up."""
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        d_up = functional.silu(gate).mul_(gradient)
        d_gate = gradient * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, d_up


def _turn(x: Tensor, cos: Tensor, sin: Tensor, way: int, room: Tensor) -> Tensor:
    """Turn x by the angles, forwards or backwards, into ``room``; return it in the type of x."""
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    torch.mul(wide, torch.cat((cos, cos), dim=-1), out=room)
    turned_first, turned_second = room.chunk(2, dim=-1)
    turned_first.addcmul_(second, sin, value=-way)
    turned_second.addcmul_(first, sin, value=way)
    return room.to(x.dtype)
