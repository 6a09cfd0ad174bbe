"""What does a block of queries take from its slice of the keys, and what must it keep?

Two kernels for a CPU. :class:`Products` writes the scores out and keeps the probabilities, which
spares the backward pass one product of five and every exponential. :class:`Library` calls the tiled
kernel behind ``scaled_dot_product_attention``, which writes no scores and keeps one number a query.

Rows are (n, M, E) for n groups of heads; the M rows of a group are the query heads that share its
keys, for each token of the block. Keys and values are (n, end, E). All are float32 or float64.
"""

import math

import torch
from torch import Tensor

_aten = torch.ops.aten
_Gradients = tuple[Tensor, Tensor, Tensor]


class Products:
    """One large operation after the other: three forward, five back.

    Args:
        group: query heads that share a key head.
        causal: the slice ends with the block's own tokens, of which each sees up to itself.
    """

    reads_taken = False

    def __init__(self, group: int, *, causal: bool) -> None:
        self.group = group
        self.causal = causal

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the rows take from the values, and the probabilities (n, M, end)."""
        scores = _product(q, keys.mT, scale=_scale(q))
        if self.causal:
            self._hide_later(scores)
        probabilities = torch.softmax(scores, -1, out=scores)
        return torch.bmm(probabilities, values), probabilities

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
        d_values = torch.bmm(probabilities.mT, pull)
        d_scores = torch.bmm(pull, values.mT)
        _aten._softmax_backward_data.out(d_scores, probabilities, -1, q.dtype, grad_input=d_scores)
        scale = _scale(q)
        d_keys = _product(d_scores.mT, q, scale=scale)
        return _product(d_scores, keys, scale=scale), d_keys, d_values

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


def _product(left: Tensor, right: Tensor, *, scale: float) -> Tensor:
    """``scale · left @ right`` in one operation."""
    unread = left.new_empty(1, 1, 1)
    return torch.baddbmm(unread, left, right, beta=0, alpha=scale)
