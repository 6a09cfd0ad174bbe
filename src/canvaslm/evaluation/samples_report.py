"""What does the comparison of samplers read, and what does it write?

``metrics.json`` holds a row for each sampler, with what it took, what its text is worth and how it
stands among the others; the twin's own samples and held-out text beside them; the recipe; and a
verdict on all.
"""

import dataclasses
from pathlib import Path
from typing import Any

from canvaslm.corpus.shards import read_manifest
from canvaslm.device import describe_machine, pick_device
from canvaslm.evaluation.contestant import load_contestant, refuse_other_window
from canvaslm.evaluation.decoders import Decoder
from canvaslm.evaluation.decoding_task import (
    Task,
    held_out_windows,
    refuse_part_canvases,
    texts_behind,
)
from canvaslm.evaluation.frontier import (
    Standing,
    forwards_per_token,
    seconds_per_token,
    stand,
    tokens_with_end,
    verdict_of_standings,
)
from canvaslm.evaluation.sample_quality import (
    NOT_MEASURED,
    judge_samples,
    quality_figures,
    share_of_equal_tokens,
)
from canvaslm.evaluation.sampler_grid import GridPoint, grid_points, reference_of
from canvaslm.evaluation.samples_params import EvalSamplesParams
from canvaslm.evaluation.speedup import SpeedupRow, count_rows, judge_rows
from canvaslm.measure import Timing, seconds
from canvaslm.reporting.files import write_json
from canvaslm.reporting.progress import Track, untracked
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.request import Generated

TWIN = "autoregressive"
_COUNTS = ("n_rows", "new_tokens", "forwards", "token_forwards", "batch_forwards")


def measure_samples(
    *,
    shards: Path,
    autoregressive: Path,
    diffusion: Path,
    out: Path,
    params: EvalSamplesParams,
    track: Track,
) -> None:
    """Compare the samplers of one denoiser by the quality of their samples; write the report.

    Args:
        shards: the folder of packed shards; prompts come from its split ``val``.
        autoregressive: the twin's checkpoint, which judges, and writes the samples beside them.
        diffusion: the diffusion model's checkpoint.
        out: the folder of the report.
        params: the setup.
        track: shows how far it is.

    Raises:
        InputError: a checkpoint is not whole or does not fit the shards, there are too few held-out
            windows, or prompt and answer do not fit in one.
    """
    manifest = read_manifest(shards)
    twin = load_contestant(autoregressive, "autoregressive", manifest)
    denoiser = load_contestant(diffusion, "diffusion", manifest)
    refuse_other_window(twin, denoiser)
    refuse_part_canvases(denoiser.model, params.prompt_tokens, section="eval_samples")
    device, eot_id = pick_device(params.device), manifest.eot_id
    judge, model = twin.model.to(device), denoiser.model.to(device)
    windows = held_out_windows(shards, denoiser.layout, params.n_prompts, section="eval_samples")
    task = Task(
        prompts=windows[:, : params.prompt_tokens].tolist(),
        new_tokens=params.new_tokens,
        batch_rows=params.batch_rows,
        seed=params.seed,
    )
    points = grid_points(params)
    decoders: dict[str, Decoder] = {
        TWIN: AutoregressiveSampler(
            model=judge,
            temperature=params.autoregressive_temperature,
            bos_id=eot_id,
            eot_id=eot_id,
        )
    }
    decoders |= {name: x.sampler(model, params, eot_id=eot_id) for name, x in points.items()}
    rows, samples = run_timed(decoders, task, track=track)
    written = texts_behind(
        windows, prompt_tokens=params.prompt_tokens, new_tokens=task.new_tokens, eot_id=eot_id
    )
    held_out = judge_samples(judge, task.prompts, written, bos_id=eot_id)
    limits = {
        "min_diversity_share": params.min_diversity_share,
        "max_excess_nats": params.max_excess_nats,
    }
    rows = judge_rows(rows, samples, task, twin=judge, bos_id=eot_id, held_out=held_out, **limits)
    theirs = {name: row for name, row in rows.items() if name != TWIN}
    standings = stand(theirs, held_out, **limits)
    verdict, reason = verdict_of_standings(standings)
    metrics = {
        "rows": {
            name: _place(point)
            | _figures(rows[name])
            | _agreement(point, points, samples[name], samples)
            | _standing(standings[name])
            for name, point in points.items()
        },
        TWIN: _figures(rows[TWIN]),
        "held_out": quality_figures(held_out),
        "recipe": params.model_dump(exclude={"device"}) | {"compile": "none"},
        "autoregressive_training": twin.training,
        "diffusion_training": denoiser.training,
        "machine": describe_machine(device),
        "verdict": verdict,
        "verdict_reason": reason,
    }
    write_json(out / "metrics.json", metrics)


