"""Is the diffusion model as good a model of held-out text as its autoregressive twin?

Both score the same tokens of the same windows. The twin gives the exact likelihood; the diffusion
model gives an upper bound on minus its logarithm, summed over all times (``docs/bound.md``). Plain
cross-entropy at the times of training is reported as a diagnostic only: it is no likelihood, and
its name says so.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canvaslm.corpus.manifest import read_manifest
from canvaslm.corpus.windows import Windows
from canvaslm.device import pick_device
from canvaslm.evaluation.contestant import Contestant, load_contestant, refuse_other_window
from canvaslm.evaluation.parity_params import EvalLossParityParams
from canvaslm.evaluation.tally import DocumentRow, HeldOut, Tally, TimeRow, Totals
from canvaslm.model.backbone import Backbone
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.files import write_csv, write_json
from canvaslm.reporting.progress import Track
from canvaslm.reporting.verdict import Verdict

_TWIN_ESTIMATOR = "next-token likelihood within the window, after the end-of-text token"
_BOUND_ESTIMATOR = "negative ELBO, clean context, every time of every canvas once, one draw each"
_NESTED = ("twin", "bound", "by_time", "by_document")


@dataclass(frozen=True, kw_only=True)
class LossParity:
    """What was measured, how, and what it was held against."""

    totals: Totals
    n_times: int
    seed: int
    max_gap_percent: float

    @property
    def verdict(self) -> Verdict:
        """Whether both scores are numbers and the gap between them is within its limit."""
        is_within = not self._not_finite() and self.totals.gap_percent <= self.max_gap_percent
        return "pass" if is_within else "fail"

    @property
    def verdict_reason(self) -> str:
        """What the verdict rests on."""
        broken = self._not_finite()
        if broken:
            return f"not finite: {', '.join(broken)}"
        gap, limit = self.totals.gap_percent, self.max_gap_percent
        return f"gap {gap:.3g} %, at most {limit:g} % allowed"

    def _not_finite(self) -> list[str]:
        """The scores that are no numbers: a model that diverged must not win by it."""
        scores = {
            "autoregressive": self.totals.twin.nats_per_token,
            "diffusion": self.totals.bound.nats_per_token,
            "gap_percent": self.totals.gap_percent,
        }
        return [name for name, value in scores.items() if not math.isfinite(value)]

    def metrics(self) -> dict[str, Any]:
        """The figures with their recipe, as ``metrics.json`` holds them."""
        totals = self.totals
        plain = [row.diagnostic_cross_entropy_nats for row in totals.by_time]
        twin, bound = vars(totals.twin).copy(), vars(totals.bound).copy()
        bound["bound_nats_per_token"] = bound.pop("nats_per_token")
        figures = {key: value for key, value in vars(totals).items() if key not in _NESTED}
        return figures | {
            "autoregressive": twin | {"estimator": _TWIN_ESTIMATOR},
            "diffusion": bound
            | {
                "estimator": _BOUND_ESTIMATOR,
                "n_times": self.n_times,
                "seed": self.seed,
                "diagnostic_cross_entropy_nats": math.fsum(plain) / len(plain),
            },
            "max_gap_percent": self.max_gap_percent,
            "verdict": self.verdict,
            "verdict_reason": self.verdict_reason,
        }


def judge_loss_parity(
    *,
    shards: Path,
    autoregressive: Path,
    diffusion: Path,
    out: Path,
    params: EvalLossParityParams,
    track: Track,
) -> LossParity:
    """Compare two checkpoints on held-out shards and write the report.

    It is ``metrics.json``, with ``by_time.csv`` and ``by_document.csv`` beside it.

    Args:
        shards: the folder of packed shards; its split ``val`` is scored.
        autoregressive: the twin's checkpoint.
        diffusion: the diffusion model's checkpoint.
        out: the folder of the report.
        params: which windows, how many times, what gap is allowed.
        track: shows how far it is.

    Raises:
        InputError: a checkpoint is not whole or does not fit the shards or the other one, the
            split holds no window, or the device is absent.
    """
    manifest = read_manifest(shards)
    twin = load_contestant(autoregressive, "autoregressive", manifest)
    denoiser = load_contestant(diffusion, "diffusion", manifest)
    refuse_other_window(twin, denoiser)
    layout, device = denoiser.layout, pick_device(params.device)
    held_out = Windows(shards, "val", layout.window_tokens)
    result = measure_loss_parity(
        twin.model.to(device),
        denoiser.model.to(device),
        held_out,
        next_token=NextToken(
            layout=twin.layout, eot_id=manifest.eot_id, vocab_chunk=params.vocab_chunk
        ),
        denoising=Denoising(
            layout=layout,
            diffusion=denoiser.diffusion,
            seed=params.seed,
            vocab_chunk=params.vocab_chunk,
        ),
        params=params,
        track=track,
    )
    _write(result, {"autoregressive": twin, "diffusion": denoiser}, out)
    return result


def measure_loss_parity(
    twin: Backbone,
    denoiser: Backbone,
    held_out: HeldOut,
    *,
    next_token: NextToken,
    denoising: Denoising,
    params: EvalLossParityParams,
    track: Track,
) -> LossParity:
    """Score the same held-out windows with both models.

    The noise of a window follows from its index and the seed, so that the result depends neither on
    the batch size nor on an earlier call. Both models are left in the mode they came in.

    Args:
        twin: the autoregressive model.
        denoiser: the diffusion model, on the same device.
        held_out: windows that neither has seen.
        next_token: the twin's objective.
        denoising: the denoiser's objective; its seed draws the noise.
        params: which windows, how many times, what gap is allowed.
        track: shows how far it is.
    """
    chosen = spread_windows(len(held_out), params.max_windows)
    starts = range(0, len(chosen), params.batch_windows)
    tally = Tally(n_times=params.n_times, layout=denoising.layout, tilt=denoiser.params.tilt)
    with evaluating(twin), evaluating(denoiser):
        for start in track(starts, total=len(starts), label="batches scored"):
            numbers = chosen[start : start + params.batch_windows]
            ids = held_out.gather(numbers)
            windows = torch.from_numpy(ids).to(denoiser.head_weight.device)
            twin_nats = next_token.nats(twin, windows)
            bound_nats = denoising.bound_nats(
                denoiser, windows, numbers, n_times=params.n_times, on_pass=tally.add_pass
            )
            tally.add_windows(held_out, numbers, ids, twin_nats=twin_nats, bound_nats=bound_nats)
    return LossParity(
        totals=tally.result(),
        n_times=params.n_times,
        seed=denoising.seed,
        max_gap_percent=params.max_gap_percent,
    )


def _write(result: LossParity, contestants: dict[str, Contestant], out: Path) -> None:
    """Write the report; the training behind each model joins its figures."""
    metrics = result.metrics()
    for name, contestant in contestants.items():
        metrics[name] |= contestant.training
    for name, kind in (("by_time", TimeRow), ("by_document", DocumentRow)):
        columns = [field.name for field in dataclasses.fields(kind)]
        rows = [dataclasses.astuple(row) for row in getattr(result.totals, name)]
        write_csv(out / f"{name}.csv", columns, rows)
    write_json(out / "metrics.json", metrics)


def spread_windows(n_windows: int, max_windows: int | None) -> np.ndarray:
    """Indices of at most ``max_windows`` windows at equal distances over the split."""
    if max_windows is None or max_windows >= n_windows:
        return np.arange(n_windows)
    return np.arange(max_windows) * n_windows // max_windows


@contextlib.contextmanager
def evaluating(model: Backbone) -> Iterator[None]:
    """Evaluation mode and no gradient inside; the mode that it came in outside."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
