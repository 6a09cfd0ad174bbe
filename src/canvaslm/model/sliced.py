"""How does a CPU attend to slices of the keys without a mask, in few and large operations?

The keys and values of some rows of the batch lie in one buffer each, the window. A block of
queries, a canvas as a rule, reads them from the front to its own end: one slice, for all these rows
and all groups of heads at once. In the two-stream form a canvas stands there twice in turn: its
noisy keys while its own queries read, then its clean keys for the canvases after it. Nothing is
concatenated, and what a block must not see is not in its slice.

Short windows keep their probabilities (:class:`~canvaslm.model.slice_kernels.Products`), up to a
few times the memory of the queries; long ones go through
:class:`~canvaslm.model.slice_kernels.Library`. The arithmetic is float32 at least, since a CPU
without tiles for bfloat16 takes longer over products of half as many bits; one with tiles reads
long windows in bfloat16, where the library's kernel keeps its sums in float32, and goes back
through them in float32, where it is faster. Autocast does not reach operations that write into a
given buffer, nor those below autograd.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from canvaslm.device import multiplies_in_tiles, wide
from canvaslm.model.slice_kernels import Library, Products

_KEPT = 5  # probabilities that a query may keep, in widths of a head
_SCORES = 2**19  # scores written at a time: 2 MiB of float32, the L2 cache of a core


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Which keys the queries of a call see: all before their block, and those of their block.

    Attributes:
        block_tokens: queries in a block; the last may have fewer.
        start: keys before the first block.
        causal: of its own block, a query sees the keys up to itself.
    """

    block_tokens: int
    start: int
    causal: bool

    def are_short(self, q: Tensor) -> bool:
        """Whether queries (B, H, S, E) see so few keys on average that probabilities are kept."""
        n_tokens, width = q.shape[2:]
        return self.start + (n_tokens + self.block_tokens) / 2 <= _KEPT * width


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Queries ``first`` to ``last``; their own keys are ``before`` to ``end`` of the window."""

    first: int
    last: int
    before: int
    end: int


class SlicedAttention(torch.autograd.Function):
    """Attention of blocks of queries to slices of the keys.

    Arguments: q (B, H, S, E); k and v (B, K, n, E), which end with the queries' own; clean_k and
    clean_v, at least those before the last block, or None for one stream; and :class:`Slices`.
    The result lies in memory as (B, S, H, E), the order in which the next projection wants it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        clean_k: Tensor | None,
        clean_v: Tensor | None,
        slices: Slices,
    ) -> Tensor:
        """What the queries take from the values (B, H, S, E)."""
        learns = any(ctx.needs_input_grad)
        call = _Call(q, k, slices, keeps=learns, dtype=_reading_type(q, slices))
        taken, kept = _in_token_order(q), []
        for rows in call.parts():
            keys, values = call.window(rows, k, clean_k), call.window(rows, v, clean_v)
            for block in call.blocks():
                own = call.fold(q[rows], block)
                found, keeps = call.kernel.attend(own, keys.upto(block), values.upto(block))
                call.unfold(found, block, into=taken[rows])
                if learns:
                    kept.append(keeps)
        if learns:
            read_again = taken if call.kernel.reads_taken else None
            ctx.save_for_backward(q, k, v, clean_k, clean_v, read_again, *kept)
            ctx.slices = slices
        return taken

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v, clean_k and clean_v."""
        q, k, v, clean_k, clean_v, taken, *kept = ctx.saved_tensors
        call, keeps = _Call(q, k, ctx.slices, keeps=True, dtype=wide(q.dtype)), iter(kept)
        d_q = _in_token_order(q)
        d_keys, d_values = _Sums(k, clean_k, call.dtype), _Sums(v, clean_v, call.dtype)
        for rows in call.parts():
            keys, values = call.window(rows, k, clean_k), call.window(rows, v, clean_v)
            for block in call.blocks():
                pulled = call.kernel.pull_back(
                    call.fold(gradients[0][rows], block),
                    call.fold(q[rows], block),
                    keys.upto(block),
                    values.upto(block),
                    None if taken is None else call.fold(taken[rows], block),
                    next(keeps),
                )
                call.unfold(pulled[0], block, into=d_q[rows])
                d_keys.add(pulled[1], rows, block)
                d_values.add(pulled[2], rows, block)
        (d_k, d_clean_k), (d_v, d_clean_v) = d_keys.rounded(k), d_values.rounded(v)
        return d_q, d_k, d_v, d_clean_k, d_clean_v, None


class _Call:
    """What the forward and the backward pass of one call agree on."""

    def __init__(
        self, q: Tensor, k: Tensor, slices: Slices, *, keeps: bool, dtype: torch.dtype
    ) -> None:
        self.batch, n_heads, self.n_tokens, self.width = q.shape
        self.n_groups = k.shape[1]
        self.group = n_heads // self.n_groups
        self.slices = slices
        self.dtype = dtype
        self.n_keys = slices.start + self.n_tokens
        self.kernel = Library()
        if slices.are_short(q):
            self.kernel = Products(
                self.group, causal=slices.causal, n_keys=self.n_keys, keeps=keeps
            )

    def parts(self) -> Iterator[slice]:
        """The rows of the batch that go together."""
        scores = self.n_groups * self.group * self.slices.block_tokens * self.n_keys
        step = max(1, _SCORES // scores)
        for first in range(0, self.batch, step):
            yield slice(first, min(first + step, self.batch))

    def blocks(self) -> Iterator[_Block]:
        """The blocks from first to last."""
        start, step = self.slices.start, self.slices.block_tokens
        for first in range(0, self.n_tokens, step):
            last = min(first + step, self.n_tokens)
            yield _Block(first=first, last=last, before=start + first, end=start + last)

    def window(self, rows: slice, own: Tensor, clean: Tensor | None) -> "_Window":
        """Keys or values of some rows of the batch."""
        clean = None if clean is None else clean[rows]
        return _Window(own[rows], clean, self.slices.start, self.dtype)

    def fold(self, x: Tensor, block: _Block) -> Tensor:
        """Rows (b·K, tokens·H/K, E) of heads x (b, H, S, E); a view where its strides allow."""
        x = _widened(self._by_token(x, block), self.dtype)
        return x.reshape(x.shape[0] * x.shape[1], -1, self.width)

    def unfold(self, rows: Tensor, block: _Block, *, into: Tensor) -> None:
        """Write rows back as heads, rounded to the type of ``into``."""
        x = self._by_token(into, block)
        x.copy_(rows.view(x.shape))

    def _by_token(self, x: Tensor, block: _Block) -> Tensor:
        b, _, n, E = x.shape
        x = x.view(b, self.n_groups, self.group, n, E).transpose(2, 3)
        return x[:, :, block.first : block.last]  # (b, K, tokens, H/K, E)


class _Window:
    """Keys or values (b·K, n, E) in which each block, in turn, is its queries' and then clean.

    Args:
        own: those of the queries' own stream (b, K, n, E).
        clean: those of the clean stream, or None for one stream.
        start: keys before the first block.
        dtype: the wide type.
    """

    def __init__(self, own: Tensor, clean: Tensor | None, start: int, dtype: torch.dtype) -> None:
        self._own, self._clean, self._n_clean = own, clean, 0
        if clean is None:
            self._room = _widened(own, dtype)
        else:
            b, K, n, E = own.shape
            self._room = own.new_empty(b, K, start + n, E, dtype=dtype)
        self._flat = self._room.flatten(0, 1)

    def upto(self, block: _Block) -> Tensor:
        """All slots to the block's end; blocks come in their order."""
        if self._clean is not None:
            new = slice(self._n_clean, block.before)
            self._room[:, :, new] = self._clean[:, :, new]
            self._n_clean = block.before
            self._room[:, :, block.before : block.end] = self._own[:, :, block.first : block.last]
        return self._flat[:, : block.end]


