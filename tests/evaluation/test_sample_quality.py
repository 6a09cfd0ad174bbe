import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from canvaslm.evaluation.sample_quality import (
    SampleQuality,
    judge_samples,
    lost_diversity,
    quality_figures,
    reads_as_noise,
    repeats_itself,
    share_of_equal_tokens,
)
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from shapes import tiny_shape

EOT = 10
VOCAB = 11
LAYOUT = Layout(canvas_tokens=1, canvases_per_window=96, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def twin() -> Backbone:
    model = Backbone(tiny_shape(vocab_multiple=1).twin(), LAYOUT)
    initialise(model, 0)
    with torch.no_grad():
        model.embedding.weight.mul_(30)
    return model.double().eval()


def _nats_one_by_one(twin: Any, prompt: list[int], sample: list[int]) -> list[float]:
    nats = []
    for position, token in enumerate(sample):
        read = torch.tensor([[EOT, *prompt, *sample[:position]]])
        with torch.no_grad():
            logits: Tensor = twin.logits(twin.encode(read).hidden[0, -1])
        nats.append(-float(torch.log_softmax(logits, -1)[token]))
    return nats


def test_only_generated_tokens_are_scored_behind_their_prompt(twin: Backbone) -> None:
    prompts, samples = [[1, 2, 3], [], [4]], [[5, 6], [7, 8, 9, 1], []]
    quality = judge_samples(twin, prompts, samples, bos_id=EOT)
    by_hand = [
        nats
        for prompt, sample in zip(prompts, samples, strict=True)
        for nats in _nats_one_by_one(twin, prompt, sample)
    ]
    # BR-63: one mean over tokens, not a mean of means.
    assert quality.twin_nats_per_token == pytest.approx(sum(by_hand) / 6, abs=1e-12)
    assert (quality.n_tokens, quality.n_samples) == (6, 3)


def test_diversity_is_taken_within_each_sample(twin: Backbone) -> None:
    quality = judge_samples(twin, [[], []], [[1, 2, 1, 2], [3, 4, 5, 6]], bos_id=EOT)
    assert quality.unigram_entropy_nats == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert quality.distinct_1 == pytest.approx((2 / 4 + 1) / 2)
    assert quality.distinct_2 == pytest.approx((2 / 3 + 1) / 2)


# BR-67
def test_one_token_for_ever_is_rejected_however_probable_it_is(twin: Backbone) -> None:
    text = torch.randint(10, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    usual = judge_samples(twin, [[1]], [text], bos_id=EOT)
    quality = judge_samples(twin, [[1]], [[7] * 64], bos_id=EOT)
    assert quality.unigram_entropy_nats == 0.0
    assert quality.distinct_1 == 1 / 64
    assert quality.distinct_2 == 1 / 63
    assert quality.repetition_4 == 60 / 61
    assert repeats_itself(quality, usual, min_share=0.5) is True
    assert repeats_itself(usual, usual, min_share=0.5) is False


@pytest.mark.parametrize("figure", ["unigram_entropy_nats", "distinct_1", "distinct_2"])
def test_each_figure_alone_can_give_repetition_away(figure: str) -> None:
    usual: dict[str, Any] = {
        "twin_nats_per_token": 3.0,
        "twin_nats_standard_error": 0.1,
        "unigram_entropy_nats": 4.0,
        "distinct_1": 0.8,
        "distinct_2": 0.9,
        "repetition_4": 0.0,
        "n_tokens": 64,
        "n_samples": 1,
    }
    held_out = SampleQuality(**usual)
    for share, expected in ((0.51, False), (0.49, True)):
        samples = SampleQuality(**(usual | {figure: usual[figure] * share}))
        assert repeats_itself(samples, held_out, min_share=0.5) is expected


@pytest.mark.parametrize(("repetition", "expected"), [(0.54, False), (0.56, True)])
def test_repetition_is_held_against_what_held_out_text_repeats(
    repetition: float, expected: bool
) -> None:
    held_out = SampleQuality(
        twin_nats_per_token=3.0,
        twin_nats_standard_error=0.1,
        unigram_entropy_nats=4.0,
        distinct_1=0.8,
        distinct_2=0.9,
        repetition_4=0.1,
        n_tokens=64,
        n_samples=1,
    )
    samples = dataclasses.replace(held_out, repetition_4=repetition)
    assert repeats_itself(samples, held_out, min_share=0.5) is expected
    expected_names = ("repetition_4",) if expected else ()
    assert lost_diversity(samples, held_out, min_share=0.5) == expected_names


def test_repetition_is_the_share_of_runs_of_four_that_stood_there_before(twin: Backbone) -> None:
    quality = judge_samples(twin, [[]], [[1, 2, 3, 4, 9, 1, 2, 3, 4]], bos_id=EOT)
    assert quality.repetition_4 == pytest.approx(1 / 6)
    short = judge_samples(twin, [[]], [[1, 1, 1]], bos_id=EOT)
    assert short.repetition_4 is None
    assert repeats_itself(short, quality, min_share=0.5) is None


def test_the_error_of_the_nats_is_over_samples(twin: Backbone) -> None:
    """By hand: a ratio of two sums, each sample moving it by its own residual."""
    samples = [[5, 6], [7, 8, 9, 1]]
    quality = judge_samples(twin, [[1], [2]], samples, bos_id=EOT)
    nats = [
        sum(_nats_one_by_one(twin, prompt, sample))
        for prompt, sample in zip([[1], [2]], samples, strict=True)
    ]
    mean = sum(nats) / 6
    squares = sum((x - mean * n) ** 2 for x, n in zip(nats, (2, 4), strict=True))
    assert quality.twin_nats_standard_error == pytest.approx(math.sqrt(2 * squares) / 6)
    alone = judge_samples(twin, [[1]], samples[:1], bos_id=EOT)
    assert alone.twin_nats_standard_error is None


def test_agreement_counts_the_places_of_the_longer_text() -> None:
    assert share_of_equal_tokens([[1, 2, 3]], [[1, 9, 3]]) == pytest.approx(2 / 3)
    assert share_of_equal_tokens([[1, 2], [5]], [[1, 2, 3, 4], [5]]) == pytest.approx(3 / 5)
    assert share_of_equal_tokens([[], [1]], [[], []]) == 0.0
    assert share_of_equal_tokens([[]], [[]]) is None


def test_figures_that_were_not_measured_say_so(twin: Backbone) -> None:
    figures = quality_figures(judge_samples(twin, [[1]], [[]], bos_id=EOT))
    assert figures.pop("n_tokens") == 0
    assert figures.pop("n_samples") == 1
    assert set(figures.values()) == set(quality_figures(None).values()) == {"not_measured"}


@pytest.mark.parametrize(("nats", "expected"), [(1.0, False), (4.99, False), (5.01, True)])
def test_noise_is_told_by_its_excess_over_held_out_text(nats: float, expected: bool) -> None:
    usual: dict[str, Any] = {
        "twin_nats_per_token": 3.5,
        "twin_nats_standard_error": 0.1,
        "unigram_entropy_nats": 4.0,
        "distinct_1": 0.8,
        "distinct_2": 0.9,
        "repetition_4": 0.0,
        "n_tokens": 64,
        "n_samples": 1,
    }
    held_out = SampleQuality(**usual)
    samples = dataclasses.replace(held_out, twin_nats_per_token=nats)
    assert reads_as_noise(samples, held_out, max_excess_nats=1.5) is expected


def test_nothing_is_measured_on_nothing(twin: Backbone) -> None:
    quality = judge_samples(twin, [[1], [2]], [[], []], bos_id=EOT)
    assert quality.twin_nats_per_token is None
    assert quality.unigram_entropy_nats is None
    assert (quality.n_tokens, quality.n_samples) == (0, 2)
    usual = judge_samples(twin, [[1]], [[1, 2, 3]], bos_id=EOT)
    assert repeats_itself(quality, usual, min_share=0.5) is None
    assert reads_as_noise(quality, usual, max_excess_nats=1.0) is None
