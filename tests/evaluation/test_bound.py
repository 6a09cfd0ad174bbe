import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import evaluations
from canvaslm.evaluation import bound as bound_module
from canvaslm.evaluation.bound import FullBound, measure_bound
from canvaslm.evaluation.bound_figures import bound_scores, curve, gap_shares
from canvaslm.evaluation.bound_params import EvalBoundParams
from canvaslm.evaluation.comparable import RECIPE, judge_rows
from canvaslm.evaluation.loss_parity import measure_loss_parity
from canvaslm.evaluation.parity_params import EvalLossParityParams
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.files import to_json
from canvaslm.reporting.progress import untracked
from shapes import tiny_diffusion, tiny_shape

LAYOUT = Layout(canvas_tokens=4, canvases_per_window=3, vocab_size=29)
KNOBS: dict[str, Any] = {
    "seed": 1,
    "device": "cpu",
    "n_times": [2, 4],
    "continuous_passes": 3,
    "told_times": "trained",
    "max_windows": None,
    "batch_windows": 2,
    "vocab_chunk": 16,
    "proof_windows": 2,
}


class HeldOut(evaluations.HeldOut):
    """Windows of random ids of which most documents cross a window's edge."""

    def documents_of(self, index: int) -> np.ndarray:
        return (index * self._ids.shape[1] + np.arange(self._ids.shape[1]) + 5) // 10


def models(*, self_conditioning: str = "output") -> tuple[Backbone, Backbone]:
    """A twin and a denoiser in float64, which say something and take a guess."""
    shape = tiny_shape(self_conditioning=self_conditioning)
    twin, denoiser = (Backbone(x, LAYOUT).double() for x in (shape.twin(), shape))
    for model, seed in ((twin, 1), (denoiser, 2)):
        initialise(model, seed)
        with torch.no_grad():
            model.embedding.weight.mul_(20)
    if denoiser.self_conditioning is not None:
        with torch.no_grad():
            for p in denoiser.self_conditioning.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    return twin, denoiser


def measure(twin: Any, denoiser: Any, held_out: Any, layout: Layout, **changes: Any) -> FullBound:
    knobs = EvalBoundParams.model_validate(KNOBS | changes)
    return measure_bound(
        twin,
        denoiser,
        held_out,
        next_token=NextToken(layout=layout, eot_id=0, vocab_chunk=knobs.vocab_chunk),
        layout=layout,
        train_times=4,
        params=knobs,
        track=untracked,
    )


def measure_real(**changes: Any) -> FullBound:
    return measure(*models(), HeldOut(LAYOUT), LAYOUT, **changes)


@pytest.fixture(scope="module")
def found() -> FullBound:
    return measure_real()


