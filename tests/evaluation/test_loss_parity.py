import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.diffusion.schedule import clean_share
from canvaslm.evaluation.loss_parity import LossParity, measure_loss_parity
from canvaslm.evaluation.parity_params import EvalLossParityParams
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.files import to_json
from canvaslm.reporting.progress import untracked
from oracles import best_plain_cross_entropy, entropy_nats
from shapes import tiny_diffusion, tiny_shape

FIRST = np.array([0.5, 0.3, 0.2])
NEXT = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]])  # row: the token before
VOCAB = 3
EOT = 3  # read by the scripted twin alone, never a target
DIFFUSION = tiny_diffusion(self_conditioning_share=0.0)
SHAPE = tiny_shape(self_conditioning="off")


class HeldOut:
    """Windows in memory, two documents in each, every token one byte but the id 0, which has 3."""

    def __init__(self, ids: np.ndarray, *, n_documents: int | None = None) -> None:
        self.ids = ids
        halves = 2 * np.arange(len(ids))[:, None] + (np.arange(ids.shape[1]) >= ids.shape[1] // 3)
        self.documents = halves if n_documents is None else halves % n_documents

    def __len__(self) -> int:
        return len(self.ids)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        return self.ids[indices]

    def documents_of(self, index: int) -> np.ndarray:
        return self.documents[index]

    def text_bytes_of(self, index: int) -> np.ndarray:
        return np.where(self.ids[index] == 0, 3, 1)


class Scripted:
    """A model with the identity for a head, so that its hidden states are its logits."""

    def __init__(self, first: np.ndarray = FIRST, steps: np.ndarray = NEXT) -> None:
        self.head_weight = torch.eye(VOCAB, dtype=torch.float64)
        self.table = torch.from_numpy(np.log(np.vstack([steps, first])))  # last: nothing before
        self.training = False
        self.sees_itself = False
        self.params = tiny_shape()

    def eval(self) -> None:
        self.training = False

    def train(self, mode: bool) -> None:
        self.training = mode

    def encode(self, ids: Tensor) -> Any:
        return SimpleNamespace(ids=ids, hidden=self.table[ids])

    def encode_context(self, ids: Tensor) -> Any:
        return SimpleNamespace(ids=ids)

    def denoise(self, noisy: Tensor, times: Tensor, *, context: Any, **_: None) -> Tensor:
        """Exact posterior logits for canvases of one token of a Markov source."""
        start = torch.full_like(noisy[:, :1], VOCAB)
        logits = self.table[torch.cat([start, context.ids[:, :-1]], dim=1)]
        if self.sees_itself:
            return logits + 20 * torch.nn.functional.one_hot(context.ids, VOCAB)
        share = clean_share(times.double(), 1)
        evidence = torch.log((1 + (VOCAB - 1) * share) / (1 - share))
        return logits + evidence[..., None] * torch.nn.functional.one_hot(noisy, VOCAB)


def markov_windows(n_windows: int, n_tokens: int = 12) -> np.ndarray:
    rng = np.random.default_rng(0)
    ids = np.empty((n_windows, n_tokens), dtype=np.int64)
    for row in ids:
        row[0] = rng.choice(VOCAB, p=FIRST)
        for place in range(1, n_tokens):
            row[place] = rng.choice(VOCAB, p=NEXT[row[place - 1]])
    return ids


def params(**changes: Any) -> EvalLossParityParams:
    values = {
        "seed": 1,
        "device": "cpu",
        "n_times": 4,
        "max_windows": None,
        "batch_windows": 8,
        "vocab_chunk": 2,
        "max_gap_percent": 10.0,
    }
    return EvalLossParityParams.model_validate(values | changes)


def measure(
    twin: Any, denoiser: Any, held_out: HeldOut, layout: Layout, **changes: Any
) -> LossParity:
    knobs = params(**changes)
    return measure_loss_parity(
        twin,
        denoiser,
        held_out,
        next_token=NextToken(layout=layout, eot_id=EOT, vocab_chunk=knobs.vocab_chunk),
        denoising=Denoising(
            layout=layout, diffusion=DIFFUSION, seed=knobs.seed, vocab_chunk=knobs.vocab_chunk
        ),
        params=knobs,
        track=untracked,
    )


def measure_scripted(
    denoiser: Scripted, *, n_windows: int = 40, twin: Scripted | None = None, **changes: Any
) -> LossParity:
    layout = Layout(canvas_tokens=1, canvases_per_window=12, vocab_size=VOCAB)
    held_out = HeldOut(markov_windows(n_windows))
    return measure(twin or Scripted(), denoiser, held_out, layout, **changes)


def measure_real(**changes: Any) -> LossParity:
    layout = Layout(canvas_tokens=4, canvases_per_window=3, vocab_size=VOCAB + 1)
    twin, denoiser = (Backbone(shape, layout).double() for shape in (SHAPE.twin(), SHAPE))
    initialise(twin, 1)
    initialise(denoiser, 1)
    return measure(twin, denoiser, HeldOut(markov_windows(7)), layout, **changes)


class ScriptedObjective:
    """Costs read from a table by token id, in place of both objectives."""

    def __init__(self, nats_by_id: list[float]) -> None:
        self.table = torch.tensor(nats_by_id, dtype=torch.float64)
        self.layout = Layout(canvas_tokens=10, canvases_per_window=1, vocab_size=len(nats_by_id))
        self.seed = 1

    def nats(self, model: Any, windows: Tensor) -> Tensor:
        return self.table[windows]

    def bound_nats(
        self, model: Any, windows: Tensor, numbers: np.ndarray, *, n_times: int, on_pass: Any
    ) -> Tensor:
        on_pass(torch.ones_like(windows), self.table[windows], self.table[windows])
        return self.table[windows]


def measure_table(
    twin: list[float], bound: list[float], ids: np.ndarray, **changes: Any
) -> LossParity:
    knobs: dict[str, Any] = {"n_documents": None} | changes
    held_out = HeldOut(ids, n_documents=knobs.pop("n_documents"))
    model: Any = Scripted()
    next_token: Any = ScriptedObjective(twin)
    denoising: Any = ScriptedObjective(bound)
    return measure_loss_parity(
        model,
        model,
        held_out,
        next_token=next_token,
        denoising=denoising,
        params=params(n_times=1, **knobs),
        track=untracked,
    )


@pytest.mark.parametrize("n_times", [1, 4])
def test_exact_models_of_one_source_agree_within_the_printed_error(n_times: int) -> None:
    result = measure_scripted(Scripted(), n_times=n_times)
    assert 0 < result.totals.gap_standard_error_percent < 5
    assert abs(result.totals.gap_percent) < 3 * result.totals.gap_standard_error_percent


@pytest.mark.parametrize("tilt", [0.0, 0.5, 2.0])
def test_bound_of_any_model_on_a_markov_corpus_is_above_its_entropy_rate(tilt: float) -> None:
    rng = np.random.default_rng(7)
    steps = NEXT * np.exp(tilt * rng.normal(size=NEXT.shape))
    result = measure_scripted(Scripted(FIRST, steps / steps.sum(1, keepdims=True)))
    rate = entropy_nats(FIRST)
    state = FIRST
    for _ in range(11):
        rate += sum(p * entropy_nats(row) for p, row in zip(state, NEXT, strict=True))
        state = state @ NEXT
    bound = result.totals.bound
    assert bound.nats_per_token > rate / 12 - 3 * bound.standard_error_nats


def test_a_denoiser_that_reads_its_own_answer_falls_far_below_the_twin() -> None:
    cheat = Scripted()
    cheat.sees_itself = True
    result = measure_scripted(cheat)
    assert result.totals.gap_percent < -5 * result.totals.gap_standard_error_percent


def test_diagnostic_lies_below_the_entropy_where_the_bound_does_not() -> None:
    independent = np.tile(FIRST, (VOCAB, 1))
    layout = Layout(canvas_tokens=1, canvases_per_window=12, vocab_size=VOCAB)
    ids = np.random.default_rng(1).choice(VOCAB, size=(80, 12), p=FIRST)
    model = Scripted(FIRST, independent)
    result = measure(model, model, HeldOut(ids), layout, n_times=8)
    diagnostic = result.metrics()["diffusion"]["diagnostic_cross_entropy_nats"]
    assert diagnostic == pytest.approx(best_plain_cross_entropy(FIRST, 8), abs=0.03)
    bound = result.totals.bound
    assert diagnostic < entropy_nats(FIRST) - 0.2
    assert bound.nats_per_token > entropy_nats(FIRST) - 3 * bound.standard_error_nats


def test_seeds_move_the_bound_less_than_the_printed_error() -> None:
    runs = [measure_scripted(Scripted(), n_windows=20, seed=seed) for seed in range(5)]
    results = [run.totals.bound for run in runs]
    values = [score.nats_per_token for score in results]
    assert len(set(values)) == 5
    assert np.std(values, ddof=1) < 1.5 * results[0].standard_error_nats


@pytest.mark.parametrize("batch_windows", [1, 3, 8, 100])
def test_mean_is_over_tokens_whatever_the_batch(batch_windows: int) -> None:
    """BR-63: no mean of batches' means or of exponentials; the last batch of 3 or 8 is ragged."""
    ids = np.repeat([0, 1], [10, 1])[:, None].repeat(10, axis=1)  # 100 tokens and 10
    result = measure_table([1.0, 3.0], [2.0, 6.0], ids, batch_windows=batch_windows)
    assert math.exp(result.totals.twin.nats_per_token) == pytest.approx(3.26030, abs=1e-5)
    assert result.totals.twin.nats_per_token == pytest.approx(130 / 110, rel=1e-15)
    assert result.totals.gap_percent == pytest.approx(100, rel=1e-14)
    assert result.totals.n_tokens == 110


def test_standard_error_is_over_documents_and_not_over_tokens() -> None:
    ids = np.array([[0] * 10, [1] * 10, [1] * 10, [0] * 10])
    result = measure_table([1.0, 3.0], [1.0, 3.0], ids)
    # Eight documents of 3 or 7 tokens: sum, size and the residual of each from the mean of 2.
    amounts, sizes = np.array([3, 7, 9, 21, 9, 21, 3, 7]), np.array([3, 7] * 4)
    residuals = amounts - 2 * sizes
    expected = math.sqrt(8 / 7 * np.sum(residuals**2)) / 40
    assert result.totals.twin.standard_error_nats == pytest.approx(expected, rel=1e-12)
    assert result.totals.n_documents == 8
    assert result.totals.gap_standard_error_percent == 0


def test_error_of_one_document_is_not_measured_rather_than_zero() -> None:
    result = measure_table([1.0, 3.0], [1.0, 3.0], np.array([[0, 1] * 5]), n_documents=1)
    assert math.isnan(result.totals.twin.standard_error_nats)
    assert '"standard_error_nats": null' in to_json(result.metrics())
    assert "standard_error_nats_reason" in to_json(result.metrics())


def test_bits_per_byte_divide_all_bits_by_all_bytes() -> None:
    ids = np.array([[0] * 10, [1] * 10])  # 30 bytes and 10
    result = measure_table([1.0, 3.0], [2.0, 6.0], ids)
    assert result.totals.n_text_bytes == 40
    assert result.totals.twin.bits_per_byte == pytest.approx(40 / math.log(2) / 40)
    assert result.totals.bound.bits_per_byte == pytest.approx(80 / math.log(2) / 40)


@pytest.mark.parametrize(
    ("nats", "verdict"),
    [(1.0, "pass"), (1.0999, "pass"), (1.1001, "fail"), (0.5, "pass")],
)
def test_verdict_holds_the_gap_against_its_limit(nats: float, verdict: str) -> None:
    result = measure_table([1.0, 1.0], [nats, 1.0], np.zeros((2, 10), dtype=np.int64))
    assert result.metrics()["verdict"] == verdict


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("who", ["autoregressive", "diffusion"])
def test_a_score_that_is_no_number_fails_whoever_it_is(who: str, value: float) -> None:
    # BR-76
    nats = {"autoregressive": [1.0, 1.0], "diffusion": [1.0, 1.0]}
    nats[who] = [value, 1.0]
    ids = np.zeros((2, 10), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        result = measure_table(nats["autoregressive"], nats["diffusion"], ids)
    metrics = json.loads(to_json(result.metrics()), parse_constant=pytest.fail)
    assert metrics["verdict"] == "fail"
    assert who in metrics["verdict_reason"]


def test_unigram_entropy_is_that_of_the_scored_tokens() -> None:
    ids = np.array([[0] * 10, [0] * 5 + [1] * 5])
    result = measure_table([1.0, 1.0], [1.0, 1.0], ids)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert result.totals.unigram_entropy_nats == pytest.approx(expected)


def test_at_most_the_asked_windows_are_scored_spread_over_the_split() -> None:
    ids = np.arange(20)[:, None].repeat(10, axis=1)
    seen: list[int] = []
    held_out = HeldOut(ids)

    def gather(indices: np.ndarray) -> np.ndarray:
        seen.extend(indices.tolist())
        return ids[indices]

    held_out.gather = gather
    model: Any = Scripted()
    objective: Any = ScriptedObjective([1.0] * 20)
    for max_windows, expected in ((4, [0, 5, 10, 15]), (100, list(range(20)))):
        seen.clear()
        measure_loss_parity(
            model,
            model,
            held_out,
            next_token=objective,
            denoising=objective,
            params=params(n_times=1, max_windows=max_windows, batch_windows=3),
            track=untracked,
        )
        assert seen == expected


def test_batch_size_and_vocabulary_chunk_change_no_value_of_a_real_model() -> None:
    whole = measure_real()
    for changes in ({"batch_windows": 1}, {"batch_windows": 3, "vocab_chunk": 50}):
        part = measure_real(**changes)
        for field in ("twin", "bound"):
            expected, got = vars(getattr(whole.totals, field)), vars(getattr(part.totals, field))
            assert got == pytest.approx(expected, rel=1e-12)
        for table in ("by_time", "by_document"):
            rows, others = getattr(part.totals, table), getattr(whole.totals, table)
            for row, other in zip(rows, others, strict=True):
                assert vars(row) == pytest.approx(vars(other), rel=1e-12)


def test_evaluating_twice_gives_equal_figures() -> None:
    assert measure_real() == measure_real()


def test_an_uninformed_posterior_is_no_uniform_prediction_in_the_report_either() -> None:
    # With all weights at zero both softmaxes are uniform: the twin pays ln V, the denoiser more.
    layout = Layout(canvas_tokens=4, canvases_per_window=3, vocab_size=VOCAB + 1)
    twin, denoiser = Backbone(SHAPE.twin(), layout), Backbone(SHAPE, layout)
    with torch.no_grad():
        for parameter in [*twin.parameters(), *denoiser.parameters()]:
            parameter.zero_()
    totals = measure(twin, denoiser, HeldOut(markov_windows(20)), layout).totals
    assert totals.twin.nats_per_token == pytest.approx(math.log(4), abs=1e-6)
    assert totals.bound.nats_per_token > math.log(4) + 0.3
    for row in totals.by_time:
        assert row.diagnostic_cross_entropy_nats == pytest.approx(math.log(4), abs=1e-6)


def test_steps_of_all_times_add_up_to_the_bound() -> None:
    totals = measure_real().totals
    assert [row.t for row in totals.by_time] == [1, 2, 3, 4]
    summed = sum(row.bound_nats_per_token for row in totals.by_time)
    assert summed == pytest.approx(totals.bound.nats_per_token, rel=1e-12)


def test_models_keep_their_mode_and_get_no_gradient_and_no_global_draw_is_made() -> None:
    layout = Layout(canvas_tokens=4, canvases_per_window=3, vocab_size=VOCAB + 1)
    twin, denoiser = Backbone(SHAPE.twin(), layout), Backbone(SHAPE, layout)
    twin.train()
    denoiser.eval()
    state = torch.get_rng_state()
    measure(twin, denoiser, HeldOut(markov_windows(4)), layout)
    assert torch.equal(torch.get_rng_state(), state)
    assert twin.training
    assert not denoiser.training
    assert all(p.grad is None for p in [*twin.parameters(), *denoiser.parameters()])


def test_report_names_its_estimators_and_counts() -> None:
    metrics = measure_real().metrics()
    assert metrics["autoregressive"]["nats_per_token"] > 0
    assert metrics["diffusion"]["bound_nats_per_token"] > 0
    assert "ELBO" in metrics["diffusion"]["estimator"]
    assert "next-token" in metrics["autoregressive"]["estimator"]
    assert metrics["diffusion"]["n_times"] == 4
    assert metrics["n_windows"] == 7
    assert metrics["n_tokens"] == 84
    assert metrics["n_documents"] == 14
