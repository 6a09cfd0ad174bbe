import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from canvaslm.evaluation.sample_quality import (
    SampleQuality,
    judge_samples,
    reads_as_noise,
    repeats_itself,
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
    assert repeats_itself(quality, usual, min_share=0.5) is True
    assert repeats_itself(usual, usual, min_share=0.5) is False


@pytest.mark.parametrize("figure", ["unigram_entropy_nats", "distinct_1", "distinct_2"])
def test_each_figure_alone_can_give_repetition_away(figure: str) -> None:
    usual: dict[str, Any] = {
        "twin_nats_per_token": 3.0,
        "unigram_entropy_nats": 4.0,
        "distinct_1": 0.8,
        "distinct_2": 0.9,
        "n_tokens": 64,
        "n_samples": 1,
    }
    held_out = SampleQuality(**usual)
    for share, expected in ((0.51, False), (0.49, True)):
        samples = SampleQuality(**(usual | {figure: usual[figure] * share}))
        assert repeats_itself(samples, held_out, min_share=0.5) is expected


@pytest.mark.parametrize(("nats", "expected"), [(1.0, False), (4.99, False), (5.01, True)])
def test_noise_is_told_by_its_excess_over_held_out_text(nats: float, expected: bool) -> None:
    usual: dict[str, Any] = {
        "twin_nats_per_token": 3.5,
        "unigram_entropy_nats": 4.0,
        "distinct_1": 0.8,
        "distinct_2": 0.9,
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