def rows_of(metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for conditioning in ("off", "two_pass"):
        yield from metrics["diffusion"][conditioning].values()


def test_the_bound_on_a_grid_is_the_one_that_the_comparison_of_losses_reports(
    found: FullBound,
) -> None:
    twin, denoiser = models()
    parity = EvalLossParityParams(
        seed=1, device="cpu", n_times=4, max_windows=None, batch_windows=2, vocab_chunk=16,
        max_gap_percent=10.0,
    )  # fmt: skip
    diffusion = tiny_diffusion()
    totals = measure_loss_parity(
        twin,
        denoiser,
        HeldOut(LAYOUT),
        next_token=NextToken(layout=LAYOUT, eot_id=0, vocab_chunk=16),
        denoising=Denoising(layout=LAYOUT, diffusion=diffusion, seed=1, vocab_chunk=16),
        params=parity,
        track=untracked,
    ).totals
    metrics = found.metrics()
    row = metrics["diffusion"]["off"]["n_times_4"]
    for mine, theirs in ((row, totals.bound), (metrics["autoregressive"], totals.twin)):
        for key in ("standard_error_nats", "bits_per_byte"):
            assert mine[key] == pytest.approx(getattr(theirs, key), rel=1e-12)
    assert row["bound_nats_per_token"] == pytest.approx(totals.bound.nats_per_token, rel=1e-13)
    assert row["gap_percent"] == pytest.approx(totals.gap_percent, rel=1e-11)
    error = totals.gap_standard_error_percent
    assert row["gap_standard_error_percent"] == pytest.approx(error, rel=1e-11)
    plain = [x.diagnostic_cross_entropy_nats for x in totals.by_time]
    assert row["diagnostic_cross_entropy_nats"] == pytest.approx(np.mean(plain), rel=1e-12)
    steps = [x.bound_nats_per_token for x in totals.by_time]
    mine = next(x for x in found.costs.bounds if x.levels.name == "n_times_4")
    np.testing.assert_allclose(mine.by_level[:, 0], steps, rtol=1e-12)
    assert metrics["unigram_entropy_nats"] == pytest.approx(totals.unigram_entropy_nats)
    assert metrics["n_documents"] == totals.n_documents


def test_levels_positions_and_canvases_each_add_up_to_the_bound(found: FullBound) -> None:
    costs = found.costs
    for score in bound_scores(costs):
        bound = score.costs
        assert bound.by_level[:, 0].sum() == pytest.approx(score.per_token.value, rel=1e-12)
        for places, n_places in ((costs.positions, 4), (costs.canvases, 3)):
            points = list(curve(costs, bound, places))
            assert [point.place for point in points] == list(range(n_places))
            assert sum(point.n_tokens for point in points) == costs.ids.size
            summed = sum(point.n_tokens * point.bound.value for point in points)
            assert summed / costs.ids.size == pytest.approx(score.per_token.value, rel=1e-12)
            twin = sum(point.n_tokens * point.twin.value for point in points) / costs.ids.size
            assert twin == pytest.approx(float(costs.twin.mean()), rel=1e-12)


def test_shares_are_what_they_are_called_and_add_up_to_the_gap(found: FullBound) -> None:
    costs = found.costs
    off = {x.levels.name: x for x in costs.bounds if x.conditioning == "off"}
    shares = gap_shares(costs)
    assert set(shares) == {"n_times_2", "n_times_4"}
    for name, share in shares.items():
        bound, smooth = off[name], off["continuous"]
        assert share.gap.value == pytest.approx(float((bound.nats - costs.twin).mean()))
        due = float(bound.nats.mean() - smooth.nats.mean())
        assert share.discretisation.value == pytest.approx(due, rel=1e-10)
        first = slice(None, None, 4)
        due = float((bound.from_noise - costs.twin)[:, first].mean())
        assert share.context.value == pytest.approx(due, rel=1e-12)
        parts = (share.discretisation, share.context, share.model)
        assert sum(x.value for x in parts) == pytest.approx(share.gap.value, rel=1e-12)
        assert all(0 < x.standard_error < 10 for x in (share.gap, *parts))


def test_what_comes_from_noise_is_the_cross_entropy_of_a_canvas_of_pure_noise() -> None:
    """Whatever noise the canvas holds: with the own canvas unseen it is one number."""
    _, denoiser = models()
    costs = measure_real().costs
    bound = next(x for x in costs.bounds if x.levels.name == "n_times_4")
    clean = torch.from_numpy(costs.ids)
    seen = []
    with torch.no_grad():
        for seed in range(2):
            noise = np.random.default_rng(seed).integers(29, size=costs.ids.shape)
            logits = denoiser.logits(
                denoiser.denoise(
                    torch.from_numpy(noise),
                    torch.ones(len(clean), 3, dtype=torch.float64),
                    context=denoiser.encode_context(clean),
                    guess=None,
                    has_guess=None,
                )
            )
            nats = torch.nn.functional.cross_entropy(logits.mT, clean, reduction="none")
            seen.append(nats.numpy())
    spread = np.abs(seen[0] - seen[1]).mean()  # noise of the own canvas still moves it a little
    assert np.abs(bound.from_noise - seen[0]).mean() < 2 * spread
    assert np.abs(bound.from_noise - bound.nats).mean() > 0.1


def test_batch_and_chunk_change_no_figure_and_a_repeat_not_a_byte(found: FullBound) -> None:
    assert to_json(measure_real().metrics()) == to_json(found.metrics())
    whole = json.loads(to_json(found.metrics()))
    for changes in ({"batch_windows": 1}, {"batch_windows": 5, "vocab_chunk": 29}):
        part = json.loads(to_json(measure_real(**changes).metrics()))
        for row, other in zip(rows_of(part), rows_of(whole), strict=True):
            for key, value in other.items():
                is_text = isinstance(value, str)
                assert row[key] == (value if is_text else pytest.approx(value, rel=1e-9)), key
        for name, share in part["shares"].items():
            assert share == pytest.approx(whole["shares"][name], rel=1e-9)


def test_every_score_carries_its_recipe_and_its_error(found: FullBound) -> None:
    """BR-66."""
    metrics = found.metrics()
    rows = list(rows_of(metrics))
    assert len(rows) == 6
    for row in (metrics["autoregressive"], *rows):
        assert all(row[key] is not None for key in RECIPE)
        assert row["standard_error_nats"] > 0
        assert row["n_tokens"] == 60
        assert row["n_text_bytes"] == 60
        assert row["tokens_sha256"] == metrics["autoregressive"]["tokens_sha256"]
        assert row["seed"] == 1
    told = {(row["noise_levels"], row["self_conditioning"]) for row in rows}
    assert len(told) == 6
    assert "ELBO" in rows[0]["estimator"]
    assert "next-token" in metrics["autoregressive"]["estimator"]
    assert metrics["verdict"] == "pass"
    assert metrics["proof"]["verdict"] == "pass"


def test_other_tokens_have_another_hash(found: FullBound) -> None:
    fewer = measure_real(max_windows=4)
    assert fewer.costs.tokens_sha256 != found.costs.tokens_sha256


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens_sha256": "other"}, "tokens_sha256 differs"),
        ({"n_tokens": 61}, "n_tokens differs"),
        ({"estimator": None}, "does not say its estimator"),
        ({"kind": "exact"}, "estimator differs"),  # a bound that calls itself a likelihood
        ({"bound_nats_per_token": math.nan}, "not finite"),
        ({"bound_nats_per_token": -math.inf}, "not finite"),
    ],
)
def test_a_row_that_may_not_be_compared_fails_the_verdict(
    found: FullBound, change: dict[str, Any], told: str
) -> None:
    """BR-66."""
    metrics = found.metrics()
    rows = list(rows_of(metrics))
    assert judge_rows(metrics["autoregressive"], rows)[0] == "pass"
    rows[3] = rows[3] | change
    verdict, reason = judge_rows(metrics["autoregressive"], rows)
    assert verdict == "fail"
    assert told in reason


