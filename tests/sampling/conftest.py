"""A scripted model that says what a test tells it to, and a real one with strong opinions."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.kv_cache import CleanContext, Context, Encoded, KVCache
from canvaslm.model.shape import ModelParams

Script = Callable[[int, int, int, Tensor], Tensor]


def _params(**changes: object) -> ModelParams:
    values: dict[str, object] = {
        "width": 16,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_width": 8,
        "ffn_width": 32,
        "time_width": 8,
        "bias": True,
        "qk_norm": False,
        "rope_base": 10000.0,
        "norm_eps": 1e-5,
        "self_conditioning": "off",
        "self_conditioning_form": "linear",
        "likelihood_bias": False,
        "noisy_input": "own",
        "token_shift": False,
        "tilt": 0.0,
        "tied": True,
        "clean_mask": "causal",
        "vocab_multiple": 1,
    }
    return ModelParams.model_validate(values | changes)


class ScriptedModel(nn.Module):
    """Its hidden states are logits, and the logits of a canvas come from a script.

    The script is asked for (row tag, position of the canvas, step, noisy ids) and answers with
    (L, V). A row's tag is the first id of its prompt, read back from the cache, in which clean ids
    are stored as keys.
    """

    def __init__(self, script: Script, *, layout: Layout, denoise_steps: int, **changes: object):
        super().__init__()
        self.script = script
        self.layout = layout
        self.params = _params(n_layers=1, n_heads=1, head_width=2, **changes)
        self.head_weight = self.table = torch.eye(layout.vocab_size)
        self.denoise_steps = denoise_steps
        self.seen: list[tuple[int, int, float]] = []
        self.noisy: list[tuple[int, Tensor]] = []
        self.cached: list[Tensor] = []
        self.batches: list[int] = []
        self.guesses: list[Tensor | None] = []
        self.next_logits: Script | None = None

    def encode(self, ids: Tensor, *, cache: KVCache | None = None) -> Encoded:
        assert cache is not None
        stored = ids[:, None, :, None].expand(-1, 1, -1, 2).float()
        keys, _ = cache.append(0, stored, stored)
        cache.advance(ids)
        self.batches.append(ids.shape[0])
        hidden = torch.zeros(*ids.shape, self.layout.vocab_size)
        if self.next_logits is not None:
            clean, n_before = keys[:, 0, :, 0].long(), keys.shape[2] - ids.shape[1]
            for row in range(len(ids)):
                tag = int(clean[row, min(1, clean.shape[1] - 1)])
                for place in range(ids.shape[1]):
                    length = n_before + place + 1
                    hidden[row, place] = self.next_logits(tag, length, 0, clean[row, :length])
        return Encoded(ids=ids, hidden=hidden, keys=(), values=())

    def encode_context(self, ids: Tensor, *, cache: KVCache | None = None) -> Context:
        return self.encode(ids, cache=cache)

    def denoise(
        self,
        noisy: Tensor,
        times: Tensor | None,
        *,
        context: CleanContext,
        guess: Tensor | None,
        has_guess: Tensor | None,
    ) -> Tensor:
        assert times is not None
        clean = context.keys_values(0)[0][:, 0, :, 0].long()
        self.cached.append(clean)
        self.batches.append(noisy.shape[0])
        self.guesses.append(guess)
        answers = []
        for row in range(len(noisy)):
            tag = int(clean[row, 0])
            time = float(times[row, 0])
            step = round((1 - time) * self.denoise_steps)
            self.seen.append((tag, context.start, time))
            self.noisy.append((tag, noisy[row].clone()))
            answers.append(self.script(tag, context.start, step, noisy[row]))
        return torch.stack(answers)

    def encode_and_denoise(
        self, ids: Tensor, noisy: Tensor, times: Tensor | None, *, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        read = self.encode(ids, cache=cache).hidden
        hidden = self.denoise(noisy, times, context=cache, guess=None, has_guess=None)
        return read, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture
def params() -> Callable[..., ModelParams]:
    """The shape of a tiny model, with changes."""
    return _params


@pytest.fixture
def scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture
def opinionated() -> Callable[..., Backbone]:
    """A random backbone whose logits are far from uniform and depend on position and context."""

    def build(
        layout: Layout, *, dtype: torch.dtype = torch.float64, seed: int = 3, **changes: object
    ) -> Backbone:
        model = Backbone(_params(**changes), layout)
        initialise(model, seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("weight") and "norm" not in name:
                    parameter.mul_(25.0 if "embedding" in name else 10.0)
                if name.startswith("self_conditioning"):
                    parameter.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.3)
        return model.to(dtype).eval()

    return build


@pytest.fixture
def caches_full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """``caches_full(is_garbage=True)``: fresh caches hold NaN and wrong ids, else zeros."""

    @contextmanager
    def full(*, is_garbage: bool) -> Iterator[None]:
        def filled(shape: Any, *, dtype: torch.dtype, **kwargs: Any) -> Tensor:
            garbage = math.nan if dtype.is_floating_point else 35
            return torch.full(shape, garbage if is_garbage else 0, dtype=dtype, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr("canvaslm.model.kv_cache.torch.empty", filled)
            yield

    return full
