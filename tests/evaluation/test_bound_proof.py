"""At canvas 1 the twin's own predictions must cost, as a bound, what the twin loses."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.evaluation import bound_proof
from canvaslm.evaluation.bound_proof import TOLERANCE_NATS, Proof, prove_at_canvas_one
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.files import to_json
from oracles import own_evidence
from shapes import tiny_shape

LAYOUT = Layout(canvas_tokens=1, canvases_per_window=12, vocab_size=37)


@pytest.fixture
def twin() -> Backbone:
    """A float32 twin that is sure of something."""
    model = Backbone(tiny_shape().twin(), LAYOUT)
    initialise(model, 3)
    with torch.no_grad():
        model.embedding.weight.mul_(40)
    return model


def windows_of(n: int) -> Tensor:
    draws = np.random.Generator(np.random.Philox(key=1))
    return torch.from_numpy(draws.integers(37, size=(n, 12)))


def prove(twin: Backbone, *, n: int = 3, n_times: tuple[int, ...] = (1, 4, 16)) -> Proof:
    next_token = NextToken(layout=LAYOUT, eot_id=0, vocab_chunk=10)
    numbers = np.arange(n)
    return prove_at_canvas_one(
        twin, windows_of(n), numbers, next_token=next_token, n_times=n_times, seed=1
    )


def test_the_bound_of_the_twins_predictions_is_its_loss_token_by_token(twin: Backbone) -> None:
    proof = prove(twin)
    assert proof.verdict == "pass"
    assert set(proof.max_difference_nats) == {1, 4, 16}
    assert all(x < 1e-10 for x in proof.max_difference_nats.values())
    next_token = NextToken(layout=LAYOUT, eot_id=0, vocab_chunk=10)
    loss = float(next_token.nats(twin, windows_of(3)).mean())  # of the model as it is, in float32
    assert proof.bound_nats[16] == pytest.approx(loss, abs=1e-5)
    assert loss > 4  # and not ln 37: the model says something


def test_blocks_change_no_value(twin: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prove(twin)
    monkeypatch.setattr(bound_proof, "_BLOCK_VALUES", 5 * 37)  # the last of 36 rows stands alone
    parts = prove(twin)
    assert parts.bound_nats == pytest.approx(whole.bound_nats, rel=1e-13)
    np.testing.assert_allclose(parts.guard, whole.guard, rtol=1e-9, atol=1e-12)


def test_the_twin_that_came_in_stays_as_it_was(twin: Backbone) -> None:
    twin.train()
    prove(twin)
    assert twin.training
    assert twin.head_weight.dtype == torch.float32
    assert all(parameter.grad is None for parameter in twin.parameters())


def test_the_posterior_passed_off_as_the_cavity_is_told_apart(twin: Backbone) -> None:
    proof = prove(twin)
    assert proof.guard_n_times == 4
    assert proof.guard.shape == (36,)
    assert proof.guard_size_nats > 0.1


def test_the_posterior_in_place_of_the_cavity_fails_the_proof(
    twin: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mix-up in its smallest form: the token that is most often seen counts twice."""
    right = bound_proof.expected_step_nats

    def wrong(log_x: Tensor, clean: Tensor, *, t: int, n_times: int) -> Tensor:
        evidence = own_evidence(t, n_times=n_times, vocab_size=37)
        seen = torch.full_like(log_x[:, :1], evidence)
        twice = log_x.scatter_add(1, clean[:, None], seen).log_softmax(-1)
        return right(twice, clean, t=t, n_times=n_times)

    monkeypatch.setattr(bound_proof, "expected_step_nats", wrong)
    proof = prove(twin)
    assert proof.verdict == "fail"
    assert proof.max_difference_nats[16] > 0.1


def test_a_step_too_few_or_a_shifted_window_fails(
    twin: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bound_proof.expected_step_nats
    monkeypatch.setattr(
        bound_proof,
        "expected_step_nats",
        lambda log_x, clean, *, t, n_times: right(log_x, clean, t=t, n_times=n_times) * (t < 16),
    )
    assert prove(twin).verdict == "fail"
    monkeypatch.setattr(
        bound_proof,
        "expected_step_nats",
        lambda log_x, clean, **times: right(log_x, clean.roll(1), **times),
    )
    assert prove(twin).verdict == "fail"


def test_a_twin_that_is_not_finite_fails(twin: Backbone) -> None:
    with torch.no_grad():
        twin.embedding.weight[5] = math.nan
    proof = prove(twin)
    assert proof.verdict == "fail"
    assert json.loads(to_json(proof.metrics()), parse_constant=pytest.fail)["verdict"] == "fail"


@pytest.mark.parametrize(("n", "n_times"), [(0, (4,)), (2, (1,))])
def test_without_windows_or_without_a_guard_nothing_is_proven(
    twin: Backbone, n: int, n_times: tuple[int, ...]
) -> None:
    """At N = 1 nothing is left of the text, so that posterior and cavity are one."""
    proof = prove(twin, n=n, n_times=n_times)
    assert proof.verdict == "not_measured"
    metrics: dict[str, Any] = proof.metrics()
    assert metrics["verdict_reason"]
    if n:
        assert "not told apart" in proof.verdict_reason
        assert proof.max_difference_nats[1] < TOLERANCE_NATS
