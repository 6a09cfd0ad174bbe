"""Which decoders are compared, of which size, and what are they asked?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from canvaslm.evaluation.decoders import Decoder
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.kv_cache import Context, KVCache
from canvaslm.model.shape import ModelParams
from canvaslm.randomness import stream
from canvaslm.sampling.acceptance import EntropyBound
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.evidence import Cavity
from canvaslm.sampling.sampler import CanvasSampler
from canvaslm.sampling.stopping import Never, StableAndConfident
from peers import build_gpt2, build_llama

ADAPTIVE = "adaptive_32"
PEERS = {"llama": ("llama_growing", "llama_static"), "gpt2": ("gpt2_growing", "gpt2_static")}

_CACHES = {"growing": None, "static": "static"}  # transformers' own names
_TEMPERATURE = 0.8
_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One shape for all: 5.8 million parameters as it stands."""

    width: int = 256
    n_layers: int = 6
    n_heads: int = 4
    ffn_width: int = 688
    vocab_size: int = 4096
    prompt_tokens: int = 64
    window: int = 512

    def layout(self, canvas_tokens: int) -> Layout:
        """A window of whole canvases."""
        return Layout(
            canvas_tokens=canvas_tokens,
            canvases_per_window=-(-self.window // canvas_tokens),
            vocab_size=self.vocab_size,
        )

    def model(self) -> ModelParams:
        """The denoiser; :meth:`ModelParams.twin` is the autoregressive one."""
        return ModelParams(
            width=self.width,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            head_width=self.width // self.n_heads,
            ffn_width=self.ffn_width,
            time_width=128,
            bias=False,
            qk_norm=False,
            rope_base=10000.0,
            norm_eps=1e-5,
            self_conditioning="off",
            self_conditioning_form="linear",
            likelihood_bias=False,
            noisy_input="own",
            token_shift=False,
            tilt=0.0,
            tied=True,
            clean_mask="causal",
            vocab_multiple=1,
        )


def build_decoders(
    sizes: Sizes, canvas_tokens: int, dtype: torch.dtype, steps: tuple[int, ...]
) -> dict[str, Decoder]:
    """Our decoders by name: canvases at each number of steps, and the twin."""
    shape, layout = sizes.model(), sizes.layout(canvas_tokens)
    denoiser = _network(shape, layout, dtype)
    guessing = shape.model_copy(update={"self_conditioning": "output"})
    fixed = canvases(denoiser, steps[0])
    decoders: dict[str, Decoder] = {
        f"steps_{n_steps}": replace(fixed, denoise_steps=n_steps) for n_steps in steps
    }
    if len(steps) > 1:
        decoders["steps_8_self_conditioned"] = canvases(_network(guessing, layout, dtype), 8)
    if len(steps) > 1:
        sure = StableAndConfident(threshold=0.005, patience=1)
        decoders[ADAPTIVE] = replace(fixed, denoise_steps=32, stopping=sure)
    decoders["autoregressive"] = AutoregressiveSampler(
        model=_network(shape.twin(), layout, dtype), temperature=_TEMPERATURE, bos_id=0, eot_id=None
    )
    return decoders


def canvases(network: Backbone, n_steps: int) -> CanvasSampler:
    """Canvases at a fixed number of steps; a bench replaces what it wants otherwise."""
    return CanvasSampler(
        model=network,
        acceptance=EntropyBound(bound=0.1),
        stopping=Never(),
        denoise_steps=n_steps,
        start_temperature=_TEMPERATURE,
        end_temperature=0.4,
        eot_id=None,
        vocab_chunk=2048,
        evidence=Cavity(),
    )


def build_peers(
    sizes: Sizes, prompts: list[list[int]], new_tokens: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """``generate`` of each peer over each cache, with the same prompts; none without transformers.

    The prompt is longer by one token where ours begins with the end-of-text id.
    """
    shape, layout = sizes.model().twin(), sizes.layout(1)
    longest = sizes.prompt_tokens + new_tokens + 1
    networks = {
        "llama": build_llama(shape, layout, attention="sdpa", max_tokens=longest),
        "gpt2": build_gpt2(shape, layout, max_tokens=longest),
    }
    ids = torch.tensor([[0, *prompt] for prompt in prompts])
    runs = {}
    for name, network in networks.items():
        if network is None:
            continue
        network.to(dtype).eval()
        for cache, told in _CACHES.items():
            runs[f"{name}_{cache}"] = _generate(network, ids, new_tokens, told)
    return runs


def prompts_of(sizes: Sizes, batch: int) -> list[list[int]]:
    """Random prompts of one length."""
    shape = (batch, sizes.prompt_tokens)
    return stream(_SEED, "prompts").integers(1, sizes.vocab_size, size=shape).tolist()


def without_cache(decoder: Decoder) -> CanvasSampler:
    """The same sampler over a network that reads all earlier text again at each step."""
    assert isinstance(decoder, CanvasSampler)
    return replace(decoder, model=_Uncached(decoder.model))  # pyright: ignore[reportArgumentType] - it is used as one


class _Uncached(nn.Module):
    """A backbone that keeps the ids of a text and nothing that it has computed of them."""

    def __init__(self, network: Backbone) -> None:
        super().__init__()
        self._network = network
        self.params, self.layout = network.params, network.layout
        self.head_weight = network.head_weight
        self._text: list[Tensor] = []

    def encode_context(self, ids: Tensor, *, cache: KVCache) -> None:
        """Note the ids; a fresh cache begins a text."""
        if cache.length == 0:
            self._text = []
        self._text.append(ids)
        cache.advance(ids)

    def denoise(self, noisy: Tensor, times: Tensor, *, context: KVCache, **options: Any) -> Tensor:
        """Read the text, then the canvas behind it."""
        read = self._network.encode_context(torch.cat(self._text, dim=1))
        behind = _Behind(start=context.start, read=read)
        return self._network.denoise(noisy, times, context=behind, **options)


@dataclass(frozen=True, kw_only=True)
class _Behind:
    """A context whose noisy canvas stands behind all of it."""

    start: int
    read: Context

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.read.keys_values(layer)

    def ids_at(self, positions: Sequence[int]) -> Tensor:
        return self.read.ids_at(positions)


def _network(shape: ModelParams, layout: Layout, dtype: torch.dtype) -> Backbone:
    network = Backbone(shape, layout)
    initialise(network, _SEED)
    return network.to(dtype).eval()


def _generate(
    network: Any, ids: Tensor, new_tokens: int, cache: str | None
) -> Callable[[], object]:
    options = {} if cache is None else {"cache_implementation": cache}

    def run() -> Tensor:
        return network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            temperature=_TEMPERATURE,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            **options,
        )

    return run
