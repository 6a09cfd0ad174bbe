"""Letters: V vocabulary, D width. What the pass says is held against float64 over all logits."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from canvaslm.randomness import stream
from canvaslm.sampling import one_pass
from canvaslm.sampling.one_pass import Asked, answer
from canvaslm.sampling.prediction import Prediction, invert, predict, shaped_probabilities
from oracles import weigh

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
FIELDS = ("candidates", "argmax", "confidence", "entropy")


def _asked(
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float64,
    shape: tuple[int, int] = (3, 50),
    temperature: float = 0.7,
    vocab_chunk: int = 10_000,
    spread: float = 2.0,
    with_excess: bool = True,
) -> Asked:
    draws = stream(vocab_size, "test")
    width = 16
    hidden = torch.from_numpy(draws.standard_normal((*shape, width))).to(dtype)
    head = torch.from_numpy(draws.standard_normal((width, vocab_size))).to(dtype) * spread / 4
    noisy = torch.from_numpy(draws.integers(vocab_size, size=shape))
    excess = torch.from_numpy(draws.random(shape) * 3) if with_excess else None
    uniforms = torch.from_numpy(draws.random(shape)) if temperature else None
    return Asked(
        hidden=hidden,
        head=head,
        noisy=noisy if with_excess else None,
        excess=excess,
        temperature=temperature,
        uniforms=uniforms,
        vocab_chunk=vocab_chunk,
    )


def _plain(asked: Asked) -> tuple[Prediction, Tensor]:
    """What is to be said, and the logits that it is said of, in float64."""
    logits = asked.hidden.double() @ asked.head.double()
    if asked.noisy is not None:
        logits = weigh(logits, asked.noisy, asked.excess)
    plain = predict(
        logits, temperature=asked.temperature, uniforms=asked.uniforms, step=2, n_steps=4
    )
    return plain, logits


@pytest.mark.parametrize("with_excess", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 2.5])
@pytest.mark.parametrize("vocab_size", [3, 127, 128, 129, 1000])
def test_it_says_in_float64_what_the_plain_form_says(
    vocab_size: int, temperature: float, with_excess: bool
) -> None:
    asked = _asked(vocab_size, temperature=temperature, with_excess=with_excess)
    (now, guess), (plain, _) = answer(asked, step=2, n_steps=4), _plain(asked)
    assert guess is None
    assert (now.step, now.n_steps) == (2, 4)
    assert torch.equal(now.candidates, plain.candidates)
    assert torch.equal(now.argmax, plain.argmax)
    for told, expected in ((now.confidence, plain.confidence), (now.entropy, plain.entropy)):
        assert told.dtype == torch.float64
        assert (told - expected).abs().max() < TOLERANCE[torch.float64]


@pytest.mark.parametrize("spread", [0.1, 2.0, 12.0])
def test_in_float32_it_is_off_by_rounding_alone(spread: float) -> None:
    asked = _asked(1000, dtype=torch.float32, shape=(4, 500), spread=spread)
    (now, _), (plain, logits) = answer(asked, step=2, n_steps=4), _plain(asked)
    for told, expected in ((now.confidence, plain.confidence), (now.entropy, plain.entropy)):
        assert (told - expected).abs().max() < TOLERANCE[torch.float32] * max(1.0, spread)
    # Another token is drawn only where the uniform number lies on an edge between two.
    assert asked.uniforms is not None
    cumulated = shaped_probabilities(logits, temperature=0.7).cumsum(-1)
    upper = cumulated.gather(-1, now.candidates[..., None])[..., 0]
    lower = torch.where(
        now.candidates > 0,
        cumulated.gather(-1, (now.candidates - 1).clamp(min=0)[..., None])[..., 0],
        0.0,
    )
    edge = 1e-5
    assert ((lower - edge < asked.uniforms) & (asked.uniforms < upper + edge)).all()
    assert (now.candidates != plain.candidates).float().mean() < 1e-2
    assert (now.argmax != plain.argmax).float().mean() < 1e-2


def test_in_bfloat16_it_is_off_by_the_rounding_of_logits() -> None:
    asked = _asked(1000, dtype=torch.bfloat16, shape=(4, 200))
    asked = dataclasses.replace(asked, table=asked.head.T.contiguous())
    (now, guess), (plain, logits) = answer(asked, step=2, n_steps=4), _plain(asked)
    assert guess is not None
    assert asked.table is not None
    far = 2**-8 * float(logits.abs().max())  # of a logit, in nats
    assert (now.entropy - plain.entropy).abs().max() < 2 * far
    assert (now.entropy - plain.entropy).abs().mean() < far / 4
    assert (now.confidence / plain.confidence).log().abs().max() < 2 * far
    shown = (asked.hidden.double() @ asked.head.double()).softmax(-1) @ asked.table.double()
    assert (guess.double() - shown).norm() < 0.02 * shown.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_chunks_nor_neighbours_change_a_draw(dtype: torch.dtype) -> None:
    asked = _asked(1000, dtype=dtype, shape=(2, 100))
    whole, _ = answer(asked, step=0, n_steps=1)
    for vocab_chunk in (1, 128, 300, 999):
        other, _ = answer(dataclasses.replace(asked, vocab_chunk=vocab_chunk), step=0, n_steps=1)
        for name in FIELDS:
            gap = (getattr(whole, name) - getattr(other, name)).abs().max()
            assert gap <= (0 if name in FIELDS[:2] else TOLERANCE[dtype])
    alone, _ = answer(asked.flat().some(slice(7, 8)), step=0, n_steps=1)
    for name in FIELDS:
        gap = (getattr(alone, name)[0, 0] - getattr(whole, name)[0, 7]).abs()
        assert gap <= (0 if name in FIELDS[:2] else TOLERANCE[dtype])


def _evenly(n: int) -> Tensor:
    """Uniform numbers that cut [0, 1) evenly: a law shows in counts that are off by 1 at most."""
    return (torch.arange(n, dtype=torch.float64)[None] + 0.5) / n


# BR-60
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rare_token_of_one_in_ten_thousand_comes_as_often_as_it_should(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_ROWS", 10_000)
    logits = torch.tensor([0.0, math.log(0.9999 / 1e-4)], dtype=dtype)
    rare = float(torch.softmax(logits.double(), -1)[0])  # bfloat16 logits round the odds
    n = 200_000
    asked = Asked(
        hidden=torch.ones(1, n, 1, dtype=dtype),
        head=logits[None],
        noisy=None,
        excess=None,
        temperature=1.0,
        uniforms=_evenly(n),
        vocab_chunk=2,
    )
    drawn = answer(asked, step=0, n_steps=1)[0].candidates
    assert 15 <= n * rare <= 25
    assert abs(int((drawn == 0).sum()) - n * rare) <= 1


def test_draws_in_float32_follow_the_distribution_over_many_bins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_pass, "_ROWS", 10_000)
    n, vocab_size = 50_000, 400
    asked = _asked(vocab_size, dtype=torch.float32, shape=(1, 1), spread=3.0, with_excess=False)
    many = dataclasses.replace(asked, hidden=asked.hidden.expand(1, n, -1), uniforms=_evenly(n))
    drawn = answer(many, step=0, n_steps=1)[0].candidates.flatten()
    law = shaped_probabilities(_plain(asked)[1].flatten(), temperature=0.7)
    counts = torch.bincount(drawn, minlength=vocab_size).double()
    assert (counts - n * law).abs().max() <= 1.1


def test_extreme_uniform_numbers_draw_words_of_positive_probability() -> None:
    vocab_size = 300  # the last bin is padded
    logits = torch.full((vocab_size,), -2000.0)
    logits[[130, 140, 260]] = torch.tensor([1.0, 2.0, 0.5])
    uniforms = torch.tensor([[0.0, 0.3, 1.0 - 2**-53]], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        asked = Asked(
            hidden=torch.ones(1, 3, 1, dtype=dtype),
            head=logits[None].to(dtype),
            noisy=None,
            excess=None,
            temperature=0.5,
            uniforms=uniforms,
            vocab_chunk=128,
        )
        drawn = answer(asked, step=0, n_steps=1)[0].candidates
        assert drawn.tolist() == [[130, 140, 260]]
        expected = invert(torch.softmax(logits.double() / 0.5, -1).expand(3, -1), uniforms[0])
        assert drawn[0].tolist() == expected.tolist()


def test_a_number_that_is_not_finite_is_shown_where_it_is_and_nowhere_else() -> None:
    asked = _asked(300, shape=(1, 5), with_excess=False)
    plain, _ = _plain(asked)
    for wrong in (math.nan, math.inf):
        hidden = asked.hidden.clone()
        hidden[0, 3, 0] = wrong
        now, _ = answer(dataclasses.replace(asked, hidden=hidden), step=0, n_steps=1)
        assert now.entropy.isfinite().tolist() == [[True, True, True, False, True]]
        others = [0, 1, 2, 4]
        assert torch.equal(now.candidates[0, others], plain.candidates[0, others])
        assert torch.allclose(now.entropy[0, others], plain.entropy[0, others], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
def test_what_the_plain_form_decides_changes_no_bit_of_its_neighbours(
    wrong: float, temperature: float, dtype: torch.dtype
) -> None:
    usual = _asked(300, dtype=dtype, shape=(1, 5), temperature=temperature)
    usual.hidden[0, :, 0] = 0.0
    usual.head[0] = 0.0
    usual.head[0, :128] = torch.finfo(dtype).min  # a whole bin overflows where hidden does not fit
    beside = dataclasses.replace(usual, hidden=usual.hidden.clone())
    beside.hidden[0, 3, 0] = wrong
    (alone, _), (now, _) = (answer(asked, step=0, n_steps=1) for asked in (usual, beside))
    others = [0, 1, 2, 4]
    for name in FIELDS:
        assert torch.equal(getattr(now, name)[0, others], getattr(alone, name)[0, others])
    assert now.entropy[0, 3].isfinite() == math.isfinite(wrong)
    if math.isfinite(wrong):
        plain, _ = _plain(beside)
        assert now.candidates[0, 3] == plain.candidates[0, 3]
        assert now.argmax[0, 3] == plain.argmax[0, 3]
        assert (now.confidence - plain.confidence)[0, 3].abs() < TOLERANCE[dtype]
        assert (now.entropy - plain.entropy)[0, 3].abs() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-12, 1e-40, 1e-300])
def test_tiny_temperature_is_certain_of_the_argmax(temperature: float, dtype: torch.dtype) -> None:
    asked = _asked(300, dtype=dtype, temperature=temperature)
    now, _ = answer(asked, step=0, n_steps=1)
    assert torch.equal(now.argmax, _plain(asked)[0].argmax)
    assert torch.equal(now.candidates, now.argmax)
    assert (now.confidence == 1.0).all()
    assert (now.entropy == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_chunk", [128, 200, 1000])
def test_the_guess_is_that_of_the_logits_before_anything_is_taken_off(
    dtype: torch.dtype, vocab_chunk: int
) -> None:
    asked = _asked(333, dtype=dtype, vocab_chunk=vocab_chunk)
    table = asked.head.T.contiguous()
    now, guess = answer(dataclasses.replace(asked, table=table), step=0, n_steps=1)
    assert guess is not None
    assert guess.dtype == dtype
    expected = torch.softmax(asked.hidden.double() @ asked.head.double(), -1) @ table.double()
    assert (guess - expected).abs().max() < TOLERANCE[dtype] * 2
    without, _ = answer(asked, step=0, n_steps=1)
    assert torch.equal(now.candidates, without.candidates)


def test_no_more_logits_exist_than_those_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    multiply = torch.mm

    def counted(*tensors: Tensor, out: Tensor) -> Tensor:
        made.append(out.numel())
        return multiply(*tensors, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    answer(_asked(1000, shape=(4, 100), vocab_chunk=256), step=0, n_steps=1)
    assert max(made) == one_pass._ROWS * 256
    assert sum(made) == 400 * 1000
