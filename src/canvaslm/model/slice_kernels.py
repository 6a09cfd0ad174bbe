"""What does a block of queries take from its slice of the keys, and what must it keep?

Two kernels for a CPU. :class:`Products` writes the scores out and keeps the probabilities, which
spares the backward pass one product of five and every exponential. :class:`Library` calls the tiled
kernel behind ``scaled_dot_product_attention``, which writes no scores and keeps one number a query.

Rows are (n, M, E) for n groups of heads; the M rows of a group are the query heads that share its
keys, for each token of the block. Keys and values are (n, end, E). All are float32 or float64.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_aten = torch.ops.aten
_Gradients = tuple[Tensor, Tensor, Tensor]


class Products:
    """One large operation after the other: three forward, five back.

    What a block has computed lies in buffers that the next block writes over, since memory that was
    just used is in the cache; only the probabilities have their own, where they are kept.

    Args:
        group: query heads that share a key head.
        causal: the slice ends with the block's own tokens, of which each sees up to itself.
        n_keys: keys of the longest slice.
        keeps: whether the probabilities must last beyond the block.
    """

    reads_taken = False

    def __init__(self, group: int, *, causal: bool, n_keys: int, keeps: bool) -> None:
        self.group = group
        self.causal = causal
        self.n_keys = n_keys
        self.keeps = keeps
        self._rooms: dict[str, Tensor] = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the rows take from the values, and the probabilities (n, M, end)."""
        if self.keeps:
            scores = q.new_empty(*q.shape[:2], keys.shape[1])
        else:
            scores = self._score_room("scores", q, keys)
        _product(q, keys.mT, scale=_scale(q), out=scores)
        if self.causal:
            self._hide_later(scores)
        probabilities = torch.softmax(scores, -1, out=scores)
        return torch.bmm(probabilities, values, out=self._room("taken", q)), probabilities

    def pull_back(
        self,
        pull: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        taken: Tensor | None,
        probabilities: Tensor,
    ) -> _Gradients:
        """Gradients of rows, keys and values, given ``pull``, that of what was ``taken``."""
        d_scores, d_q = self._score_room("d_scores", q, keys), self._room("d_q", q)
        d_keys, d_values = self._key_room("d_keys", keys), self._key_room("d_values", values)
        torch.bmm(probabilities.mT, pull, out=d_values)
        torch.bmm(pull, values.mT, out=d_scores)
        _aten._softmax_backward_data.out(d_scores, probabilities, -1, q.dtype, grad_input=d_scores)
        _product(d_scores.mT, q, scale=_scale(q), out=d_keys)
        _product(d_scores, keys, scale=_scale(q), out=d_q)
        return d_q, d_keys, d_values

    def _score_room(self, name: str, q: Tensor, keys: Tensor) -> Tensor:
        n, M, _ = q.shape
        return self._room(name, q, (n, M, keys.shape[1]), most=n * M * self.n_keys)

    def _key_room(self, name: str, keys: Tensor) -> Tensor:
        n, _, E = keys.shape
        return self._room(name, keys, keys.shape, most=n * self.n_keys * E)

    def _room(self, name: str, like: Tensor, shape: Sequence[int] = (), *, most: int = 0) -> Tensor:
        """A buffer of a shape, of which no block of the call needs more than ``most`` numbers."""
        shape = shape or like.shape
        if name not in self._rooms:
            self._rooms[name] = like.new_empty(most or like.numel())
        return self._rooms[name][: math.prod(shape)].view(shape)

    def _hide_later(self, scores: Tensor) -> None:
        """Give the block's own later keys a score of minus infinity, in place."""
        tokens = scores.shape[1] // self.group
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
        own = scores.unflatten(1, (tokens, self.group))[..., -tokens:]
        own.masked_fill_(later[:, None], -math.inf)


class Library:
    """Torch's own tiled kernel, called below autograd so that blocks can share their keys."""

    reads_taken = True

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the rows take from the values, and their log-sum-exps (1, n, M)."""
        inputs = (x.unsqueeze(0) for x in (q, keys, values))
        taken, log_sums = _aten._scaled_dot_product_flash_attention_for_cpu(*inputs)
        return taken.squeeze(0), log_sums

    def pull_back(
        self,
        pull: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        taken: Tensor | None,
        log_sums: Tensor,
    ) -> _Gradients:
        """Gradients of rows, keys and values, given ``pull``, that of what was ``taken``."""
        assert taken is not None, "the kernel of the library reads what was taken"
        inputs = (x.unsqueeze(0) for x in (pull, q, keys, values, taken))
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, log_sums, 0.0, False
        )
        d_q, d_keys, d_values = (x.squeeze(0) for x in gradients)
        return d_q, d_keys, d_values


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _product(left: Tensor, right: Tensor, *, scale: float, out: Tensor) -> None:
    """``scale · left @ right`` in one operation."""
    torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)
