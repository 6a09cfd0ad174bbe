"""How many nats does a head lose on its targets, without a table of tokens × vocabulary?

``dense_cross_entropy`` is the specification. ``chunked_cross_entropy`` is the product: it walks
over chunks of the vocabulary, keeps the log-sum-exp of each row, and computes each chunk again in
the backward pass, so that the largest tensor is one (N, vocab_chunk).
"""

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from canvaslm.errors import InputError

IGNORED = -100  # a target that carries no loss

Reduction = Literal["none", "sum", "mean"]


class TargetError(InputError, ValueError):
    """A target that is neither a token of the vocabulary nor ``IGNORED``."""


def dense_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: Reduction
) -> Tensor:
    """Cross-entropy of ``softmax(hidden @ weight.T)`` in nats, with all logits in memory.

    Arguments, result and refusals are those of :func:`chunked_cross_entropy`.
    """
    _check(hidden, weight, targets, reduction)
    dtype = _product_dtype(hidden, weight)
    logits = functional.linear(hidden.to(dtype), weight.to(dtype)).flatten(0, -2)
    nats = functional.cross_entropy(
        logits.to(_wide(logits.dtype)), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return _reduce(nats.view_as(targets), targets, reduction)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_chunk: int, reduction: Reduction
) -> Tensor:
    """Cross-entropy of ``softmax(hidden @ weight.T)`` in nats, a vocabulary chunk at a time.

    Args:
        hidden: (..., D) float.
        weight: (V, D) float, the head.
        targets: (...) int64 in [0, V), or ``IGNORED``, whose loss and gradients are exactly 0.
        vocab_chunk: columns of logits in memory at once; changes no value beyond rounding.
        reduction: ``none`` gives (...), ``sum`` a scalar, ``mean`` the sum over counted targets
            divided by their number, and 0 when there is none.

    Returns:
        Nats, float32, or float64 for float64 inputs. Products are computed in autocast's type
        where autocast is on, else in the wider type of the two inputs; sums in float32 or wider.

    Raises:
        TargetError: a target lies outside; it is both an InputError and a ValueError.
        InputError: the reduction is unknown or ``vocab_chunk`` is not positive.
    """
    _check(hidden, weight, targets, reduction)
    if vocab_chunk < 1:
        raise InputError("vocab_chunk", expected="at least 1", got=str(vocab_chunk), fix="raise it")
    counted = targets.flatten() != IGNORED
    rows = hidden.flatten(0, -2)[counted]  # (N, D)
    dtype = _product_dtype(hidden, weight)
    counted_nats = _ChunkedNats.apply(rows, weight, targets.flatten()[counted], vocab_chunk, dtype)
    nats = counted_nats.new_zeros(targets.numel()).masked_scatter(counted, counted_nats)
    return _reduce(nats.view_as(targets), targets, reduction)


class _ChunkedNats(torch.autograd.Function):
    """Nats of each row (N,), with a backward pass that honours each row's incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        lse = hidden.new_full(hidden.shape[:1], -torch.inf, dtype=_wide(dtype))
        chosen = torch.zeros_like(lse)
        with _no_autocast(hidden):
            for first in range(0, len(weight), vocab_chunk):
                columns = weight[first : first + vocab_chunk]
                logits = _product(hidden, columns.T, dtype)
                lse = torch.logaddexp(lse, logits.logsumexp(-1))
                column, inside = _locate(targets, first, len(columns))
                chosen += torch.where(inside, logits.gather(1, column), 0).squeeze(1)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.vocab_chunk, ctx.dtype = vocab_chunk, dtype
        return lse - chosen

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden, dtype=lse.dtype)
        d_weight = torch.empty_like(weight)
        with _no_autocast(hidden):
            for first in range(0, len(weight), ctx.vocab_chunk):
                columns = weight[first : first + ctx.vocab_chunk]
                d_logits = _product(hidden, columns.T, ctx.dtype).sub_(lse[:, None]).exp_()
                column, inside = _locate(targets, first, len(columns))
                d_logits.scatter_add_(1, column, -inside.to(lse.dtype))
                d_logits.mul_(gradients[0][:, None])
                d_hidden += _product(d_logits, columns, ctx.dtype)
                # A chunk owns its rows of the head: one product, with no partial sums to round.
                d_weight[first : first + len(columns)] = _product(d_logits.T, hidden, ctx.dtype)
        return d_hidden.to(hidden.dtype), d_weight, None, None, None


def _locate(targets: Tensor, first: int, n_columns: int) -> tuple[Tensor, Tensor]:
    """Column (N, 1) of each target inside a chunk, and whether (N, 1) it lies there at all."""
    column = (targets - first)[:, None]
    inside = (column >= 0) & (column < n_columns)
    return column.clamp(0, n_columns - 1), inside


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` of values rounded to ``dtype``, summed and returned in float32 or wider.

    A score of 20 nats returned in bfloat16 would be off by up to 0.06.
    """
    a, b, wide = a.to(dtype), b.to(dtype), _wide(dtype)
    if a.is_cuda and dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _reduce(nats: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return nats
    total = nats.sum()
    if reduction == "sum":
        return total
    return total / (targets != IGNORED).sum().clamp(min=1)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> None:
    """Refuse what would otherwise read memory out of bounds, or mean something else."""
    assert hidden.shape[:-1] == targets.shape, "one target for each hidden state"
    if reduction not in ("none", "sum", "mean"):
        raise InputError(
            "reduction", expected="none, sum or mean", got=repr(reduction), fix="choose one"
        )
    V = len(weight)
    outside = ((targets < 0) & (targets != IGNORED)) | (targets >= V)
    if outside.any():
        position = tuple(outside.nonzero()[0].tolist())
        raise TargetError(
            f"target at {position}",
            expected=f"a token in [0, {V}) or {IGNORED}",
            got=str(int(targets[position])),
            fix="train and score with the tokenizer that the shards were packed with",
        )


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Keep the types that were chosen; the backward pass runs outside autocast anyway."""
    return torch.autocast(tensor.device.type, enabled=False)
