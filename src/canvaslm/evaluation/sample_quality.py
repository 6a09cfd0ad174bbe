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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.evaluation.document_ratios import Ratio
from canvaslm.model.backbone import Backbone

NOT_MEASURED = "not_measured"
DIVERSITIES = ("unigram_entropy_nats", "distinct_1", "distinct_2", "repetition_4")
_GRAM = 4  # tokens of what is counted as repeated


@dataclass(frozen=True, kw_only=True)
class SampleQuality:
    """Figures of some samples; each is ``None`` where there was nothing to measure it on.

    Entropy, distinct-n and repetition are taken within each sample and averaged, since pooled over
    samples they would depend on how many there are. All depend on the length of the samples.

    Attributes:
        twin_nats_per_token: the twin's loss on all generated tokens, given prompts and what comes
            before.
        twin_nats_standard_error: of that, over samples, as a ratio of two sums; ``None`` with fewer
            than two samples.
        unigram_entropy_nats: entropy of the frequencies of a sample's tokens.
        distinct_1: distinct tokens over tokens.
        distinct_2: distinct pairs of neighbours over pairs.
        repetition_4: runs of four tokens that stood in the sample before, over all such runs
            (seq-rep-4 of Welleck et al. 2019, arXiv 1908.04319).
        n_tokens: generated tokens.
        n_samples: samples, the empty ones included.
    """

    twin_nats_per_token: float | None
    twin_nats_standard_error: float | None
    unigram_entropy_nats: float | None
    distinct_1: float | None
    distinct_2: float | None
    repetition_4: float | None
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
    nats = [
        float(_sample_nats(twin, prompt, sample, bos_id).sum()) if len(sample) > 0 else 0.0
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
    sizes = [len(sample) for sample in samples]
    per_token = Ratio.of(np.array(nats), np.array(sizes, dtype=np.float64))
    distinct_4 = _mean([_distinct(sample, _GRAM) for sample in samples if len(sample) >= _GRAM])
    return SampleQuality(
        twin_nats_per_token=_finite(per_token.value),
        twin_nats_standard_error=_finite(per_token.standard_error),
        unigram_entropy_nats=_mean([_entropy_nats(sample) for sample in samples if sample]),
        distinct_1=_mean([_distinct(sample, 1) for sample in samples if len(sample) >= 1]),
        distinct_2=_mean([_distinct(sample, 2) for sample in samples if len(sample) >= 2]),
        repetition_4=None if distinct_4 is None else 1 - distinct_4,
        n_tokens=sum(sizes),
        n_samples=len(samples),
    )


def quality_figures(quality: SampleQuality | None) -> dict[str, Any]:
    """The figures of a sample's quality; whatever was not measured says so."""
    names = SampleQuality.__dataclass_fields__
    values = {name: None if quality is None else getattr(quality, name) for name in names}
    return {name: NOT_MEASURED if value is None else value for name, value in values.items()}


def share_of_equal_tokens(
    samples: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
) -> float | None:
    """How far samples agree with others behind the same prompts, place by place.

    Args:
        samples: ids behind each prompt.
        others: ids behind the same prompts.

    Returns:
        Places that hold the same token over all places of the longer of each two; ``None`` where
        there is no place.
    """
    pairs = list(zip(samples, others, strict=True))
    n_places = sum(max(len(ours), len(theirs)) for ours, theirs in pairs)
    n_equal = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
    return n_equal / n_places if n_places else None


def lost_diversity(
    samples: SampleQuality, held_out: SampleQuality, *, min_share: float
) -> tuple[str, ...] | None:
    """Name the figures by which samples are far less diverse than held-out text of their length.

    Args:
        samples: what is judged.
        held_out: what is usual.
        min_share: the least share of held-out text's entropy, distinct-1, distinct-2, and of what
            it does not repeat.

    Returns:
        Those of :data:`DIVERSITIES` that fall below that share; ``None`` where one was not
        measured.
    """
    ours, usual = _diversities(samples), _diversities(held_out)
    if ours is None or usual is None:
        return None
    triples = zip(DIVERSITIES, ours, usual, strict=True)
    return tuple(name for name, mine, theirs in triples if mine < min_share * theirs)


def repeats_itself(
    samples: SampleQuality, held_out: SampleQuality, *, min_share: float
) -> bool | None:
    """Say whether samples repeat themselves far more than held-out text of their length does.

    Args:
        samples: what is judged.
        held_out: what is usual.
        min_share: as in :func:`lost_diversity`.

    Returns:
        Whether a diversity falls below that share; ``None`` where one was not measured.
    """
    lost = lost_diversity(samples, held_out, min_share=min_share)
    return None if lost is None else bool(lost)


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


def _diversities(quality: SampleQuality) -> tuple[float, ...] | None:
    """The figures of :data:`DIVERSITIES`, each the greater the more diverse a text is."""
    repeated = quality.repetition_4
    fresh = None if repeated is None else 1 - repeated
    found = (quality.unigram_entropy_nats, quality.distinct_1, quality.distinct_2, fresh)
    whole = tuple(value for value in found if value is not None)
    return whole if len(whole) == len(found) else None


def _entropy_nats(sample: Sequence[int]) -> float:
    shares = [count / len(sample) for count in Counter(sample).values()]
    return abs(math.fsum(share * math.log(share) for share in shares))


def _distinct(sample: Sequence[int], n: int) -> float:
    grams = [tuple(sample[i : i + n]) for i in range(len(sample) - n + 1)]
    return len(set(grams)) / len(grams)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
