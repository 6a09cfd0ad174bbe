"""How many nats does a head lose on its targets, without a table of tokens × vocabulary?

``dense_cross_entropy`` is the specification. ``chunked_cross_entropy`` is the product: it walks
over blocks of tokens and makes the gradients on its way forward, while the exponentials of a block
are at hand, so that it needs three products with the head and no table of all scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from canvaslm.device import wide
from canvaslm.errors import InputError
from canvaslm.scores import RowSums, Scores, exact_types, product_dtype

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
    dtype = product_dtype(hidden, weight)
    logits = functional.linear(hidden.to(dtype), weight.to(dtype)).flatten(0, -2)
    nats = functional.cross_entropy(
        logits.to(wide(logits.dtype)), targets.flatten(), ignore_index=IGNORED, reduction="none"
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
        vocab_chunk: words whose scores are worked on at once; changes no value beyond rounding.
            Where a gradient is wanted, exponentials of 512 tokens for all words are in memory, and
            on an accelerator of as many tokens as make up N × vocab_chunk.
        reduction: ``none`` gives (...), ``sum`` a scalar, ``mean`` the sum over counted targets
            divided by their number, and 0 when there is none.

    Returns:
        Nats, float32, or float64 for float64 inputs. Products are computed in autocast's type
        where autocast is on, else in the wider type of the two inputs, or in float32 where the
        machine is faster with it; sums in float32 or wider. For ``sum`` and ``mean`` the gradients
        are made here, for ``none`` in the backward pass, as each row's pull is known only there.

    Raises:
        TargetError: a target lies outside; it is both an InputError and a ValueError.
        InputError: the reduction is unknown or ``vocab_chunk`` is not positive.
    """
    _check(hidden, weight, targets, reduction)
    work = _Work(vocab_chunk=vocab_chunk, dtype=product_dtype(hidden, weight))
    flat, words, places = _counted(hidden, targets)
    wants = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if reduction == "none":
        nats = _Each.apply(flat, weight, words, work) if wants else _nats(flat, weight, words, work)
        if places is not None:
            nats = nats.new_zeros(targets.numel()).index_copy(0, places, nats)
        return nats.view_as(targets)
    divisor = 1 if reduction == "sum" else max(len(words), 1)
    if wants:
        return _Total.apply(flat, weight, words, work, divisor)
    return _nats(flat, weight, words, work).sum() / divisor


@dataclass(frozen=True, kw_only=True)
class _Work:
    """How the scores are walked."""

    vocab_chunk: int
    dtype: torch.dtype

    def scores(self, hidden: Tensor, weight: Tensor, *, keep: bool) -> Scores:
        return Scores(
            weight, n_rows=len(hidden), vocab_chunk=self.vocab_chunk, dtype=self.dtype, keep=keep
        )


class _Total(torch.autograd.Function):
    """The sum of all rows over ``divisor``, with the gradients made on the way forward.

    They are handed out once, so that nothing is copied. A graph that is walked again makes them
    again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, work: _Work, divisor: int
    ) -> Tensor:
        ctx.work, ctx.pull, ctx.wants = work, 1.0 / divisor, ctx.needs_input_grad[:2]
        ctx.save_for_backward(hidden, weight, targets)
        nats, ctx.made = _nats_with_gradients(hidden, weight, targets, work, ctx.pull, ctx.wants)
        return nats.sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *pulls: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        made, ctx.made = ctx.made, None
        if made is None:
            hidden, weight, targets = ctx.saved_tensors
            made = _nats_with_gradients(hidden, weight, targets, ctx.work, ctx.pull, ctx.wants)[1]
        d_hidden, d_weight = made.scaled(pulls[0])
        return d_hidden, d_weight, None, None, None


class _Each(torch.autograd.Function):
    """Nats of each row (N,), with a backward pass that honours each row's incoming gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, work: _Work) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(hidden, weight, targets)
        return _nats(hidden, weight, targets, work)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *pulls: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        _, made = _nats_with_gradients(hidden, weight, targets, ctx.work, pulls[0], wants)
        d_hidden, d_weight = made.in_types_of_inputs()
        return d_hidden, d_weight, None, None


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Gradients in float32 or wider, and the types that the inputs have."""

    d_hidden: Tensor | None
    d_weight: Tensor | None
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype

    def scaled(self, pull: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Times the gradient that comes in; that costs nothing where it is known to be 1."""
        if pull.is_cuda or pull.item() != 1.0:
            for gradient in (self.d_hidden, self.d_weight):
                if gradient is not None:
                    gradient.mul_(pull)
        return self.in_types_of_inputs()

    def in_types_of_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if self.d_hidden is None else self.d_hidden.to(self.hidden_dtype),
            None if self.d_weight is None else self.d_weight.to(self.weight_dtype),
        )


