"""How fast does a canvas decoder write against one token a time, and where does a step's time go?

Random weights at one shape (5.8 million parameters, width 256, 4,096 words): text means nothing
here, and time does not depend on it. Canvases of 64 and 256 tokens at 4, 8, 16 and 32 steps and
with a rule that may stop earlier, at batch 1 and 8, in turn with our autoregressive decoder and
with ``generate`` of transformers' Llama and GPT-2 of the same size, over a growing and over a
preallocated cache. Then what one step of a canvas is made of, and what it costs without a cache.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from harness import CPU, begin, finish, parser, track

from canvaslm.evaluation.decoders import Decoder
from canvaslm.measure import interleaved_seconds
from canvaslm.model.packed import decoding_dtype
from canvaslm.reporting.benches import Scalar
from canvaslm.sampling.request import Generated
from decode_models import (
    ADAPTIVE,
    PEERS,
    Sizes,
    build_decoders,
    build_peers,
    prompts_of,
    without_cache,
)
from decode_parts import time_parts

_TINY = Sizes(
    width=32, n_layers=2, n_heads=2, ffn_width=48, vocab_size=512, prompt_tokens=16, window=160
)
_STEPS = (4, 8, 16, 32)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class _Group:
    """What is timed in turn."""

    dtype: str
    canvas_tokens: int
    new_tokens: int
    batch: int
    steps: tuple[int, ...]
    peers: tuple[str, ...] = ("llama_growing", "gpt2_growing")
    rounds: int | None = None  # None: as many as the options say


_ALL_PEERS = tuple(form for forms in PEERS.values() for form in forms)
_GROUPS = (
    _Group(
        dtype="float32", canvas_tokens=64, new_tokens=128, batch=1, steps=_STEPS, peers=_ALL_PEERS
    ),
    _Group(
        dtype="bfloat16", canvas_tokens=64, new_tokens=128, batch=1, steps=_STEPS, peers=_ALL_PEERS
    ),
    _Group(dtype="float32", canvas_tokens=256, new_tokens=256, batch=1, steps=_STEPS, rounds=2),
    _Group(dtype="bfloat16", canvas_tokens=256, new_tokens=256, batch=1, steps=_STEPS, rounds=2),
    _Group(dtype="float32", canvas_tokens=64, new_tokens=64, batch=8, steps=_STEPS, rounds=2),
    _Group(dtype="float32", canvas_tokens=256, new_tokens=256, batch=8, steps=(8,), rounds=1),
)
_TINY_GROUPS = (
    _Group(dtype="float32", canvas_tokens=64, new_tokens=64, batch=2, steps=(4, 8), rounds=1),
    _Group(dtype="bfloat16", canvas_tokens=64, new_tokens=64, batch=1, steps=(4, 8), rounds=1),
)


@dataclass(kw_only=True)
class _Found:
    rows: list[dict[str, Scalar]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Time group by group, then the parts of a step; print and write."""
    options = parser(__doc__, "decode", rounds=3).parse_args()
    begin(options)
    sizes, groups = (_TINY, _TINY_GROUPS) if options.tiny else (Sizes(), _GROUPS)
    found = _Found()
    with torch.inference_mode():
        for group in track(groups, total=len(groups), label="groups of decoders"):
            _time_group(group, sizes, options, found)
        for dtype in dict.fromkeys(group.dtype for group in groups):
            _time_step(dtype, sizes, options, found)
    finish(
        options,
        rows=found.rows,
        ratios=found.ratios,
        not_measured=found.not_measured,
        fallbacks=_fallbacks(),
    )


def _time_group(group: _Group, sizes: Sizes, options: argparse.Namespace, found: _Found) -> None:
    """Rows of tokens a second, and the ratios between them."""
    dtype = _DTYPES[group.dtype]
    decoders = build_decoders(sizes, group.canvas_tokens, dtype, group.steps)
    prompts = prompts_of(sizes, group.batch)
    made: dict[str, list[Generated]] = {}
    runs = {
        name: _run(decoder, prompts, group.new_tokens, made, name)
        for name, decoder in decoders.items()
    }
    peers = build_peers(sizes, prompts, group.new_tokens, dtype)
    runs |= {name: run for name, run in peers.items() if name in group.peers}
    n_rounds = min(options.rounds, group.rounds or options.rounds)
    timings = interleaved_seconds(runs, device=CPU, rounds=n_rounds, warmup_rounds=1)
    rates = {
        name: group.batch * group.new_tokens / timing.median_s for name, timing in timings.items()
    }
    for name, rate in rates.items():
        found.rows.append(
            {
                "type": group.dtype,
                "batch": group.batch,
                "canvas_tokens": group.canvas_tokens,
                "decoder": name,
                "tokens_per_s": rate,
                "over_ar": rate / rates["autoregressive"],
                **_counts(made.get(name)),
            }
        )
    _add_ratios(group, rates, options, found)