def test_a_twin_that_is_not_finite_fails_the_verdict(found: FullBound) -> None:
    metrics = found.metrics()
    twin = metrics["autoregressive"] | {"nats_per_token": math.nan}
    assert judge_rows(twin, list(rows_of(metrics))) == ("fail", "not finite: autoregressive")


def test_a_network_that_takes_no_guess_has_no_second_pass() -> None:
    twin, denoiser = models(self_conditioning="off")
    metrics = measure(twin, denoiser, HeldOut(LAYOUT), LAYOUT).metrics()
    assert metrics["diffusion"]["two_pass"] == "not_measured"
    assert metrics["diffusion"]["two_pass_reason"]
    assert metrics["verdict"] == "pass"


def test_curves_are_written_with_a_row_for_each_place_of_each_bound(
    found: FullBound, tmp_path: Path
) -> None:
    bound_module._write(found, {}, tmp_path)
    counts = {"time": 2 * (2 + 4 + 3), "position": 6 * 4, "canvas": 6 * 3}
    rows = {}
    for name, n_rows in counts.items():
        with (tmp_path / f"by_{name}.csv").open() as file:
            rows[name] = list(csv.DictReader(file))
        assert len(rows[name]) == n_rows
        assert all(float(row["bound_nats_per_token"]) > 0 for row in rows[name])
    assert float(rows["canvas"][0]["autoregressive_nats_per_token"]) > 0
    last = rows["time"][-1]
    assert (last["sweep"], last["self_conditioning"], last["to_time"]) == (
        "continuous", "two_pass", "1.0",
    )  # fmt: skip


def test_a_network_may_be_told_the_time_itself(found: FullBound) -> None:
    """It makes no difference where the grid is that of training, and elsewhere it does."""
    exact, trained = measure_real(told_times="exact").metrics(), found.metrics()
    rows = [metrics["diffusion"]["off"] for metrics in (exact, trained)]
    same = {name: rows[0][name]["bound_nats_per_token"] == rows[1][name]["bound_nats_per_token"]
            for name in rows[0]}  # fmt: skip
    assert same == {"n_times_2": True, "n_times_4": True, "continuous": False}
    assert all(
        one["noise_levels"] != rows[1][name]["noise_levels"] for name, one in rows[0].items()
    )


