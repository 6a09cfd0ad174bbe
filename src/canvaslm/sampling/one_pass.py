"""What do hidden states say about each position, in one pass over the vocabulary?

Maximum, argmax, entropy and the draw all come out of one pass. Positions go in blocks, so that no
more logits exist than those of one block, and words in chunks, so that what a chunk's product has
made is read while it is near. The words are also cut into bins of 128. Each bin leaves three
numbers: its largest logit, the sum of its exponentials relative to that, and the sum of
exponential times exponent. These are combined in float64. The draw inverts the cumulated masses of
the bins at one uniform number, and then the cumulated distribution inside the one bin that was
hit; the argmax is looked for inside the bin of the largest logit. Where the model is to be shown
its guess, the same logits give that too. The law is that of
:func:`canvaslm.sampling.prediction.predict`, which works in float64 on all logits and decides
wherever a number is not finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.device import wide
from canvaslm.sampling.prediction import Prediction, invert, predict

_BIN = 128  # words of a bin: the draw looks inside one
_ROWS = 64  # positions of a block on a CPU: as tall a product as it takes to be fast
_HELD = 1 << 27  # logits of a block elsewhere: 512 MiB in float32
_NO_WORD = -1e30  # the logit of what fills the last bin
_BELOW_ONE = 1 - 2**-53


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked about positions (B, L).

    Attributes:
        hidden: (B, L, D), final hidden states.
        head: (D, V), so that ``hidden @ head`` are the logits.
        noisy: (B, L) int64, what the network read; ``None`` where it read no noise.
        excess: (B, L) float64, what comes off the logit of the noisy token, or goes onto it
            where it is negative; ``None``: nothing.
        temperature: τ ≥ 0.
        uniforms: (B, L) float64 in [0, 1); ``None`` exactly when τ is 0.
        vocab_chunk: words of one product; changes no value.
        table: (V, D), the rows of the words; given exactly where a guess is asked for.
    """

    hidden: Tensor
    head: Tensor
    noisy: Tensor | None
    excess: Tensor | None
    temperature: float
    uniforms: Tensor | None
    vocab_chunk: int
    table: Tensor | None = None

    def flat(self) -> "Asked":
        """The same with one axis of positions, as (1, B·L)."""
        return self._each(lambda x: x.flatten(0, 1)[None])

    def some(self, chosen: Tensor | slice) -> "Asked":
        """The same for some positions of the one axis."""
        return self._each(lambda x: x[:, chosen])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Asked":
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return Asked(
            hidden=change(self.hidden),
            head=self.head,
            noisy=changed(self.noisy),
            excess=changed(self.excess),
            temperature=self.temperature,
            uniforms=changed(self.uniforms),
            vocab_chunk=self.vocab_chunk,
            table=self.table,
        )