def run_timed(
    decoders: dict[str, Decoder], task: Task, *, track: Track
) -> tuple[dict[str, SpeedupRow], dict[str, list[Generated]]]:
    """Run every decoder once and count; the seconds of that one run stand in the rows.

    The first decoder of each network runs a batch before, so that none is timed cold.
    """
    warm = dataclasses.replace(task, prompts=task.prompts[: task.batch_rows])
    for decoder in {decoder.model: decoder for decoder in reversed(decoders.values())}.values():
        warm.run(decoder)
    rows: dict[str, SpeedupRow] = {}
    samples: dict[str, list[Generated]] = {}

    def run(name: str) -> None:
        counted, made = count_rows({name: decoders[name]}, task, track=untracked)
        rows.update(counted)
        samples.update(made)

    for name in track(list(decoders), total=len(decoders), label="samplers run"):
        device = decoders[name].model.head_weight.device
        elapsed_s = seconds(lambda name=name: run(name), device=device)
        rows[name] = dataclasses.replace(rows[name], timing=Timing(rounds_s=(elapsed_s,)))
    return rows, samples


def _place(point: GridPoint) -> dict[str, Any]:
    """Where a sampler stands on the grid."""
    start, end = point.temperatures
    return {
        "acceptance": point.acceptance,
        "stopping": point.stopping,
        "denoise_steps": point.denoise_steps,
        "start_temperature": start,
        "end_temperature": end,
        "is_reference": point.is_reference,
    }


def _figures(row: SpeedupRow) -> dict[str, Any]:
    """What a row took, and what its text is worth; whatever was not measured says so."""
    per_token = forwards_per_token(row)
    figures: dict[str, Any] = {name: getattr(row, name) for name in _COUNTS}
    figures |= {
        "tokens_with_end": tokens_with_end(row),
        "tokens_with_end_per_forward": 1 / per_token if per_token else None,
        "forwards_per_token": per_token,
        "elapsed_s": row.timing and row.timing.median_s,
        "seconds_per_token": seconds_per_token(row),
        "is_repetitive": row.is_repetitive,
        "is_noise": row.is_noise,
    }
    figures = {key: NOT_MEASURED if value is None else value for key, value in figures.items()}
    quality = quality_figures(row.quality)
    figures |= {key: quality[key] for key in quality if key != "n_samples"}
    return figures | {"ended_by": row.ended_by}


def _agreement(
    point: GridPoint,
    points: dict[str, GridPoint],
    made: list[Generated],
    samples: dict[str, list[Generated]],
) -> dict[str, Any]:
    """How far samples are those of the same acceptance rule that had many steps."""
    reference = reference_of(point, points)
    share = share_of_equal_tokens(
        [sample.ids for sample in made], [sample.ids for sample in samples[reference]]
    )
    return {
        "reference": reference,
        "share_equal_to_reference": NOT_MEASURED if share is None else share,
    }


def _standing(standing: Standing) -> dict[str, Any]:
    """How a sampler stands, as keys of its row."""
    on_seconds = standing.is_on_frontier_of_seconds
    told: dict[str, Any] = {
        "standing": standing.word,
        "standing_reason": standing.told,
        "is_on_frontier_of_seconds": NOT_MEASURED if on_seconds is None else on_seconds,
        "won": list(standing.won),
        "lost": list(standing.lost),
    }
    return told | ({"dominated_by": standing.dominated_by} if standing.dominated_by else {})
