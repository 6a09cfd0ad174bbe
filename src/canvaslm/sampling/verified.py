"""How does a prompt become text that a canvas drafts, and the model's own next-token law rules on?

The clean stream of a denoiser may be trained to predict the next token as well. Such a model holds
two laws of one text: a canvas, which is drawn as a whole, and the companion, token by token. Here a
round drafts a canvas in a few forwards and reads it, clean, in one more; the companion keeps the
longest prefix that passes and puts one token behind it (:mod:`canvaslm.sampling.verification`). The
text follows the companion's law exactly, whatever the drafts are worth; they decide how many
forwards it takes.

What is not kept is cut off the cache and nothing is read twice: the token behind a prefix, which
nothing has read yet, goes through the network beside the first step of the next draft.

Rows keep different prefixes, and a forward reads texts of one length. Rows that have come equally
far go on together; the others go on by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling.drafting import Draft, Drafter
from canvaslm.sampling.prediction import law_of, uniform_numbers
from canvaslm.sampling.request import (
    Generated,
    Group,
    Limit,
    Prompts,
    Row,
    answer_groups,
    group_request,
)
from canvaslm.sampling.verification import Ruling, verify


@dataclass(frozen=True, kw_only=True)
class VerifiedSampler:
    """Drafts canvas after canvas behind a prompt, and keeps what the companion lets pass.

    Args:
        drafter: how a canvas is drafted, and by which model; its clean stream is token-causal and
            was trained to predict the next token.
        temperature: τ ≥ 0 of the companion's law; at 0 the text is its argmax, token for token.
        bos_id: the id that an empty prompt is read as, the end-of-text id.
        eot_id: the id that ends a text; ``None`` where a text has no end.
    """

    drafter: Drafter
    temperature: float
    bos_id: int
    eot_id: int | None

    @property
    def model(self) -> Backbone:
        """The network, which drafts and verifies."""
        return self.drafter.model

    def generate(
        self, prompt_ids: Prompts, max_new_tokens: int | None, seeds: Sequence[int]
    ) -> list[Generated]:
        """Answer each prompt; the contract is that of :meth:`CanvasSampler.generate`.

        Raises:
            InputError: the clean stream is not token-causal, an id is not in the vocabulary, the
                seeds are not as many as the prompts, or a prompt and its answer do not fit in the
                trained window.
        """
        if self.model.params.clean_mask != "causal":
            raise InputError(
                "model.clean_mask",
                expected="causal: a draft is verified by the law of the next token",
                got=self.model.params.clean_mask,
                fix="decode it by canvases alone, or train with clean_mask: causal",
            )
        groups = group_request(prompt_ids, max_new_tokens, seeds, layout=self.model.layout)
        return answer_groups(groups, self._answer)

    def _answer(self, group: Group) -> None:
        """Fill the rows of one group."""
        waiting = [self._begin(group)]
        while waiting:
            waiting += self._round(waiting.pop(), group.limit)

    def _begin(self, group: Group) -> "_Batch":
        """Read the prompts, all but their last token."""
        text = group.prompts.to(self.model.head_weight.device)
        if text.shape[1] == 0:
            text = text.new_full((len(text), 1), self.bos_id)
        room = group.limit.n_tokens + self.model.layout.canvas_tokens
        cache = KVCache.for_model(self.model, len(text), text.shape[1] + room)
        n_before = text.shape[1] - 1
        if n_before:
            self.model.encode_context(text[:, :-1], cache=cache)
            for row in group.rows:
                row.count_prefill(n_before)
        return _Batch(
            rows=group.rows,
            draws=[stream(row.seed, "draft") for row in group.rows],
            coins=[stream(row.seed, "verify") for row in group.rows],
            last=text[:, -1:],
            cache=cache,
        )

    def _round(self, batch: "_Batch", limit: Limit) -> list["_Batch"]:
        """Draft and verify once.

        Returns:
            The rows that go on, by how far each has come.
        """
        n_left = limit.n_tokens - len(batch.rows[0].ids)
        n_drafted = min(self.model.layout.canvas_tokens, n_left - 1)
        draft = self.drafter.draft(batch.last, batch.cache, batch.draws, n_tokens=n_drafted)
        n_read = batch.cache.length
        target_law = self._target_law(draft, batch.cache)
        numbers = uniform_numbers(batch.coins, n_drafted + 1, batch.last.device)
        ruling = verify(draft.tokens, draft.law, target_law, numbers)
        is_finite = target_law.isfinite().all(-1).all(-1) & draft.law.isfinite().all(-1).all(-1)
        for row, flag, n_accepted, ids in zip(
            batch.rows, is_finite.tolist(), ruling.n_accepted.tolist(), ruling.texts(draft.tokens),
            strict=True,
        ):  # fmt: skip
            self._count(row, n_drafted)
            if flag:
                n_before = len(row.ids)
                row.extend(ids, eot_id=self.eot_id, limit=limit)
                row.accepted += min(n_accepted, len(row.ids) - n_before)
            else:
                row.reason = "not_finite"
        return batch.split(ruling, n_read)

    def _target_law(self, draft: Draft, cache: KVCache) -> Tensor:
        """Read a draft (B, M); the companion's law at each of its tokens and one behind."""
        hidden = draft.before[:, None]
        if draft.tokens.shape[1]:
            read = self.model.encode(draft.tokens, cache=cache).hidden
            hidden = torch.cat((hidden, read), dim=1)  # (B, M + 1, D)
        head = cache.head(self.model)
        return law_of(hidden.to(head.dtype) @ head, temperature=self.temperature)

    def _count(self, row: Row, n_drafted: int) -> None:
        """Note the forwards of one round."""
        if n_drafted == 0:
            row.count_encoding(1)
            return
        canvas_tokens = self.model.layout.canvas_tokens
        row.count_encoding(1 + canvas_tokens)
        for _ in range(self.drafter.steps - 1):
            row.count_forward(canvas_tokens)
        row.count_encoding(n_drafted)
        row.canvases += 1
        row.verifications += 1


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Rows that have come equally far.

    Attributes:
        rows: B rows.
        draws: a generator for the drafts of each.
        coins: a generator for the rulings on each.
        last: (B, 1) int64, the token that the cache lacks.
        cache: the text before it.
    """

    rows: list[Row]
    draws: list[np.random.Generator]
    coins: list[np.random.Generator]
    last: Tensor
    cache: KVCache

    def split(self, ruling: Ruling, n_read: int) -> list["_Batch"]:
        """The rows that go on, by how many drafted tokens each keeps behind ``n_read`` of text."""
        places: dict[int, list[int]] = {}
        for place, n_accepted in enumerate(ruling.n_accepted.tolist()):
            if self.rows[place].reason is None:
                places.setdefault(n_accepted, []).append(place)
        return [self._part(some, ruling, n_read + n) for n, some in places.items()]

    def _part(self, places: list[int], ruling: Ruling, length: int) -> "_Batch":
        """Some of the rows, with ``length`` tokens in the cache."""
        cache, last = self.cache, ruling.next_ids[:, None]
        if len(places) < len(self.rows):
            chosen = torch.tensor(places, device=last.device)
            cache = cache.some_rows(chosen, room=cache.capacity - cache.length)
            last = last[chosen]
        cache.cut(length)
        return _Batch(
            rows=[self.rows[place] for place in places],
            draws=[self.draws[place] for place in places],
            coins=[self.coins[place] for place in places],
            last=last,
            cache=cache,
        )