def _nats(hidden: Tensor, weight: Tensor, targets: Tensor, work: _Work) -> Tensor:
    """Nats of each row (N,), by one product."""
    scores = work.scores(hidden, weight, keep=False)
    nats = hidden.new_empty(len(hidden), dtype=wide(work.dtype))
    with torch.no_grad(), exact_types(hidden, work.dtype):
        for block in scores.blocks(len(hidden)):
            rows = scores.factor_of(hidden[block])
            nats[block] = _row_nats(scores.exponentials(rows, targets=targets[block]))
    return nats


def _nats_with_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    work: _Work,
    pull: Tensor | float,
    wants: Sequence[bool],
) -> tuple[Tensor, _Made]:
    """Nats (N,) and the gradients of their sum weighted by ``pull``, by three products.

    With e the exponentials of a row and Z their sum, its gradient to the scores is
    ``pull * (e / Z - onehot)``. The table gets ``e - Z`` at the target, computed from the sums so
    that it is exact where e is nearly Z; ``pull / Z`` goes into the factors that have D columns
    rather than V.
    """
    scores = work.scores(hidden, weight, keep=True)
    nats = hidden.new_empty(len(hidden), dtype=wide(work.dtype))
    d_hidden = torch.empty_like(hidden, dtype=nats.dtype) if wants[0] else None
    d_weight = weight.new_empty(weight.shape, dtype=nats.dtype) if wants[1] else None
    if d_weight is not None and not len(hidden):
        d_weight.zero_()
    with exact_types(hidden, work.dtype):
        for block in scores.blocks(len(hidden)):
            rows, words = hidden[block], targets[block]
            sums = scores.exponentials(scores.factor_of(rows), targets=words)
            nats[block] = _row_nats(sums)
            pulls = (pull[block] if isinstance(pull, Tensor) else pull) / sums.total
            slopes = scores.table[: len(rows)]
            at_target = _target_slopes(sums).to(slopes.dtype)
            # Not scatter_, which makes a copy of the whole table where that is bfloat16.
            slopes.index_put_((torch.arange(len(rows), device=rows.device), words), at_target)
            scaled = scores.factor_beside_table(rows * pulls[:, None])
            for columns, part in scores.tiles():
                slope = slopes[:, columns]
                if d_hidden is not None:
                    add = columns.start > 0
                    scores.descend_into(d_hidden[block], slope, part, add=add)
                if d_weight is not None:
                    add = block.start > 0
                    scores.product_into(d_weight[columns], slope.T, scaled, add=add)
            if d_hidden is not None:
                d_hidden[block].mul_(pulls[:, None])
    made = _Made(
        d_hidden=d_hidden,
        d_weight=d_weight,
        hidden_dtype=hidden.dtype,
        weight_dtype=weight.dtype,
    )
    return nats, made


def _row_nats(sums: RowSums) -> Tensor:
    assert sums.chosen is not None
    return sums.total.log() - sums.chosen


def _target_slopes(sums: RowSums) -> Tensor:
    assert sums.chosen is not None
    return sums.chosen.exp() - sums.total


def _counted(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows (N, D) and targets (N,) that carry loss, and their places where not all do."""
    flat, words = hidden.flatten(0, -2), targets.flatten()
    counted = words != IGNORED
    if bool(counted.all()):
        return flat, words, None
    places = counted.nonzero().squeeze(1)
    return flat.index_select(0, places), words.index_select(0, places), places


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