@pytest.mark.parametrize("n_times", [[], [0], [4, 4], 16])
def test_numbers_of_times_that_make_no_sense_are_refused(n_times: object) -> None:
    with pytest.raises(ValidationError):
        EvalBoundParams.model_validate(KNOBS | {"n_times": n_times})


FIRST = np.array([0.5, 0.3, 0.2])
NEXT = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]])  # row: the token before


class MarkovModel:
    """Exact predictions of a Markov source, for canvases of one token and for the twin."""

    def __init__(self) -> None:
        self.head_weight = torch.eye(3, dtype=torch.float64)
        self.table = torch.from_numpy(np.log(np.vstack([NEXT, FIRST])))  # last: nothing before
        self.params = tiny_shape(self_conditioning="off")
        self.layout = Layout(canvas_tokens=1, canvases_per_window=12, vocab_size=3)
        self.training = False

    def eval(self) -> "MarkovModel":
        return self

    def double(self) -> "MarkovModel":
        return self

    def train(self, mode: bool) -> None:
        self.training = mode

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def encode(self, ids: Tensor) -> Any:
        return SimpleNamespace(hidden=self.table[ids])

    def encode_context(self, ids: Tensor) -> Any:
        return SimpleNamespace(ids=ids)

    def denoise(self, noisy: Tensor, times: Tensor, *, context: Any, **_: None) -> Tensor:
        start = torch.full_like(noisy[:, :1], 3)
        cavity = self.table[torch.cat([start, context.ids[:, :-1]], dim=1)]
        share = torch.cos(times.double() * (np.pi / 2)) ** 2
        evidence = torch.log1p(3 * share / (1 - share))
        return cavity + evidence[..., None] * torch.nn.functional.one_hot(noisy, 3)


class MarkovText(evaluations.HeldOut):
    """Windows of the source, two documents in each."""

    def __init__(self, n_windows: int) -> None:
        rng = np.random.default_rng(0)
        self._ids = np.empty((n_windows, 12), dtype=np.int64)
        for row in self._ids:
            row[0] = rng.choice(3, p=FIRST)
            for place in range(1, 12):
                row[place] = rng.choice(3, p=NEXT[row[place - 1]])

    def __len__(self) -> int:
        return len(self._ids)

    def documents_of(self, index: int) -> np.ndarray:
        return 2 * index + (np.arange(12) >= 4)


def measure_markov(n_windows: int, **changes: Any) -> FullBound:
    model = MarkovModel()
    knobs = {"n_times": [1, 4, 16], "continuous_passes": 8, "batch_windows": 50} | changes
    held_out = MarkovText(n_windows)
    next_token = NextToken(layout=model.layout, eot_id=3, vocab_chunk=3)
    params = EvalBoundParams.model_validate(KNOBS | knobs)
    twin: Any = model
    return measure_bound(
        twin,
        twin,
        held_out,
        next_token=next_token,
        layout=model.layout,
        train_times=4,
        params=params,
        track=untracked,
    )


def test_an_exact_model_of_one_token_has_no_gap_under_any_estimator() -> None:
    metrics = measure_markov(150, proof_windows=100).metrics()
    rows = metrics["diffusion"]["off"]
    assert set(rows) == {"n_times_1", "n_times_4", "n_times_16", "continuous"}
    for row in rows.values():
        assert row["gap_standard_error_nats"] < 0.06
        assert abs(row["gap_nats"]) <= 3 * row["gap_standard_error_nats"] + 1e-12
    for share in metrics["shares"].values():
        assert abs(share["context_nats"]) < 1e-12  # the twin's own predictions
    assert metrics["proof"]["verdict"] == "pass"
    assert metrics["proof"]["posterior_as_cavity"]["difference_nats_per_token"] > 0.05


def test_five_seeds_lie_within_the_printed_error() -> None:
    """BR-66."""
    runs = [measure_markov(30, seed=seed).metrics()["diffusion"]["off"] for seed in range(5)]
    for name in ("n_times_4", "n_times_16", "continuous"):
        values = [run[name]["bound_nats_per_token"] for run in runs]
        error = np.mean([run[name]["standard_error_nats"] for run in runs])
        assert len(set(values)) == 5
        assert np.std(values, ddof=1) < 1.5 * error
        assert max(values) - min(values) < 4 * error
