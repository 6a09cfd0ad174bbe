"""What is drafted behind a text, and by which law was each of its tokens drawn?

A canvas of noise is denoised for a few steps, as a canvas that is to be emitted is, but for its
last step: there every token is drawn anew, from the softmax of its own position and independently
of the others. So whatever the steps before have drawn, given it each token has the law that is
written down beside it, and that is the law which a verification needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import KVCache
from canvaslm.sampling.acceptance import Acceptance
from canvaslm.sampling.evidence import Evidence, excess
from canvaslm.sampling.one_pass import Asked, answer
from canvaslm.sampling.prediction import (
    invert,
    law_of,
    uniform_ids,
    uniform_numbers,
)
from canvaslm.sampling.tilted import accept, keep


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The first M tokens of a drafted canvas behind each of B texts.

    Attributes:
        tokens: (B, M) int64.
        law: (B, M, V) float64, what each token was drawn from, independently of the others.
        before: (B, D), the hidden state of the text's last token, which says what comes first.
    """

    tokens: Tensor
    law: Tensor
    before: Tensor


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """Denoises one canvas behind a text.

    Args:
        model: a backbone trained with the denoising objective.
        acceptance: which positions keep their token between two steps.
        evidence: what the noisy token of a position is evidence of.
        steps: forwards of a draft, at least 1.
        temperature: τ of every step, 0 or more; at 0 a draft is the argmax, drawn from nothing.
        vocab_chunk: vocabulary entries whose logits exist at one time in all steps but the last;
            changes no value.
    """

    model: Backbone
    acceptance: Acceptance
    evidence: Evidence
    steps: int
    temperature: float
    vocab_chunk: int

    def draft(
        self,
        last: Tensor,
        cache: KVCache,
        draws: Sequence[np.random.Generator],
        *,
        n_tokens: int,
    ) -> Draft:
        """Read the text's last token, and draft what comes after it.

        Args:
            last: (B, 1) int64, the token that the cache lacks; it is appended to the cache in the
                forward of the first step.
            cache: the text before it.
            draws: a generator for each row.
            n_tokens: tokens wanted of the canvas, M; for 0 of them nothing is denoised.
        """
        if n_tokens == 0:
            read = self.model.encode(last, cache=cache).hidden
            shape = (len(last), 0, self.model.layout.vocab_size)
            law = torch.empty(shape, dtype=torch.float64, device=last.device)
            return Draft(tokens=last[:, :0], law=law, before=read[:, -1])
        noisy = self._noise(draws, last.device)
        time = self._time(0, len(last))
        read, hidden = self.model.encode_and_denoise(last, noisy, time, cache=cache)
        accepted = torch.zeros_like(noisy, dtype=torch.bool)
        tokens, before = noisy, None
        for step in range(self.steps - 1):
            asked = self._asked(hidden, noisy, accepted, cache, step, draws)
            now, guess = answer(asked, step=step, n_steps=self.steps)
            chosen = accept(self.acceptance, now, before, accepted, model=self.model)
            stays = keep(self.acceptance, now, accepted, chosen, model=self.model)
            tokens, accepted, before = torch.where(stays, tokens, now.candidates), chosen, now
            noisy = torch.where(accepted, tokens, self._noise(draws, last.device))
            hidden = self.model.denoise(
                noisy,
                self._time(step + 1, len(last)),
                context=cache,
                guess=None if guess is None else guess.to(self.model.head_weight.dtype),
                has_guess=None,
            )
        hidden, noisy, accepted = (x[:, :n_tokens] for x in (hidden, noisy, accepted))
        logits = self._last_logits(hidden, noisy, accepted, cache)
        law = law_of(logits, temperature=self.temperature)
        return Draft(tokens=self._drawn(law, draws), law=law, before=read[:, -1])

    def _noise(self, draws: Sequence[np.random.Generator], device: torch.device) -> Tensor:
        """A fresh canvas (B, L) of each row."""
        layout = self.model.layout
        return uniform_ids(draws, layout.canvas_tokens, layout.vocab_size, device)

    def _time(self, step: int, n_rows: int) -> Tensor:
        """(B, 1) time of a step, going down from 1."""
        time = (self.steps - step) / self.steps
        return torch.full(
            (n_rows, 1), time, dtype=torch.float64, device=self.model.head_weight.device
        )

    def _excess(self, accepted: Tensor, step: int) -> Tensor | None:
        return excess(
            self.evidence, accepted, t=self.steps - step, n_times=self.steps, model=self.model
        )

    def _asked(
        self,
        hidden: Tensor,
        noisy: Tensor,
        accepted: Tensor,
        cache: KVCache,
        step: int,
        draws: Sequence[np.random.Generator],
    ) -> Asked:
        """What is to be known about the canvases at a step that is not the last."""
        shows_guess = self.model.params.self_conditioning != "off"
        n_tokens = noisy.shape[1]
        return Asked(
            hidden=hidden,
            head=cache.head(self.model),
            noisy=noisy,
            excess=self._excess(accepted, step),
            temperature=self.temperature,
            uniforms=uniform_numbers(draws, n_tokens, noisy.device) if self.temperature else None,
            vocab_chunk=self.vocab_chunk,
            table=cache.table(self.model) if shows_guess else None,
        )

    def _last_logits(
        self, hidden: Tensor, noisy: Tensor, accepted: Tensor, cache: KVCache
    ) -> Tensor:
        """(B, L, V) at the last step, less what the noisy tokens are no evidence of."""
        head = cache.head(self.model)
        logits = hidden.to(head.dtype) @ head
        amount = self._excess(accepted, self.steps - 1)
        if amount is None:
            return logits
        return logits.scatter_add_(-1, noisy[..., None], -amount[..., None].to(logits.dtype))

    def _drawn(self, law: Tensor, draws: Sequence[np.random.Generator]) -> Tensor:
        """(B, L) tokens of a law (B, L, V)."""
        if self.temperature == 0.0:
            return law.argmax(-1)
        return invert(law, uniform_numbers(draws, law.shape[1], law.device))
