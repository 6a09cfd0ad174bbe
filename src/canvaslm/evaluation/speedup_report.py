"""What does the comparison of speeds read, and what does it write?

``metrics.json`` holds the rows of two comparisons, one of ``new_tokens`` and one of
``short_new_tokens``, the held-out figures beside them, the recipe, and a verdict on the first.
``samples.json`` is the text behind them. A row that could not be measured stands there all the
same, and says why.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvaslm.corpus.shards import read_manifest
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.device import describe_machine, pick_device
from canvaslm.evaluation.contestant import load_contestant, refuse_other_window
from canvaslm.evaluation.continuation import matching_tokenizer
from canvaslm.evaluation.decoders import (
    Decoder,
    build_companion_decoders,
    build_decoders,
)
from canvaslm.evaluation.decoding_task import (
    Task,
    held_out_windows,
    refuse_part_canvases,
    texts_behind,
)
from canvaslm.evaluation.sample_quality import (
    NOT_MEASURED,
    SampleQuality,
    judge_samples,
    quality_figures,
)
from canvaslm.evaluation.speedup import (
    SpeedupRow,
    count_rows,
    judge_rows,
    time_rows,
    verdict_of,
)
from canvaslm.evaluation.speedup_params import EvalSpeedupParams
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.shape import ModelParams
from canvaslm.randomness import stream
from canvaslm.reporting.files import write_json
from canvaslm.reporting.progress import Track
from canvaslm.sampling.request import Generated

_COUNTS = (
    "n_rows",
    "new_tokens",
    "tokens",
    "forwards",
    "prefill_forwards",
    "encoding_forwards",
    "token_forwards",
    "batch_forwards",
    "tokens_per_forward",
    "tokens_per_forward_after_prompt",
)
_OF_DRAFTS = ("verifications", "accepted", "accepted_per_forward", "accepted_per_verification")
_UNTRAINED = "the checkpoint's clean stream was not trained to predict the next token"
_DRAWN = "the weights are drawn, and how many drafted tokens pass depends on the weights"


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """All decoders on one task, and the text that people wrote behind the same prompts."""

    task: Task
    rows: dict[str, SpeedupRow]
    samples: dict[str, list[Generated]]
    held_out: SampleQuality | None


def measure_speedup(
    *,
    shards: Path,
    tokenizer: Path,
    autoregressive: Path,
    diffusion: Path,
    out: Path,
    params: EvalSpeedupParams,
    track: Track,
) -> None:
    """Compare the decoders of two checkpoints: counts, seconds, quality; write the report.

    Args:
        shards: the folder of packed shards; prompts come from its split ``val``.
        tokenizer: the tokenizer that the shards were packed with.
        autoregressive: the twin's checkpoint.
        diffusion: the diffusion model's checkpoint.
        out: the folder of the report.
        params: the setup.
        track: shows how far it is.

    Raises:
        InputError: a checkpoint is not whole or does not fit the shards, the tokenizer is another
            one, there are too few held-out windows, or prompt and answer do not fit in one.
    """
    manifest = read_manifest(shards)
    text = matching_tokenizer(tokenizer, manifest.tokenizer_sha256)
    twin = load_contestant(autoregressive, "autoregressive", manifest)
    denoiser = load_contestant(diffusion, "diffusion", manifest)
    refuse_other_window(twin, denoiser)
    refuse_part_canvases(denoiser.model, params.prompt_tokens, section="eval_speedup")
    device, eot_id = pick_device(params.device), manifest.eot_id
    judge = twin.model.to(device)
    decoders = build_decoders(
        denoiser.model.to(device), judge, params, eot_id=eot_id, bos_id=eot_id
    )
    if denoiser.diffusion.learns_next_token:
        decoders |= build_companion_decoders(denoiser.model, params, eot_id=eot_id, bos_id=eot_id)
    windows = held_out_windows(shards, denoiser.layout, params.n_prompts, section="eval_speedup")
    comparisons = [
        _compare(decoders, judge, windows, n_tokens, eot_id=eot_id, params=params, track=track)
        for n_tokens in (params.new_tokens, params.short_new_tokens)
    ]
    setting = {
        "recipe": _recipe(params, prompts="held_out", weights="trained"),
        "autoregressive_training": twin.training,
        "diffusion_training": denoiser.training,
        "machine": describe_machine(device),
    }
    _write(out, comparisons, setting, why_missing=_UNTRAINED)
    write_json(out / "samples.json", {"samples": _texts(comparisons, text)})


def count_speedup(
    *,
    shards: Path,
    out: Path,
    layout: Layout,
    model: ModelParams,
    params: EvalSpeedupParams,
    track: Track,
) -> None:
    """Count forwards with freshly drawn weights; time nothing, judge nothing, read no checkpoint.

    No text ends before the asked number, so that the fixed schedules and the twin are counted as
    they are whatever the weights; the adaptive row shows a model that is never sure.

    Args:
        shards: prompts come from here where it has a manifest, else they are drawn.
        out: the folder of the report.
        layout: canvas, window and vocabulary.
        model: the shape of the weights.
        params: the setup.
        track: shows how far it is.

    Raises:
        InputError: there are too few held-out windows, or prompt and answer do not fit in one.
    """
    device = pick_device(params.device)
    denoiser, twin = Backbone(model, layout).eval(), Backbone(model.twin(), layout).eval()
    refuse_part_canvases(denoiser, params.prompt_tokens, section="eval_speedup")
    for network in (denoiser, twin):
        initialise(network, params.seed)
        network.to(device)
    has_shards = (shards / "manifest.json").is_file()
    if has_shards:
        windows = held_out_windows(shards, layout, params.n_prompts, section="eval_speedup")
    else:
        windows = _drawn_windows(layout, params)
    decoders = build_decoders(denoiser, twin, params, eot_id=None, bos_id=0)
    comparisons = []
    for n_tokens in (params.new_tokens, params.short_new_tokens):
        task = _task(windows, n_tokens, params)
        rows, samples = count_rows(decoders, task, track=track)
        comparisons.append(_Comparison(task=task, rows=rows, samples=samples, held_out=None))
    prompts = "held_out" if has_shards else "drawn"
    recipe = _recipe(params, prompts=prompts, weights="drawn")
    _write(out, comparisons, {"recipe": recipe, "machine": NOT_MEASURED}, why_missing=_DRAWN)
    write_json(out / "samples.json", {"samples": NOT_MEASURED})


def _compare(
    decoders: dict[str, Decoder],
    twin: Backbone,
    windows: np.ndarray,
    n_tokens: int,
    *,
    eot_id: int,
    params: EvalSpeedupParams,
    track: Track,
) -> _Comparison:
    """Count, time and judge all decoders at one length."""
    task = _task(windows, n_tokens, params)
    written = texts_behind(
        windows, prompt_tokens=params.prompt_tokens, new_tokens=n_tokens, eot_id=eot_id
    )
    held_out = judge_samples(twin, task.prompts, written, bos_id=eot_id)
    rows, samples = count_rows(decoders, task, track=track)
    rows = time_rows(rows, decoders, task, rounds=params.rounds, warmup_rounds=params.warmup_rounds)
    rows = judge_rows(
        rows,
        samples,
        task,
        twin=twin,
        bos_id=eot_id,
        held_out=held_out,
        min_diversity_share=params.min_diversity_share,
        max_excess_nats=params.max_excess_nats,
    )
    return _Comparison(task=task, rows=rows, samples=samples, held_out=held_out)


def _task(windows: np.ndarray, n_tokens: int, params: EvalSpeedupParams) -> Task:
    return Task(
        prompts=windows[:, : params.prompt_tokens].tolist(),
        new_tokens=n_tokens,
        batch_rows=params.batch_rows,
        seed=params.seed,
    )


def _drawn_windows(layout: Layout, params: EvalSpeedupParams) -> np.ndarray:
    """(n_prompts, T) uniform ids."""
    size = (params.n_prompts, layout.window_tokens)
    return stream(params.seed, "prompts").integers(layout.vocab_size, size=size)


def _recipe(params: EvalSpeedupParams, *, prompts: str, weights: str) -> dict[str, Any]:
    """What a figure needs beside it: the whole setup but the device, and how forwards ran."""
    more = {"prompts": prompts, "weights": weights, "compile": "none"}
    return params.model_dump(exclude={"device"}) | more


def _write(
    out: Path, comparisons: list[_Comparison], setting: dict[str, Any], *, why_missing: str
) -> None:
    """Write ``metrics.json``; a decoder of a companion that there is not has a reason."""
    main, short = (_all_figures(comparison.rows, why_missing) for comparison in comparisons)
    verdict, reason = verdict_of(comparisons[0].rows)
    metrics = setting | {
        "rows": main,
        "short_rows": short,
        "held_out": quality_figures(comparisons[0].held_out),
        "short_held_out": quality_figures(comparisons[1].held_out),
        "verdict": verdict,
        "verdict_reason": reason,
    }
    write_json(out / "metrics.json", metrics)


def _all_figures(rows: dict[str, SpeedupRow], why_missing: str) -> dict[str, dict[str, Any]]:
    """Every row as figures, those that were not measured included."""
    found = {name: _figures(row, rows) for name, row in rows.items()}
    keys = [key for key in found["autoregressive"] if key != "ended_by"]
    told = {"ended_by": {}, "reason": why_missing}
    missing = {
        "verified": dict.fromkeys((*keys, *_OF_DRAFTS), NOT_MEASURED) | told,
        "companion": dict.fromkeys(keys, NOT_MEASURED) | told,
    }
    return missing | found


def _figures(row: SpeedupRow, rows: dict[str, SpeedupRow]) -> dict[str, Any]:
    """One row as figures; whatever was not measured says so."""
    names = (*_COUNTS, *_OF_DRAFTS) if row.verifications else _COUNTS
    figures: dict[str, Any] = {name: getattr(row, name) for name in names}
    timing, rate = row.timing, row.tokens_per_second
    seconds = {
        "median_s": timing and timing.median_s,
        "fastest_s": timing and timing.fastest_s,
        "slowest_s": timing and timing.slowest_s,
        "tokens_per_second": rate,
        "tokens_per_second_slowest": timing and row.tokens / timing.slowest_s,
        "tokens_per_second_fastest": timing and row.tokens / timing.fastest_s,
        "speedup_over_autoregressive": _over(rate, rows.get("autoregressive")),
        "speedup_over_companion": _over(rate, rows.get("companion")),
    }
    figures |= seconds | {"is_repetitive": row.is_repetitive, "is_noise": row.is_noise}
    quality = quality_figures(row.quality)
    figures |= {key: quality[key] for key in quality if key not in ("n_tokens", "n_samples")}
    figures = {key: NOT_MEASURED if value is None else value for key, value in figures.items()}
    return figures | {"ended_by": row.ended_by}


def _over(rate: float | None, other: SpeedupRow | None) -> float | None:
    """A speed in multiples of another's; ``None`` where one of the two was not measured."""
    base = other and other.tokens_per_second
    return rate / base if rate and base else None


def _texts(comparisons: list[_Comparison], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Every sample as text behind its prompt."""
    return [
        {
            "decoder": name,
            "new_tokens": comparison.task.new_tokens,
            "prompt": tokenizer.decode(prompt),
            "text": tokenizer.decode(made.ids),
            "tokens": len(made.ids),
            "reason": made.reason,
        }
        for comparison in comparisons
        for name, samples in comparison.samples.items()
        for prompt, made in zip(comparison.task.prompts, samples, strict=True)
    ]