def _add_ratios(
    group: _Group, rates: dict[str, float], options: argparse.Namespace, found: _Found
) -> None:
    twin = rates["autoregressive"]
    llama = max((rates[name] for name in PEERS["llama"] if name in rates), default=None)
    for n_steps in group.steps:
        canvas = f"canvas{group.canvas_tokens}_steps{n_steps}"
        name = f"decode/{group.dtype}/{canvas}/batch{group.batch}{_threads(options)}"
        rate = rates[f"steps_{n_steps}"]
        found.ratios[f"{name}/ours_over_ar"] = rate / twin
        found.ratios[f"{name}/ours_over_llama"] = None if llama is None else rate / llama
    if group.canvas_tokens == 64:
        for peer, forms in PEERS.items():
            best = max((rates[form] for form in forms if form in rates), default=None)
            name = f"decode/{group.dtype}/batch{group.batch}{_threads(options)}/ar_over_{peer}"
            found.ratios[name] = None if best is None else twin / best
    nulls = (name for name, ratio in found.ratios.items() if ratio is None)
    found.not_measured |= dict.fromkeys(nulls, "transformers is absent")


def _time_step(dtype: str, sizes: Sizes, options: argparse.Namespace, found: _Found) -> None:
    """What one step of a canvas of 64 at batch 1 is made of, and what it costs without a cache."""
    canvas_tokens, n_steps = 64, 4 if options.tiny else 8
    rounds = 2 if options.tiny else 4 * options.rounds
    parts = time_parts(sizes, canvas_tokens, _DTYPES[dtype], n_steps, rounds=rounds)
    step = parts["step"]
    for name, part_s in parts.items():
        found.rows.append(
            {
                "type": dtype,
                "part_of_a_step": name,
                "milliseconds": 1e3 * part_s,
                "share_of_step": part_s / step,
            }
        )
    canvas = f"decode/{dtype}/canvas{canvas_tokens}_steps{n_steps}/batch1{_threads(options)}"
    # Parts are timed apart from the step: of a tiny one they may come out longer than the whole.
    found.ratios[f"{canvas}/not_products_share"] = max(0.0, 1 - parts["products"] / step)
    found.ratios[f"{canvas}/not_blocks_or_head_share"] = max(
        0.0, 1 - (parts["blocks"] + parts["head"]) / step
    )
    if dtype == "float32":
        decoder = build_decoders(sizes, canvas_tokens, _DTYPES[dtype], (n_steps,))[
            f"steps_{n_steps}"
        ]
        prompts = prompts_of(sizes, 1)
        runs = {
            "with": _run(decoder, prompts, 2 * canvas_tokens, {}, "with"),
            "without": _run(without_cache(decoder), prompts, 2 * canvas_tokens, {}, "without"),
        }
        timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=1)
        ratio = timings["with"].median_s / timings["without"].median_s
        found.ratios[f"{canvas}/without_cache_over_with"] = ratio


def _run(
    decoder: Decoder,
    prompts: list[list[int]],
    new_tokens: int,
    made: dict[str, list[Generated]],
    name: str,
) -> Callable[[], object]:
    """The work of one decoder; what it made is kept for its counts."""

    def run() -> None:
        made[name] = decoder.generate(prompts, new_tokens, list(range(len(prompts))))

    return run


def _counts(made: list[Generated] | None) -> dict[str, Scalar]:
    """Forwards and positions of the first row; all rows have as many."""
    if made is None:
        return {"forwards": None, "token_forwards": None}
    return {"forwards": made[0].forwards, "token_forwards": made[0].token_forwards}


def _threads(options: argparse.Namespace) -> str:
    return "" if options.threads == 1 else f"/threads{options.threads}"


def _fallbacks() -> list[str]:
    used = decoding_dtype(torch.empty(0, dtype=torch.bfloat16))
    found = [
        f"{ADAPTIVE}: random weights are never sure, so it takes all its steps",
    ]
    if used != torch.bfloat16:
        found.append(
            "our products of bfloat16 weights: from bfloat16 to float32, which this CPU without "
            "AMX multiplies faster; peers in bfloat16"
        )
    return found


if __name__ == "__main__":
    main()
