"""What do the scores of a head sum to, when the table tokens × vocabulary is too large to keep?

``hidden @ weight.T`` is walked a block of tokens and a tile of the vocabulary at a time, and only
exponentials are kept of it. They are taken of the scores as they are wherever that is exact, since
a subtraction, or a maximum, would be one more pass over the whole table: the sum of a row tells
afterwards whether it was. A row whose sum ran out of its range is done again, relative to its
exact maximum.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.device import multiplies_in_tiles, wide
from canvaslm.errors import InputError

# A sum of exponentials within these bounds has lost nothing in float32: no term has overflowed, and
# what has underflowed is below 1e-12 of the sum.
_LEAST_SUM, _MOST_SUM = 1e-25, 1e30
_PLAIN_SCORE = 40.0  # leaves 29 nats to the upper bound, and 17 to the lower one
# Measured with AVX-512 at widths of 192 to 1,024: with fewer rows the gradient of the head is read
# and written too often for the products that it receives; with more, nothing is gained.
_BLOCK_ROWS, _CPU_TILE = 512, 2048
_SEEN_WORDS = 1024  # whose mean stands for that of all words
_LINE = 16  # float32 values in a cache line


@dataclass(frozen=True, kw_only=True)
class SoftEmbedding:
    """What :func:`soft_embedding` finds in one pass: (..., D) vectors, and (...) nats."""

    vectors: Tensor  # softmax(hidden @ weight.T) @ table, in the type of hidden
    lse: Tensor  # log-sum-exp of each row of scores, float32 or wider


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """What a block of tokens (n, D) comes to over all words; Z is a score less its row's shift."""

    total: Tensor  # (n,) sum of exp(Z)
    shift: Tensor  # (n,) score - Z, the same for all words
    chosen: Tensor | None  # (n,) Z of the target
    mixed: Tensor | None  # (n, D) exp(Z) @ table


