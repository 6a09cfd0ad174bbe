"""Are samples text, or do they only look probable?

The twin's nats per token say how probable samples are behind their prompts. On their own they
reward repetition: a text that says one word for ever is very probable. So they never stand alone:
the entropy of a sample's tokens and the share of its n-grams that are distinct fall when a text
repeats itself, and the same figures for held-out text of the same length say what is usual. Both
sides are needed: noise is diverse and improbable, a loop is probable and poor.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.model.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class SampleQuality:
    """Figures of some samples; each is ``None`` where there was nothing to measure it on.

    Entropy and distinct-n are taken within each sample and averaged, since pooled over samples
    they would depend on how many there are. All three depend on the length of the samples.

    Attributes:
        twin_nats_per_token: the twin's loss on all generated tokens, given prompts and what comes
            before.
        unigram_entropy_nats: entropy of the frequencies of a sample's tokens.
        distinct_1: distinct tokens over tokens.
        distinct_2: distinct pairs of neighbours over pairs.
        n_tokens: generated tokens.
        n_samples: samples, the empty ones included.
    """

    twin_nats_per_token: float | None
    unigram_entropy_nats: float | None
    distinct_1: float | None
    distinct_2: float | None
    n_tokens: int
    n_samples: int


def judge_samples(
    twin: Backbone,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sequence[int]],
    *,
    bos_id: int,
) -> SampleQuality:
    """Measure samples behind their prompts.

    Args:
        twin: the autoregressive model.
        prompts: ids of each prompt; they are read and not scored.
        samples: ids that were generated behind each prompt, without the end-of-text id.
        bos_id: the id that stands before every window of the twin, the end-of-text id.
    """
    n_tokens = sum(len(sample) for sample in samples)
    nats = sum(
        float(_sample_nats(twin, prompt, sample, bos_id).sum())
        for prompt, sample in zip(prompts, samples, strict=True)
        if len(sample) > 0
    )
    return SampleQuality(
        twin_nats_per_token=nats / n_tokens if n_tokens else None,
        unigram_entropy_nats=_mean([_entropy_nats(sample) for sample in samples if sample]),
        distinct_1=_mean([_distinct(sample, 1) for sample in samples if len(sample) >= 1]),
        distinct_2=_mean([_distinct(sample, 2) for sample in samples if len(sample) >= 2]),
        n_tokens=n_tokens,
        n_samples=len(samples),
    )


def repeats_itself(
    samples: SampleQuality, held_out: SampleQuality, *, min_share: float
) -> bool | None:
    """Say whether samples repeat themselves far more than held-out text of their length does.

    Args:
        samples: what is judged.
        held_out: what is usual.
        min_share: the least share of held-out text's entropy, distinct-1 and distinct-2.

    Returns:
        Whether one of the three falls below that share; ``None`` where one was not measured.
    """
    pairs = [
        (samples.unigram_entropy_nats, held_out.unigram_entropy_nats),
        (samples.distinct_1, held_out.distinct_1),
        (samples.distinct_2, held_out.distinct_2),
    ]
    if any(ours is None or usual is None for ours, usual in pairs):
        return None
    return any(
        ours < min_share * usual for ours, usual in pairs if ours is not None and usual is not None
    )


def reads_as_noise(
    samples: SampleQuality, held_out: SampleQuality, *, max_excess_nats: float
) -> bool | None:
    """Say whether the twin finds samples far less probable than held-out text.

    Noise is as diverse as can be, so nothing but its improbability gives it away.

    Args:
        samples: what is judged.
        held_out: what is usual.
        max_excess_nats: the most by which samples may cost more than held-out text, per token.

    Returns:
        Whether they cost more than that; ``None`` where one of the two was not measured.
    """
    ours, usual = samples.twin_nats_per_token, held_out.twin_nats_per_token
    if ours is None or usual is None:
        return None
    return ours > usual + max_excess_nats


@torch.no_grad()
def _sample_nats(
    twin: Backbone, prompt: Sequence[int], sample: Sequence[int], bos_id: int
) -> Tensor:
    """(n,) nats of each generated token, float64, from one forward over prompt and sample."""
    device = twin.head_weight.device
    read = torch.tensor([[bos_id, *prompt, *sample[:-1]]], device=device)
    hidden = twin.encode(read).hidden[0, len(prompt) :]
    targets = torch.tensor(list(sample), device=device)
    return functional.cross_entropy(twin.logits(hidden).double(), targets, reduction="none")


def _entropy_nats(sample: Sequence[int]) -> float:
    shares = [count / len(sample) for count in Counter(sample).values()]
    return abs(math.fsum(share * math.log(share) for share in shares))


def _distinct(sample: Sequence[int], n: int) -> float:
    grams = [tuple(sample[i : i + n]) for i in range(len(sample) - n + 1)]
    return len(set(grams)) / len(grams)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
