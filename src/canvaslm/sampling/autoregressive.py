"""How does a next-token model continue a prompt, token by token?

The twin was trained on windows that begin with the end-of-text id: position 0 is always that id
and the prompt follows. A denoiser's clean stream was not: it reads the prompt as it is, and the id
where there is none. The prompt is read once; every further token takes one forward over one
position against the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling.prediction import draw
from canvaslm.sampling.request import (
    Generated,
    Group,
    Prompts,
    Row,
    answer_groups,
    group_request,
    keep_live,
)


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSampler:
    """Draws one token a forward behind a prompt.

    Args:
        model: a backbone that was trained to predict the next token.
        temperature: τ ≥ 0; 0 takes the argmax and draws nothing.
        bos_id: the id that stands before every window in training, the end-of-text id.
        eot_id: the id that ends a text; ``None`` where a text has no end.
        bos: where ``bos_id`` is read: before every prompt, as the twin was trained, or as a prompt
            that is empty.
    """

    model: Backbone
    temperature: float
    bos_id: int
    eot_id: int | None
    bos: Literal["always", "if_empty"] = "always"

    def generate(
        self, prompt_ids: Prompts, max_new_tokens: int | None, seeds: Sequence[int]
    ) -> list[Generated]:
        """Answer each prompt; the contract is that of :meth:`CanvasSampler.generate`.

        Raises:
            InputError: an id is not in the vocabulary, the seeds are not as many as the prompts,
                or a prompt and its answer do not fit in the trained window.
        """
        groups = group_request(prompt_ids, max_new_tokens, seeds, layout=self.model.layout)
        return answer_groups(groups, self._answer)

    def _answer(self, group: Group) -> None:
        """Fill the rows of one group."""
        live, n_tokens = group.rows, group.limit.n_tokens
        cache = KVCache.for_model(self.model, len(live), group.prompts.shape[1] + n_tokens)
        given = group.prompts.to(self.model.head_weight.device)
        if self.bos == "always" or given.shape[1] == 0:
            given = functional.pad(given, (1, 0), value=self.bos_id)
        uniforms = self._uniforms(group).to(given.device)
        for number in range(n_tokens):
            hidden = self.model.encode(given, cache=cache).hidden[:, -1]
            _count(live, given.shape[1], is_prefill=number == 0)
            head = cache.head(self.model)
            logits = hidden.to(head.dtype) @ head
            ids, is_finite = draw(
                logits, temperature=self.temperature, uniforms=uniforms[:, number]
            )
            _take(live, ids, is_finite, group, self.eot_id)
            live, given, uniforms = keep_live(live, cache, ids[:, None], uniforms)
            if not live:
                return

    def _uniforms(self, group: Group) -> Tensor:
        """One number in [0, 1) for each token that each row may draw, (B, n) float64."""
        shape = (len(group.rows), group.limit.n_tokens)
        if not self.temperature:
            return torch.zeros(shape, dtype=torch.float64)
        draws = [stream(row.seed, "sample").random(shape[1]) for row in group.rows]
        return torch.from_numpy(np.stack(draws))


def _count(live: list[Row], tokens: int, *, is_prefill: bool) -> None:
    for row in live:
        if is_prefill:
            row.count_prefill(tokens)
        else:
            row.count_encoding(tokens)


def _take(
    live: list[Row], ids: Tensor, is_finite: Tensor, group: Group, eot_id: int | None
) -> None:
    """Append each row's token, or end the row whose numbers are not finite."""
    for row, token, flag in zip(live, ids.tolist(), is_finite.tolist(), strict=True):
        if flag:
            row.extend([token], eot_id=eot_id, limit=group.limit)
        else:
            row.reason = "not_finite"
