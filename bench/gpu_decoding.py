"""How fast is a canvas decoded on a GPU, as a graph and as it is shipped, against one token a step?

Two figures for each batch. *As shipped* is what the samplers do. *As a graph* is the step alone,
captured once and replayed: a forward over a canvas, the head, the draw, and the guess that the next
step is shown. The twin's step is captured alike, over one token behind the same context. A canvas
of L tokens takes its steps and one more forward that reads it, the twin takes L forwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling.acceptance import Quota
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.evidence import Posterior
from canvaslm.sampling.sampler import CanvasSampler
from canvaslm.training.plan import Recipe
from decode_models import canvases
from gpu_gate import EOT, Found, Place

_BATCHES = (1, 8, 32)
_STEPS = (8, 16)
_TEMPERATURE = 0.8


def decode(place: Place) -> Found:
    """Milliseconds a forward and tokens a second, at each batch, of canvases and of the twin."""
    found = Found()
    plans = place.plan("diffusion"), place.plan("autoregressive")
    denoiser, twin = (_model(plan, place) for plan in plans)
    prompt = place.choose(1024, 32)
    canvas = plans[0].layout.canvas_tokens
    if place.device.type != "cuda":
        found.fallbacks.append("decode: graphs, to calls of the same work (no CUDA)")
    for batch in place.choose(_BATCHES, (1, 2)):
        steps = {
            "canvas": _captured(_canvas_step(denoiser, batch, prompt), place),
            "twin": _captured(_token_step(twin, batch, prompt), place),
        }
        seconds = place.time(steps)
        twin_rate = batch / seconds["twin"].median_s
        found.rows.append(_row("twin, graph", batch, 1, seconds["twin"].median_s, twin_rate, 1.0))
        for n_steps in _STEPS:
            each = seconds["canvas"].median_s
            rate = batch * canvas / ((n_steps + 1) * each)
            found.rows.append(_row("canvas, graph", batch, n_steps, each, rate, rate / twin_rate))
            found.ratios[f"batch{batch}_steps{n_steps}/over_twin"] = rate / twin_rate
        _add_shipped(found, place, denoiser, twin, batch, prompt)
    return found


def _add_shipped(
    found: Found, place: Place, denoiser: Backbone, twin: Backbone, batch: int, prompt: int
) -> None:
    """The samplers themselves, each asked for one canvas of tokens."""
    new_tokens = denoiser.layout.canvas_tokens
    ids = stream(1, "bench").integers(1, denoiser.layout.vocab_size, size=(batch, prompt))
    prompts, seeds = torch.from_numpy(ids), list(range(batch))
    samplers: dict[str, tuple[int, CanvasSampler | AutoregressiveSampler]] = {
        "twin, as shipped": (1, _twin_sampler(twin))
    }
    for n_steps in _STEPS:
        samplers[f"canvas, as shipped, {n_steps}"] = (n_steps, _sampler(denoiser, n_steps))
    runs = {
        name: _asked(sampler, prompts, new_tokens, seeds) for name, (_, sampler) in samplers.items()
    }
    seconds = place.time(runs, rounds=2, warmup_rounds=1)
    rates = {name: batch * new_tokens / timing.median_s for name, timing in seconds.items()}
    for name, (n_steps, _) in samplers.items():
        n_forwards = new_tokens if n_steps == 1 else n_steps + 1
        each = seconds[name].median_s / n_forwards
        gain = rates[name] / rates["twin, as shipped"]
        found.rows.append(
            _row(name.removesuffix(f", {n_steps}"), batch, n_steps, each, rates[name], gain)
        )


def _asked(
    sampler: CanvasSampler | AutoregressiveSampler, prompts: Tensor, n_tokens: int, seeds: list[int]
) -> Callable[[], object]:
    return lambda: sampler.generate(prompts, n_tokens, seeds)


def _row(
    form: str, batch: int, steps: int, each_s: float, rate: float, gain: float
) -> dict[str, str | bool | int | float | None]:
    return {
        "decoder": form,
        "batch": batch,
        "steps": steps,
        "forward_ms": 1e3 * each_s,
        "tokens_per_s": rate,
        "over_twin": gain,
    }


def _sampler(model: Backbone, n_steps: int) -> CanvasSampler:
    return replace(
        canvases(model, n_steps),
        acceptance=Quota(threshold=1.0),
        end_temperature=_TEMPERATURE,
        vocab_chunk=8192,
        evidence=Posterior(),
    )


def _twin_sampler(model: Backbone) -> AutoregressiveSampler:
    return AutoregressiveSampler(model=model, temperature=_TEMPERATURE, bos_id=EOT, eot_id=None)


def _model(plan: Recipe, place: Place) -> Backbone:
    """Weights drawn anew, in bfloat16 on a GPU."""
    model = Backbone(plan.model, plan.layout)
    initialise(model, plan.pretrain.seed)
    return model.to(place.device, place.choose(torch.bfloat16, torch.float32)).eval()


@dataclass(kw_only=True)
class _Buffers:
    """What a captured step reads and writes, always at the same addresses."""

    ids: Tensor
    guess: Tensor
    uniforms: Tensor
    times: Tensor | None


def _filled(model: Backbone, batch: int, prompt: int) -> tuple[KVCache, _Buffers]:
    """A cache behind a prompt, and buffers for the canvas after it."""
    device, layout = model.head_weight.device, model.layout
    draws = stream(1, "bench")
    ids = torch.from_numpy(draws.integers(layout.vocab_size, size=(batch, prompt)))
    n_new = layout.canvas_tokens
    with torch.inference_mode():
        cache = KVCache.for_model(model, batch, prompt + n_new)
        model.encode(ids.to(device), cache=cache)
        uniforms = torch.from_numpy(draws.random((batch, n_new))).to(device)
        buffers = _Buffers(
            ids=ids[:, :n_new].to(device),
            guess=model.head_weight.new_zeros(batch, n_new, model.params.width),
            uniforms=uniforms,
            times=torch.full((batch, 1), 0.5, dtype=torch.float64, device=device)
            if model.time_embedding is not None
            else None,
        )
    return cache, buffers


def _canvas_step(model: Backbone, batch: int, prompt: int) -> Callable[[], object]:
    """One step of a canvas: forward, head, guess, draw; the next step reads what it drew."""
    cache, buffers = _filled(model, batch, prompt)
    guess = buffers.guess if model.params.self_conditioning != "off" else None

    @torch.inference_mode()
    def step() -> None:
        hidden = model.denoise(
            buffers.ids, buffers.times, context=cache, guess=guess, has_guess=None
        )
        logits = model.logits(hidden)
        if guess is not None:
            guess.copy_(logits.float().softmax(-1).to(logits.dtype) @ model.head_weight)
        buffers.ids.copy_(_drawn(logits, buffers.uniforms))

    return step


def _token_step(model: Backbone, batch: int, prompt: int) -> Callable[[], object]:
    """One step of the twin behind the same context; the cache is not advanced."""
    cache, buffers = _filled(model, batch, prompt)

    @torch.inference_mode()
    def step() -> None:
        hidden = model.denoise(buffers.ids, None, context=cache, guess=None, has_guess=None)
        buffers.ids.copy_(_drawn(model.logits(hidden), buffers.uniforms))

    return step


def _drawn(logits: Tensor, uniforms: Tensor) -> Tensor:
    """A token for each position, by inverting the cumulated distribution as the samplers do.

    Their own draw asks on the way whether its numbers are finite, and a graph cannot be asked.
    """
    cumulated = (logits.float() / _TEMPERATURE).softmax(-1).cumsum(-1)
    level = uniforms.float()[..., None] * cumulated[..., -1:]
    drawn = torch.searchsorted(cumulated, level, right=True).squeeze(-1)
    return drawn.clamp_(max=logits.shape[-1] - 1)


def _captured(step: Callable[[], object], place: Place) -> Callable[[], object]:
    """The step as a CUDA graph; without CUDA, the step."""
    if place.device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