class _Sums:
    """Gradients of keys or values, summed over blocks in the wide type."""

    def __init__(self, own: Tensor, clean: Tensor | None, dtype: torch.dtype) -> None:
        self._own = own.new_zeros(own.shape, dtype=dtype)
        self._clean = None if clean is None else clean.new_zeros(clean.shape, dtype=dtype)

    def add(self, gradient: Tensor, rows: slice, block: _Block) -> None:
        """Add that of a block's slice (b·K, end, E)."""
        own = self._own[rows].flatten(0, 1)
        if self._clean is None:
            own[:, : block.end].add_(gradient)
        else:
            own[:, block.first : block.last] = gradient[:, block.before :]
            clean = self._clean[rows].flatten(0, 1)
            clean[:, : block.before].add_(gradient[:, : block.before])

    def rounded(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The sums for the own and for the clean ones, in the type of ``like``."""
        return self._own.to(like.dtype), None if self._clean is None else self._clean.to(like.dtype)


def _reading_type(q: Tensor, slices: Slices) -> torch.dtype:
    """In which queries meet their keys on the way forward."""
    is_fast = q.dtype == torch.bfloat16 and multiplies_in_tiles()
    return q.dtype if is_fast and not slices.are_short(q) else wide(q.dtype)


def _in_token_order(x: Tensor) -> Tensor:
    """Room for heads (B, H, S, E) that lies in memory as (B, S, H, E)."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in another type; then contiguous, in one pass."""
    return x if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)
