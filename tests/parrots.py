"""Decoders that say what they are told, and a twin that knows one thing, for tests of judgement."""

from collections.abc import Sequence
from typing import Any

import torch

from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.sampling.request import Generated, Reason
from shapes import tiny_shape


class Parrot:
    """Answers with what it is told; sends nothing through its network."""

    def __init__(
        self,
        model: Any,
        ids: Sequence[int],
        *,
        canvases: int,
        forwards: int = 5,
        reason: Reason = "length",
    ) -> None:
        self.model = model
        self.ids = list(ids)
        self.canvases = canvases
        self.forwards = forwards
        self.reason: Reason = reason

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int | None, seeds: Sequence[int]
    ) -> list[Generated]:
        return [
            Generated(
                ids=self.ids,
                reason=self.reason,
                forwards=self.forwards,
                prefill_forwards=1,
                encoding_forwards=2,
                token_forwards=0,
                canvases=self.canvases,
                verifications=0,
                accepted=0,
            )
            for _ in prompt_ids
        ]


def knowing_twin(layout: Layout) -> Backbone:
    """A twin that knows one thing: behind one of the ids 0 to 7 comes another of them."""
    shape = tiny_shape(
        n_layers=1, n_heads=2, n_kv_heads=1, head_width=8, ffn_width=16, vocab_multiple=1
    )
    twin = Backbone(shape.twin(), layout).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        twin.final_norm.weight.fill_(1.0)
        twin.embedding.weight[:, 0] = 1.0
        twin.embedding.weight[:8, 1] = 3.0
    return twin