def answer(asked: Asked, *, step: int, n_steps: int) -> tuple[Prediction, Tensor | None]:
    """As :func:`predict` of the weighed logits, without holding them.

    Args:
        asked: the positions, at least one.
        step: number of the step, from 0.
        n_steps: the most steps that the canvas may take.

    Returns:
        The prediction, and where ``table`` is given the guess (B, L, D): ``softmax(logits) @
        table`` of the logits as the network gave them.
    """
    assert (asked.uniforms is None) == (asked.temperature == 0.0)
    shape, flat = asked.hidden.shape[:2], asked.flat()
    n_rows = _ROWS if flat.hidden.device.type == "cpu" else max(1, _HELD // asked.head.shape[1])
    blocks = [_Block(flat.some(rows)) for rows in _slices(shape.numel(), n_rows)]
    columns = zip(*(block.answer() for block in blocks), strict=True)
    candidates, argmax, confidence, entropy = (torch.cat(parts).view(shape) for parts in columns)
    prediction = Prediction(
        step=step,
        n_steps=n_steps,
        candidates=candidates,
        argmax=argmax,
        confidence=confidence,
        entropy=entropy,
    )
    if asked.table is None:
        return prediction, None
    guess = torch.cat([block.guess() for block in blocks])
    return prediction, guess.view_as(asked.hidden).to(asked.hidden.dtype)


class _Block:
    """Some positions, R of them, and all words."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._hidden = asked.hidden[0]  # (R, D)
        self._scale = 1.0 / (asked.temperature or 1.0)
        self._n_words = asked.head.shape[1]
        shape = (self._hidden.shape[0], -(-self._n_words // _BIN), _BIN)
        dtype = wide(torch.promote_types(self._hidden.dtype, asked.head.dtype))
        self._logits = self._hidden.new_empty(shape, dtype=dtype)
        self._mixture = None if asked.table is None else _Mixture(asked.table)

    def answer(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Candidates, argmax, confidence and entropy, each (R,)."""
        largest, total, moment = self._sums()
        top, best = largest.max(-1, keepdim=True)  # (R, 1)
        below = (largest - top).mul_(self._scale)
        weight = below.exp()
        mass = total * weight
        cumulated = mass.cumsum(-1)
        whole = cumulated[:, -1]
        moments = (moment * weight).add_(mass * below).sum(-1)
        entropy = whole.log() - moments / whole
        argmax = best[:, 0] * _BIN + self._bin(best).argmax(-1)
        candidates = argmax
        if self._asked.uniforms is not None:
            candidates = self._draw(largest, mass, cumulated, self._asked.uniforms[0])
        columns = candidates, argmax, 1.0 / whole, entropy
        is_odd = entropy.isfinite().logical_not_()
        if bool(is_odd.any()):
            self._answer_plainly(is_odd, into=columns)
        return columns

    def guess(self) -> Tensor:
        """(R, D), after :meth:`answer`."""
        assert self._mixture is not None
        return self._mixture.mean()

    def _draw(self, largest: Tensor, mass: Tensor, cumulated: Tensor, uniforms: Tensor) -> Tensor:
        """Invert at (R,) uniform numbers: first over bins, then inside the bin that was hit."""
        level = uniforms[:, None] * cumulated[:, -1:]
        hit = torch.searchsorted(cumulated, level, right=True).clamp_(max=mass.shape[1] - 1)
        inside = mass.gather(1, hit)
        before = cumulated.gather(1, hit) - inside
        rest = ((level - before) / inside).clamp_(0.0, _BELOW_ONE)
        exponents = self._bin(hit) - largest.gather(1, hit).to(self._logits.dtype)
        weights = exponents.mul_(self._scale).exp_().double()
        return hit[:, 0] * _BIN + invert(weights, rest[:, 0])

    def _bin(self, bins: Tensor) -> Tensor:
        """The logits (R, 128) of one bin (R, 1) for each position."""
        n_rows, n_bins, _ = self._logits.shape
        first = torch.arange(0, n_rows * n_bins, n_bins, device=bins.device)
        return self._logits.flatten(0, 1).index_select(0, bins[:, 0] + first)

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each bin, (R, bins) float64: largest logit, Σ e, Σ e·s with e = exp(s)."""
        n_bins = self._logits.shape[1]
        chunks = _slices(n_bins, max(1, self._asked.vocab_chunk // _BIN))
        room = torch.empty_like(self._logits[:, chunks[0]])
        parts = []
        for bins in chunks:
            logits = self._multiply(bins)
            if self._mixture is not None:
                self._mixture.add(logits.flatten(1), bins.start * _BIN)
            self._take_excess(logits, bins)
            parts.append(self._sums_of(logits, room[:, : logits.shape[1]]))
        largest, total, moment = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
        return largest.double(), total.double(), moment.double()

    def _sums_of(self, logits: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three numbers of bins (R, n, 128), each (R, n); ``room`` is for the exponents."""
        largest = logits.amax(-1, keepdim=True)
        exponents = torch.sub(logits, largest, out=room)
        if self._scale != 1.0:
            exponents.mul_(self._scale)
        exponentials = exponents.exp()
        total = exponentials.sum(-1)
        return largest[..., 0], total, exponents.mul_(exponentials).sum(-1)

    def _multiply(self, bins: slice) -> Tensor:
        """The network's logits (R, n, 128) of some bins."""
        columns = self._asked.head[:, bins.start * _BIN : bins.stop * _BIN]
        n_words = columns.shape[1]
        logits = self._logits[:, bins]
        words = logits.flatten(1)
        if words.dtype == columns.dtype == self._hidden.dtype:
            torch.mm(self._hidden, columns, out=words[:, :n_words])
        else:
            words[:, :n_words] = self._hidden.to(columns.dtype) @ columns
        if n_words < words.shape[1]:
            words[:, n_words:] = _NO_WORD
        return logits

    def _take_excess(self, logits: Tensor, bins: slice) -> None:
        """Take the excess off the logits (R, n, 128) of some bins, in place."""
        if self._asked.noisy is None or self._asked.excess is None:
            return
        words = logits.flatten(1)
        place = self._asked.noisy[0] - bins.start * _BIN
        is_here = (place >= 0) & (place < words.shape[1])
        amount = (self._asked.excess[0] * is_here).neg_().to(words.dtype)
        words.scatter_add_(1, place.clamp_(0, words.shape[1] - 1)[:, None], amount[:, None])

    def _answer_plainly(self, is_odd: Tensor, *, into: tuple[Tensor, ...]) -> None:
        """Write the float64 form over what is said of the positions ``is_odd`` (R,), and no other.

        The others keep every bit, whatever their neighbours hold.
        """
        asked = self._asked.some(is_odd)
        logits = self._logits[is_odd].flatten(1)[None, :, : self._n_words]
        plain = predict(
            logits, temperature=asked.temperature, uniforms=asked.uniforms, step=0, n_steps=1
        )
        told = plain.candidates, plain.argmax, plain.confidence, plain.entropy
        for column, values in zip(into, told, strict=True):
            column[is_odd] = values[0]


class _Mixture:
    """Σ p·row over the words, relative to a running maximum (Milakov & Gimelshein 2018)."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._largest: Tensor | float = -math.inf
        self._total: Tensor | float = 0.0
        self._mixed: Tensor | float = 0.0

    def add(self, logits: Tensor, first: int) -> None:
        """Take in the logits (R, n) of the words from ``first`` on."""
        rows = self._table[first : first + logits.shape[1]]
        largest = logits.amax(-1, keepdim=True)
        if isinstance(self._largest, Tensor):
            largest = torch.maximum(self._largest, largest)
        shrink = torch.exp(self._largest - largest)
        weights = torch.exp_(logits - largest)
        mixed = weights[:, : len(rows)].to(rows.dtype) @ rows
        self._total = self._total * shrink + weights.sum(-1, keepdim=True)
        self._mixed = self._mixed * shrink + mixed.to(logits.dtype)
        self._largest = largest

    def mean(self) -> Tensor:
        """(R, D)."""
        assert isinstance(self._mixed, Tensor)
        return self._mixed / self._total


def _slices(length: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, length)) for first in range(0, length, most)]
