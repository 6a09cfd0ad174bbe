import math

import pytest
import torch

from canvaslm.randomness import stream
from canvaslm.sampling.prediction import (
    draw,
    invert,
    law_of,
    predict,
    shaped_probabilities,
    temperature_at,
)


def _uniforms(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(stream(seed, "test").random(n))


# BR-60
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rare_token_of_one_in_ten_thousand_comes_as_often_as_it_should(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, math.log(0.9999 / 1e-4)], dtype=dtype)
    rare = float(torch.softmax(logits.double(), -1)[0])  # bfloat16 logits round the odds
    drawn = invert(
        shaped_probabilities(logits, temperature=1.0).expand(1_000_000, 2), _uniforms(1_000_000)
    )
    expected = 1_000_000 * rare
    assert 60 <= expected <= 140
    assert abs(int((drawn == 0).sum()) - expected) < 4 * math.sqrt(expected)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -5.0])
    n = 200_000
    for temperature in (0.4, 1.0, 2.5):
        probabilities = shaped_probabilities(logits, temperature=temperature)
        drawn = invert(probabilities.expand(n, 5), _uniforms(n))
        counts = torch.bincount(drawn, minlength=5).double()
        error = (counts - n * probabilities).abs()
        assert (error < 5 * (n * probabilities * (1 - probabilities)).sqrt() + 1e-9).all()


def test_law_is_that_of_gumbel_max() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    n = 200_000
    gumbel = -torch.log(-torch.log(_uniforms(4 * n, seed=1).view(n, 4)))
    by_gumbel = torch.bincount((logits + gumbel).argmax(-1), minlength=4).double() / n
    probabilities = shaped_probabilities(logits, temperature=1.0)
    by_inversion = torch.bincount(invert(probabilities.expand(n, 4), _uniforms(n)), minlength=4)
    assert (by_gumbel - by_inversion.double() / n).abs().max() < 0.006


def test_extreme_uniform_numbers_draw_real_tokens_of_positive_probability() -> None:
    probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64).expand(3, 5)
    uniforms = torch.tensor([0.0, 0.3, 1.0 - 2**-53], dtype=torch.float64)
    assert invert(probabilities, uniforms).tolist() == [1, 3, 3]
    # A sum that rounds to more or less than 1 moves nothing over the end.
    for ulps in range(-500, 500):
        scaled = probabilities * (1.0 + ulps * 2**-53)
        assert invert(scaled, uniforms).tolist() in ([1, 3, 3], [1, 1, 3])


# BR-60
def test_temperature_zero_takes_the_argmax_and_no_random_number() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    now = predict(logits, temperature=0.0, uniforms=None, step=0, n_steps=4)
    assert torch.equal(now.candidates, logits.argmax(-1))
    assert torch.equal(now.confidence, torch.softmax(logits.double(), -1).amax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
def test_one_token_is_drawn_as_a_whole_prediction_draws_it(
    dtype: torch.dtype, temperature: float
) -> None:
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)
    uniforms = _uniforms(300)
    now = predict(
        logits[None],
        temperature=temperature,
        uniforms=uniforms[None] if temperature else None,
        step=0,
        n_steps=1,
    )
    ids, is_finite = draw(logits, temperature=temperature, uniforms=uniforms)
    assert is_finite.all()
    assert torch.equal(ids, now.candidates[0])  # no number lies within rounding of an edge here


def test_law_of_one_token_is_that_of_float64() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -9.0, -math.inf])
    n = 50_000
    evenly = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for temperature in (0.4, 1.0, 2.5):
        ids, is_finite = draw(logits.expand(n, -1), temperature=temperature, uniforms=evenly)
        law = shaped_probabilities(logits, temperature=temperature)
        assert is_finite.all()
        assert (torch.bincount(ids, minlength=6) - n * law).abs().max() <= 1.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_token_says_where_numbers_are_not_finite(temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2], logits[2, 3] = math.nan, math.inf
    _, is_finite = draw(logits, temperature=temperature, uniforms=_uniforms(3))
    assert is_finite.tolist() == [True, False, False]


# BR-54
def test_confidence_and_entropy_are_those_of_the_distribution_that_is_sampled() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    uniforms = _uniforms(6).view(2, 3)
    now = predict(logits, temperature=0.5, uniforms=uniforms, step=0, n_steps=4)
    shaped = torch.softmax(logits.double() / 0.5, -1)
    assert torch.allclose(now.confidence, shaped.amax(-1), atol=1e-15)
    assert torch.allclose(now.entropy, -(shaped * shaped.log()).sum(-1), atol=1e-14)
    assert not torch.allclose(now.confidence, torch.softmax(logits.double(), -1).amax(-1))


def test_entropy_ignores_tokens_that_cannot_come_and_shows_numbers_that_are_not_finite() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, math.nan, 0.0], [0.0, math.inf, 0.0]]])
    now = predict(logits, temperature=1.0, uniforms=_uniforms(3).view(1, 3), step=0, n_steps=1)
    assert float(now.entropy[0, 0]) == pytest.approx(math.log(2))
    assert now.entropy.isfinite().tolist() == [[True, False, False]]


def test_temperature_is_linear_and_reaches_both_ends() -> None:
    steps = [temperature_at(k, n_steps=5, start=0.8, end=0.4) for k in range(5)]
    assert steps == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])
    assert temperature_at(0, n_steps=1, start=0.8, end=0.4) == 0.8


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_law_is_what_candidates_are_drawn_from(temperature: float) -> None:
    logits = torch.randn(2, 50, 9, generator=torch.Generator().manual_seed(0))
    uniforms = _uniforms(100).view(2, 50)
    now = predict(
        logits,
        temperature=temperature,
        uniforms=uniforms if temperature else None,
        step=0,
        n_steps=1,
    )
    law = law_of(logits, temperature=temperature)
    assert law.dtype == torch.float64
    assert torch.equal(invert(law, uniforms), now.candidates)
    if temperature == 0.0:
        assert torch.equal(law.amax(-1), torch.ones(2, 50, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_law_of_logits_that_are_not_finite_is_not_finite(temperature: float, wrong: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = wrong
    law = law_of(logits, temperature=temperature)
    assert law.isfinite().all(-1).tolist() == [True, False, True]
