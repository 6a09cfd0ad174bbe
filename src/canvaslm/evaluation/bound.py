"""How close is the denoiser to its twin, at every level of noise, and where does the gap lie?

Both score the same held-out tokens: the twin exactly, the denoiser by its bound at several numbers
of times and in continuous time, without self-conditioning and with it. Every score carries its
recipe, and scores that may not be compared are not (``docs/bound.md``).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canvaslm.corpus.entropy import entropy_nats
from canvaslm.corpus.manifest import read_manifest
from canvaslm.corpus.windows import Windows
from canvaslm.device import pick_device
from canvaslm.diffusion.levels import ContinuousLevels, GridLevels, Levels
from canvaslm.evaluation.bound_figures import (
    BoundScore,
    bits_per_byte,
    bound_scores,
    curve,
    gap_shares,
    twin_score,
)
from canvaslm.evaluation.bound_params import EvalBoundParams
from canvaslm.evaluation.bound_proof import Proof, prove_at_canvas_one
from canvaslm.evaluation.comparable import judge_rows
from canvaslm.evaluation.contestant import Contestant, load_contestant, refuse_other_window
from canvaslm.evaluation.loss_parity import evaluating, spread_windows
from canvaslm.evaluation.tally import HeldOut
from canvaslm.evaluation.token_costs import TokenCosts, score_tokens
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.objective.denoising_bound import conditionings_of
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.files import write_csv, write_json
from canvaslm.reporting.progress import Track

_TWIN_ESTIMATOR = "next-token likelihood within the window, after the end-of-text token"
_TIME_COLUMNS = (
    "sweep",
    "self_conditioning",
    "level",
    "from_time",
    "to_time",
    "bound_nats_per_token",
    "diagnostic_cross_entropy_nats",
)
_PLACE_COLUMNS = (
    "n_tokens",
    "bound_nats_per_token",
    "standard_error_nats",
    "autoregressive_nats_per_token",
    "autoregressive_standard_error_nats",
)


@dataclass(frozen=True, kw_only=True)
class FullBound:
    """What was measured, with which draws, and whether the bound is what it should be."""

    costs: TokenCosts
    seed: int
    proof: Proof

    def metrics(self) -> dict[str, Any]:
        """The figures with their recipes, as ``metrics.json`` holds them."""
        costs = self.costs
        scores = bound_scores(costs)
        twin = twin_score(costs)
        autoregressive = self._recipe("exact", "none", _TWIN_ESTIMATOR, "off") | {
            "nats_per_token": twin.value,
            "standard_error_nats": twin.standard_error,
            "bits_per_byte": bits_per_byte(costs.twin, costs.text_bytes),
        }
        diffusion: dict[str, Any] = {"off": {}, "two_pass": {}}
        for score in scores:
            into = diffusion[score.costs.conditioning]
            into[score.costs.levels.name] = self._row(score)
        if not diffusion["two_pass"]:
            diffusion["two_pass"] = "not_measured"
            diffusion["two_pass_reason"] = "the network takes no guess"
        verdict, reason = judge_rows(autoregressive, list(_rows_of(diffusion)))
        return {
            "autoregressive": autoregressive,
            "diffusion": diffusion,
            "shares": {name: _told_shares(share) for name, share in gap_shares(costs).items()},
            "proof": self.proof.metrics(),
            "seed": self.seed,
            "unigram_entropy_nats": entropy_nats(np.bincount(costs.ids.ravel())),
            "n_windows": len(costs.numbers),
            "n_documents": len(np.unique(costs.documents)),
            "n_tokens": costs.ids.size,
            "n_text_bytes": int(costs.text_bytes.sum()),
            "verdict": verdict,
            "verdict_reason": reason,
        }

    def by_time(self) -> Iterator[tuple[object, ...]]:
        """Rows of ``by_time.csv``: what each level adds to its bound, and the diagnostic there."""
        for bound in self.costs.bounds:
            n = bound.levels.n_passes
            for level, (nats, plain) in enumerate(bound.by_level.tolist(), start=1):
                times = ((level - 1) / n, level / n)
                yield bound.levels.name, bound.conditioning, level, *times, nats, plain

    def by_place(self, places: np.ndarray) -> Iterator[tuple[object, ...]]:
        """Rows of a curve over places (W, T): each bound beside the twin on the same tokens."""
        for bound in self.costs.bounds:
            for point in curve(self.costs, bound, places):
                ends = (point.bound, point.twin)
                figures = (x for ratio in ends for x in (ratio.value, ratio.standard_error))
                shown = ("" if math.isnan(figure) else figure for figure in figures)
                name = (bound.levels.name, bound.conditioning)
                yield *name, point.place, point.n_tokens, *shown

    def _row(self, score: BoundScore) -> dict[str, Any]:
        levels, conditioning = score.costs.levels, score.costs.conditioning
        row = self._recipe("upper_bound", levels.noise_levels, levels.estimator, conditioning)
        row |= {
            "bound_nats_per_token": score.per_token.value,
            "standard_error_nats": score.per_token.standard_error,
            "bits_per_byte": score.bits_per_byte,
            "gap_percent": 100 * score.over_twin.value,
            "gap_standard_error_percent": 100 * score.over_twin.standard_error,
            "diagnostic_cross_entropy_nats": score.diagnostic,
        }
        row |= score.gap.told("gap", "nats")
        if conditioning != "off":
            row |= score.over_off.told("over_off", "nats")
        return row

    def _recipe(
        self, kind: str, noise_levels: str, estimator: str, conditioning: str
    ) -> dict[str, Any]:
        """What a score must say of itself, so that it can be held against another."""
        return {
            "kind": kind,
            "estimator": estimator,
            "noise_levels": noise_levels,
            "draws_per_level": 0 if kind == "exact" else 1,
            "self_conditioning": conditioning,
            "seed": self.seed,
            "n_tokens": self.costs.ids.size,
            "n_text_bytes": int(self.costs.text_bytes.sum()),
            "tokens_sha256": self.costs.tokens_sha256,
        }


def judge_bound(
    *,
    shards: Path,
    autoregressive: Path,
    diffusion: Path,
    out: Path,
    params: EvalBoundParams,
    track: Track,
) -> FullBound:
    """Take the bound of a checkpoint in full and write ``metrics.json`` and three curves.

    Args:
        shards: the folder of packed shards; its split ``val`` is scored.
        autoregressive: the twin's checkpoint.
        diffusion: the diffusion model's checkpoint.
        out: the folder of the report.
        params: which levels of noise, which windows.
        track: shows how far it is.

    Raises:
        InputError: a checkpoint is not whole or does not fit the shards or the other one, the
            split holds no window, or the device is absent.
    """
    manifest = read_manifest(shards)
    twin = load_contestant(autoregressive, "autoregressive", manifest)
    denoiser = load_contestant(diffusion, "diffusion", manifest)
    refuse_other_window(twin, denoiser)
    device = pick_device(params.device)
    result = measure_bound(
        twin.model.to(device),
        denoiser.model.to(device),
        Windows(shards, "val", denoiser.layout.window_tokens),
        next_token=NextToken(
            layout=twin.layout, eot_id=manifest.eot_id, vocab_chunk=params.vocab_chunk
        ),
        layout=denoiser.layout,
        train_times=denoiser.diffusion.train_times,
        params=params,
        track=track,
    )
    _write(result, {"autoregressive": twin, "diffusion": denoiser}, out)
    return result


def measure_bound(
    twin: Backbone,
    denoiser: Backbone,
    held_out: HeldOut,
    *,
    next_token: NextToken,
    layout: Layout,
    train_times: int | None,
    params: EvalBoundParams,
    track: Track,
) -> FullBound:
    """Score the same held-out windows with both models at all levels, and prove it at canvas 1.

    Args:
        twin: the autoregressive model.
        denoiser: the diffusion model, on the same device.
        held_out: windows that neither has seen.
        next_token: the twin's objective.
        layout: of the denoiser.
        train_times: the number of times that the denoiser was trained at; None: at any.
        params: which levels of noise, which windows.
        track: shows how far it is.
    """
    numbers = spread_windows(len(held_out), params.max_windows)
    costs = score_tokens(
        twin,
        denoiser,
        held_out,
        numbers,
        next_token=next_token,
        layout=layout,
        sweeps=_sweeps(params, train_times, denoiser.params.tilt),
        conditionings=conditionings_of(denoiser.params),
        seed=params.seed,
        batch_windows=params.batch_windows,
        track=track,
    )
    proven = spread_windows(len(held_out), params.proof_windows)
    with evaluating(twin):
        proof = prove_at_canvas_one(
            twin,
            torch.from_numpy(held_out.gather(proven)).to(twin.head_weight.device),
            proven,
            next_token=next_token,
            n_times=params.n_times,
            seed=params.seed,
        )
    return FullBound(costs=costs, seed=params.seed, proof=proof)


def _sweeps(params: EvalBoundParams, train_times: int | None, tilt: float) -> list[Levels]:
    told = train_times if params.told_times == "trained" else None
    grids: list[Levels] = [GridLevels(n_times=n, tilt=tilt, told=told) for n in params.n_times]
    return [*grids, ContinuousLevels(n_passes=params.continuous_passes, tilt=tilt, told=told)]


def _rows_of(diffusion: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rows in diffusion.values():
        if isinstance(rows, dict):
            yield from rows.values()


def _told_shares(shares: Any) -> dict[str, float]:
    told: dict[str, float] = {}
    for name, ratio in vars(shares).items():
        told |= ratio.told(name, "nats")
    return told


def _write(result: FullBound, contestants: dict[str, Contestant], out: Path) -> None:
    """Write the report; the training behind each model joins its figures."""
    metrics, costs = result.metrics(), result.costs
    for name, contestant in contestants.items():
        metrics[name] |= contestant.training
    write_csv(out / "by_time.csv", _TIME_COLUMNS, result.by_time())
    for place, places in (("position", costs.positions), ("canvas", costs.canvases)):
        columns = ("sweep", "self_conditioning", place, *_PLACE_COLUMNS)
        write_csv(out / f"by_{place}.csv", columns, result.by_place(places))
    write_json(out / "metrics.json", metrics)