class Scores:
    """The scores of tokens under one head, turned into exponentials block by block.

    Args:
        weight: (V, D) the head.
        n_rows: tokens there will be in all.
        vocab_chunk: words in a tile. On an accelerator ``n_rows * vocab_chunk`` scores may be in
            memory at once; on a CPU, where caches are small, tiles have 2,048 words at most, and
            those of 512 tokens are.
        dtype: of the factors of products; sums are float32 or wider.
        keep: whether a block's exponentials stay for all words, in ``table``, or for one tile. A
            CPU whose products round to bfloat16 keeps them so, of twice as many tokens.

    Attributes:
        table: (block_rows, V or more) scratch memory, which each block uses again.
        block_rows: most tokens in a block.
    """

    def __init__(
        self, weight: Tensor, *, n_rows: int, vocab_chunk: int, dtype: torch.dtype, keep: bool
    ) -> None:
        if vocab_chunk < 1:
            raise InputError(
                "vocab_chunk", expected="at least 1", got=str(vocab_chunk), fix="raise it"
            )
        V = len(weight)
        on_cpu = weight.device.type == "cpu"
        self._weight = weight
        self._dtype = dtype
        self._keep = keep
        self._tile = min(vocab_chunk, V, _CPU_TILE if on_cpu else V)
        self._is_careful = False  # until scores are seen that need it
        narrows = keep and on_cpu and dtype == torch.bfloat16 and multiplies_in_tiles()
        columns = V if keep else self._tile
        most = max(n_rows * vocab_chunk // columns, _BLOCK_ROWS)
        if on_cpu:
            most = _BLOCK_ROWS * (2 if narrows else 1)
        n_blocks = math.ceil(n_rows / most)
        self.block_rows = math.ceil(n_rows / max(n_blocks, 1))
        # One cache line more than whole ones: rows at a power of two apart would share cache sets.
        columns = math.ceil(columns / _LINE) * _LINE + _LINE
        kept = dtype if narrows else wide(dtype)
        self.table = weight.new_empty(self.block_rows, columns, dtype=kept)
        self._scratch = None if keep else self.table  # where the scores of a tile are made
        self._centre = None
        if narrows:
            # Products take words in pairs: to an odd last one, 0 times what follows is added.
            self.table[:, V:] = 0
            # Scores are never narrow: of 20 nats, bfloat16 would lose up to 0.06.
            self._scratch = weight.new_empty(self.block_rows, self._tile, dtype=wide(dtype))
            self._centre = _middle_of(weight)

    def blocks(self, n_rows: int) -> Iterator[slice]:
        """The blocks of tokens, of equal size but for the last."""
        for first in range(0, n_rows, max(self.block_rows, 1)):
            yield slice(first, min(first + self.block_rows, n_rows))

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Columns of scores, with the rows of the head that they belong to, ready for a product."""
        for first in range(0, len(self._weight), self._tile):
            columns = slice(first, min(first + self._tile, len(self._weight)))
            yield columns, self._factor(self._weight[columns])

    def factor_of(self, hidden: Tensor) -> Tensor:
        """Tokens as a factor of products with the head."""
        return self._factor(hidden)

    def factor_beside_table(self, hidden: Tensor) -> Tensor:
        """Tokens as a factor of products with ``table``."""
        return hidden.to(self._dtype if hidden.is_cuda else self.table.dtype)

    def exponentials(
        self, rows: Tensor, *, targets: Tensor | None = None, mix: Tensor | None = None
    ) -> RowSums:
        """Sum the exponentials of a block (n, D), and leave them in ``table`` where it keeps them.

        Args:
            rows: the tokens, from :meth:`factor_of`.
            targets: (n,) a word for each token, whose score is wanted.
            mix: (V, D) a table, of which ``exp(Z) @ mix`` is wanted.
        """
        sums = self._sweep(rows, None, targets, mix)
        least, most = (float(bound) for bound in sums.total.aminmax())
        if not (least > _LEAST_SUM and most < _MOST_SUM):  # NaN is neither
            self._is_careful = True
            is_good = (sums.total > _LEAST_SUM) & (sums.total < _MOST_SUM)
            shift = torch.where(is_good, sums.shift, self._largest(rows))
            sums = self._sweep(rows, shift, targets, mix)
        return sums

    def descend_into(self, out: Tensor, slopes: Tensor, words: Tensor, *, add: bool) -> None:
        """``out (+)= slopes @ words`` for a tile, of slopes that sum to 0 over all words.

        So what all words have in common comes to nothing; but slopes that were rounded do not sum
        to 0, and it is taken away beforehand.
        """
        if self._centre is not None:
            rounded = words.new_empty(words.shape, dtype=self._dtype)
            words = torch.sub(words, self._centre, out=rounded)
        self.product_into(out, slopes, words, add=add)

    def product_into(self, out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
        """``out (+)= a @ b``, with factors of the product's type and sums in that of ``out``.

        A score of 20 nats returned in bfloat16 would be off by up to 0.06.
        """
        if a.is_cuda and self._dtype != out.dtype:
            product = torch.mm(a.to(self._dtype), b.to(self._dtype), out_dtype=out.dtype)
            out.add_(product) if add else out.copy_(product)
        elif a.dtype != out.dtype:  # a part of the table that is narrow
            product = torch.mm(a, b.to(a.dtype))
            out.add_(product) if add else out.copy_(product)
        elif add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)

    def _sweep(
        self, rows: Tensor, shift: Tensor | None, targets: Tensor | None, mix: Tensor | None
    ) -> RowSums:
        total = chosen = None
        mixed = None if mix is None else self.table.new_empty(rows.shape)
        for columns, words in self.tiles():
            scores = self._scores(rows, words, columns)
            if shift is None and self._is_careful:
                shift = _likely_shift(scores)
            if shift is not None:
                scores.sub_(shift[:, None])
            if targets is not None:
                chosen = _plus(chosen, self._score_of(targets, scores, columns))
            total = _plus(total, scores.exp_().sum(1))
            if self._keep and self._scratch is not None:
                self.table[: len(rows), columns] = scores
            if mixed is not None and mix is not None:
                mixing = words if mix is self._weight else self._factor(mix[columns])
                self.product_into(mixed, scores, mixing, add=columns.start > 0)
        assert total is not None, "a head without words"
        shift = torch.zeros_like(total) if shift is None else shift
        return RowSums(total=total, shift=shift, chosen=chosen, mixed=mixed)

    def _scores(self, rows: Tensor, words: Tensor, columns: slice) -> Tensor:
        """A tile of scores (n, columns), in scratch memory."""
        if self._scratch is None:
            scores = self.table[: len(rows), columns]
        else:
            scores = self._scratch[: len(rows), : len(words)]
        self.product_into(scores, rows, words.T, add=False)
        return scores

    def _largest(self, rows: Tensor) -> Tensor:
        """The largest score (n,) of each row, by a pass of its own."""
        tiles = (self._scores(rows, words, columns).amax(1) for columns, words in self.tiles())
        largest = next(tiles)
        for other in tiles:
            largest = torch.maximum(largest, other)
        return largest

    def _score_of(self, targets: Tensor, scores: Tensor, columns: slice) -> Tensor:
        """The score (n,) of each row's target where it lies in these columns, else 0."""
        if scores.shape[1] == len(self._weight):
            return scores.gather(1, targets[:, None]).squeeze(1)
        place = targets - columns.start
        inside = (place >= 0) & (place < scores.shape[1])
        found = scores.gather(1, place.clamp(0, scores.shape[1] - 1)[:, None]).squeeze(1)
        return torch.where(inside, found, 0)

    def _factor(self, tensor: Tensor) -> Tensor:
        """On CUDA in the product's type; on CPU, where no product widens, upcast exactly."""
        return tensor.to(self._dtype if tensor.is_cuda else wide(self._dtype))


@torch.no_grad()
def soft_embedding(
    hidden: Tensor, weight: Tensor, table: Tensor | None = None, *, vocab_chunk: int
) -> SoftEmbedding:
    """``softmax(hidden @ weight.T) @ table`` and the log-sum-exp, in one pass of two products.

    Nothing is differentiable.

    Args:
        hidden: (..., D) float.
        weight: (V, D) float, the head.
        table: (V, D) float, the table of words; None where the head is that.
        vocab_chunk: scores in memory at once, for each token; changes no value beyond rounding.
    """
    dtype = product_dtype(hidden, weight)
    flat = hidden.flatten(0, -2)
    scores = Scores(weight, n_rows=len(flat), vocab_chunk=vocab_chunk, dtype=dtype, keep=False)
    vectors = torch.empty_like(flat)
    lse = flat.new_empty(len(flat), dtype=wide(dtype))
    with exact_types(flat, dtype):
        for block in scores.blocks(len(flat)):
            rows = scores.factor_of(flat[block])
            sums = scores.exponentials(rows, mix=weight if table is None else table)
            assert sums.mixed is not None
            vectors[block] = sums.mixed.div_(sums.total[:, None])
            lse[block] = sums.total.log() + sums.shift
    return SoftEmbedding(
        vectors=vectors.view_as(hidden),
        lse=lse.view(hidden.shape[:-1]),
    )


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's type where autocast is on, else the wider of the two."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return torch.promote_types(hidden.dtype, weight.dtype)


@contextmanager
def exact_types(tensor: Tensor, dtype: torch.dtype) -> Iterator[None]:
    """Keep the types that were chosen, and let a CPU that multiplies bfloat16 faster do so.

    Such a CPU has AMX. It is given float32 factors and rounds them on its way, so that the sums,
    unlike those of a product of bfloat16 tensors, come back in float32. A CPU with AVX-512 alone
    multiplies bfloat16 at half the rate of float32, and is left to use what it was given.
    """
    rounds = tensor.device.type == "cpu" and dtype == torch.bfloat16 and multiplies_in_tiles()
    with torch.autocast(tensor.device.type, enabled=False), _rounded_products(rounds):
        yield


def _rounded_products(rounds: bool) -> AbstractContextManager[None]:
    return _bfloat16_inside() if rounds else nullcontext()


@contextmanager
def _bfloat16_inside() -> Iterator[None]:
    settings = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue] - set late
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _middle_of(weight: Tensor) -> Tensor:
    """The mean (D,) of words all over the head; which ones does not matter to any result.

    It is 0 where it lies within the spread of the words: taken away, it would only cost weights
    that are bfloat16 already their last bits.
    """
    seen = weight[:: max(len(weight) // _SEEN_WORDS, 1)].to(wide(weight.dtype))
    spread, mean = torch.std_mean(seen, 0, correction=0)
    return torch.where(mean.abs() > spread, mean, 0)


def _likely_shift(scores: Tensor) -> Tensor:
    """What to subtract (n,), judging by the first words: 0 from scores of a usual size.

    It depends on no other row, and a sum relative to a score of its own row is 1 at least.
    """
    seen = scores.amax(1)
    return torch.where(seen.abs() <= _PLAIN_SCORE, 0, seen)


def _plus(sum_so_far: Tensor | None, part: Tensor) -> Tensor:
    return part if sum_so_far is None else sum_so_far.add_(part)
