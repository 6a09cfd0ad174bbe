"""Which of some drafted tokens may stay, so that the text follows the law of another model?

The rule of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318). A draft token that was drawn from q is kept with the probability min(1, p/q), where p
is the law that the text is to follow. At the first one that is not kept, a token is drawn from what
q had too little of, max(p − q, 0) made to sum to 1; where all are kept, one more is drawn from p.
Kept or replaced, each token then has exactly the law p.

This holds where q is the law of the token *given everything that was fixed before it was drawn*,
and where the draws of a draft do not depend on each other given that. ``docs/sampler.md`` says why
a canvas has such a law only at its last step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.sampling.prediction import invert


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What became of the drafts of B rows.

    Attributes:
        n_accepted: (B,) int64, how many drafted tokens stay, from the front.
        next_ids: (B,) int64, the token that comes behind them.
    """

    n_accepted: Tensor
    next_ids: Tensor

    def texts(self, drafted: Tensor) -> list[list[int]]:
        """What each row of drafted tokens (B, M) comes to: the accepted ones, then the next."""
        columns = drafted.tolist(), self.n_accepted.tolist(), self.next_ids.tolist()
        return [[*ids[:n], new] for ids, n, new in zip(*columns, strict=True)]


def verify(drafted: Tensor, draft_law: Tensor, target_law: Tensor, uniforms: Tensor) -> Ruling:
    """Keep the longest prefix that passes, and draw one token behind it.

    Args:
        drafted: (B, M) int64, each drawn from its row of ``draft_law``; M may be 0.
        draft_law: q, (B, M, V) float64; all on one token where nothing was drawn.
        target_law: p, (B, M + 1, V) float64, each given the text and the drafted tokens before it.
        uniforms: (B, M + 1) float64 in [0, 1), independent of all that the draft was made of.

    Returns:
        The ruling; of a row whose laws are not finite it means nothing.
    """
    M = drafted.shape[1]
    token = drafted[..., None]
    q = draft_law.gather(-1, token)[..., 0]
    p = target_law[:, :M].gather(-1, token)[..., 0]
    stays = uniforms[:, :M] * q < p
    n_accepted = stays.long().cumprod(-1).sum(-1)
    return Ruling(
        n_accepted=n_accepted,
        next_ids=invert(_next_law(n_accepted, draft_law, target_law), uniforms[:, M]),
    )


def _next_law(n_accepted: Tensor, draft_law: Tensor, target_law: Tensor) -> Tensor:
    """The law (B, V) of the token behind the accepted ones."""
    M = draft_law.shape[1]
    row = torch.arange(len(n_accepted), device=n_accepted.device)
    p = target_law[row, n_accepted]
    if M == 0:
        return p
    was_refused = n_accepted < M
    q = draft_law[row, n_accepted.clamp(max=M - 1)]
    return torch.where(was_refused[:, None], left_over(p, q), p)


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """max(p − q, 0) over (B, V), made to sum to 1; p itself where rounding leaves nothing."""
    rest = (p - q).clamp_(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0.0, rest / total, p)
