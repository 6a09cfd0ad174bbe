"""What is one step of a canvas made of?

The parts are run bare, one by one and in turn with whole canvases: the products of a step on
matrices that lie as the decoder's do, the blocks, the head, and the pass that also draws. What a
step takes beyond blocks, head and draw is acceptance, noise and book-keeping.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from harness import CPU

from canvaslm.measure import interleaved_seconds
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling.one_pass import Asked, answer
from canvaslm.sampling.sampler import CanvasSampler, CanvasStep
from decode_models import Sizes, build_decoders, prompts_of

_REPEATS = 4  # of each part in a round: one alone is too short for the clock


def time_parts(
    sizes: Sizes, canvas_tokens: int, dtype: torch.dtype, n_steps: int, *, rounds: int
) -> dict[str, float]:
    """Seconds of a whole step and of its parts at batch 1, behind a prompt and one canvas.

    Returns:
        ``step``, then ``products`` (in blocks and head), ``blocks``, ``head``, ``softmax_and_draw``
        (with the entropy), of which ``entropy``, and ``acceptance_and_noise``.
    """
    decoder = build_decoders(sizes, canvas_tokens, dtype, (n_steps,))[f"steps_{n_steps}"]
    assert isinstance(decoder, CanvasSampler)
    work, steps = _parts(decoder, sizes), _Steps()
    watched = replace(decoder, on_step=steps.watch)
    prompts = prompts_of(replace(sizes, prompt_tokens=sizes.prompt_tokens + canvas_tokens), 1)
    runs: dict[str, Callable[[], object]] = {name: _repeated(part) for name, part in work.items()}
    runs["canvas"] = lambda: watched.generate(prompts, canvas_tokens, [1])
    timings = interleaved_seconds(runs, device=CPU, rounds=rounds, warmup_rounds=2)
    bare = {name: timings[name].median_s / _REPEATS for name in work}
    step = steps.median_s(n_steps)
    return {
        "step": step,
        "products": bare["products"],
        "blocks": bare["blocks"],
        "head": bare["head"],
        "softmax_and_draw": bare["pass"] - bare["head"],
        "entropy": bare["entropy"],
        "acceptance_and_noise": step - bare["blocks"] - bare["pass"],
    }


class _Steps:
    """Notes when each step of a canvas ended."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def watch(self, state: CanvasStep) -> None:
        """As ``on_step``."""
        self._ends.append(time.perf_counter())

    def median_s(self, n_steps: int) -> float:
        """From one end to the next within a canvas, in the middle of all."""
        ends = torch.tensor(self._ends, dtype=torch.float64).view(-1, n_steps)
        return float(ends.diff(dim=1).median())


def _parts(decoder: CanvasSampler, sizes: Sizes) -> dict[str, Callable[[], object]]:
    model, L = decoder.model, decoder.model.layout.canvas_tokens
    draws = stream(1, "parts")
    n_clean = sizes.prompt_tokens + L
    cache = KVCache.for_model(model, 1, n_clean + L)
    clean = torch.from_numpy(draws.integers(sizes.vocab_size, size=(1, n_clean)))
    noisy = torch.from_numpy(draws.integers(sizes.vocab_size, size=(1, L)))
    model.encode_context(clean, cache=cache)
    times = torch.full((1, 1), 0.5, dtype=torch.float64)

    def blocks() -> Tensor:
        return model.denoise(noisy, times, context=cache, guess=None, has_guess=None)

    hidden = blocks()
    asked = Asked(
        hidden=hidden,
        head=cache.head(model),
        noisy=noisy,
        excess=torch.ones(1, L, dtype=torch.float64),
        temperature=0.6,
        uniforms=torch.from_numpy(draws.random((1, L))),
        vocab_chunk=decoder.vocab_chunk,
    )
    factor = hidden[0].to(asked.head.dtype)  # the pass makes its product in the head's type too
    logits = torch.mm(factor, asked.head)
    return {
        "products": _products(model, asked.head.dtype, L, n_clean + L),
        "blocks": blocks,
        "head": lambda: torch.mm(factor, asked.head, out=logits),
        "pass": lambda: answer(asked, step=0, n_steps=8),
        "entropy": lambda: torch.mul(logits, logits, out=logits).sum(-1),
    }


def _products(
    model: Backbone, dtype: torch.dtype, n_rows: int, n_keys: int
) -> Callable[[], object]:
    """All matrix products of one step, of the same sizes and with weights of their own."""
    shape, draws = model.params, torch.Generator().manual_seed(1)
    D, inner = shape.width, shape.n_heads * shape.head_width
    sides = [
        (D, inner + 2 * shape.n_kv_heads * shape.head_width),
        (inner, D),
        (D, shape.ffn_width),
        (D, shape.ffn_width),
        (shape.ffn_width, D),
    ]
    pairs = [_pair(n_rows, *side, dtype, draws) for _ in range(shape.n_layers) for side in sides]
    pairs.append(_pair(n_rows, D, model.layout.vocab_size, dtype, draws))
    groups = shape.n_heads
    q = torch.randn(groups, n_rows, shape.head_width, generator=draws).to(dtype)
    k = torch.randn(groups, shape.head_width, n_keys, generator=draws).to(dtype)
    scores, read = torch.bmm(q, k), torch.empty_like(q)
    v = k.transpose(1, 2).contiguous()

    def run() -> None:
        for left, right, out in pairs:
            torch.mm(left, right, out=out)
        for _ in range(shape.n_layers):
            torch.bmm(q, k, out=scores)
            torch.bmm(scores, v, out=read)

    return run


def _pair(
    n_rows: int, inputs: int, outputs: int, dtype: torch.dtype, draws: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    left = torch.randn(n_rows, inputs, generator=draws).to(dtype)
    right = torch.randn(inputs, outputs, generator=draws).to(dtype)
    return left, right, left @ right


def _repeated(part: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        for _ in range(_REPEATS):
            part()

    return run
