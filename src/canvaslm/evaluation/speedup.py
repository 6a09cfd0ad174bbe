"""How much faster is denoising canvases than drawing tokens, and is what comes out still text?

Several decoders (:mod:`canvaslm.evaluation.decoders`) continue the same held-out prompts. Forwards
are counted, seconds are taken in interleaved rounds, and beside each speed stands the quality of
what was written at that speed, since a count of forwards is the same whatever the weights are.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from canvaslm.evaluation.decoders import TOKEN_BY_TOKEN, Decoder
from canvaslm.evaluation.decoding_task import Task
from canvaslm.evaluation.sample_quality import (
    SampleQuality,
    judge_samples,
    reads_as_noise,
    repeats_itself,
)
from canvaslm.measure import ForwardCounter, Timing, interleaved_seconds
from canvaslm.model.backbone import Backbone
from canvaslm.reporting.progress import Track
from canvaslm.reporting.verdict import Verdict
from canvaslm.sampling.request import Generated


@dataclass(frozen=True, kw_only=True)
class SpeedupRow:
    """One decoder on one task.

    Forwards are counted for each prompt and added up: a forward over a batch of four counts four
    times here and once in ``batch_forwards``. Tokens are counted after the cut at the end of text.

    Attributes:
        n_rows: prompts.
        new_tokens: tokens asked for, for each prompt.
        tokens: tokens that came.
        forwards: all forwards.
        prefill_forwards: those that read a prompt.
        encoding_forwards: those that wrote to the cache.
        token_forwards: positions that went through the network.
        batch_forwards: forwards of the network, each over all rows of a batch that were not done.
        tokens_per_forward: tokens over forwards.
        tokens_per_forward_after_prompt: the same without prefill and without what it yields: the
            twin draws its first token from the prefill, a canvas starts after it.
        verifications: forwards that verified drafts; 0 where nothing is drafted.
        accepted: drafted tokens that passed and are among those that came.
        ended_by: how many prompts ended for which reason.
        timing: seconds of all prompts together; ``None`` where not measured.
        tokens_per_second: by the median round.
        quality: of the samples.
        is_repetitive: whether they repeat themselves far more than held-out text does.
        is_noise: whether the twin finds them far less probable than held-out text.
    """

    n_rows: int
    new_tokens: int
    tokens: int
    forwards: int
    prefill_forwards: int
    encoding_forwards: int
    token_forwards: int
    batch_forwards: int
    tokens_per_forward: float
    tokens_per_forward_after_prompt: float
    verifications: int
    accepted: int
    ended_by: dict[str, int]
    timing: Timing | None = None
    quality: SampleQuality | None = None
    is_repetitive: bool | None = None
    is_noise: bool | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over the seconds of the median round."""
        return None if self.timing is None else self.tokens / self.timing.median_s

    @property
    def accepted_per_forward(self) -> float | None:
        """Drafted tokens that passed over all forwards; ``None`` where nothing is drafted."""
        return self.accepted / self.forwards if self.verifications else None

    @property
    def accepted_per_verification(self) -> float | None:
        """Drafted tokens that passed in a round; ``None`` where nothing is drafted."""
        return self.accepted / self.verifications if self.verifications else None


def count_rows(
    decoders: dict[str, Decoder], task: Task, *, track: Track
) -> tuple[dict[str, SpeedupRow], dict[str, list[Generated]]]:
    """Run every decoder once and count: rows without seconds and quality, and the samples."""
    rows, samples = {}, {}
    label = f"decoders counted at {task.new_tokens} tokens"
    for name in track(list(decoders), total=len(decoders), label=label):
        with ForwardCounter(decoders[name].model.entrance) as counter:
            samples[name] = task.run(decoders[name])
        rows[name] = _counted(samples[name], task.new_tokens, counter)
    return rows, samples


def time_rows(
    rows: dict[str, SpeedupRow],
    decoders: dict[str, Decoder],
    task: Task,
    *,
    rounds: int,
    warmup_rounds: int,
) -> dict[str, SpeedupRow]:
    """Add seconds from interleaved rounds; every round makes the samples that were counted.

    What was counted ran every decoder once at these very shapes, which is the first warm-up round.
    """

    def work(decoder: Decoder) -> Callable[[], object]:
        return lambda: task.run(decoder)

    timings = interleaved_seconds(
        {name: work(decoder) for name, decoder in decoders.items()},
        device=next(iter(decoders.values())).model.head_weight.device,
        rounds=rounds,
        warmup_rounds=warmup_rounds - 1,
    )
    return {name: dataclasses.replace(row, timing=timings[name]) for name, row in rows.items()}


def judge_rows(
    rows: dict[str, SpeedupRow],
    samples: dict[str, list[Generated]],
    task: Task,
    *,
    twin: Backbone,
    bos_id: int,
    held_out: SampleQuality,
    min_diversity_share: float,
    max_excess_nats: float,
) -> dict[str, SpeedupRow]:
    """Add the quality of each decoder's samples, held against held-out text of their length."""
    judged = {}
    for name, row in rows.items():
        texts = [made.ids for made in samples[name]]
        quality = judge_samples(twin, task.prompts, texts, bos_id=bos_id)
        judged[name] = dataclasses.replace(
            row,
            quality=quality,
            is_repetitive=repeats_itself(quality, held_out, min_share=min_diversity_share),
            is_noise=reads_as_noise(quality, held_out, max_excess_nats=max_excess_nats),
        )
    return judged


def verdict_of(rows: dict[str, SpeedupRow]) -> tuple[Verdict, str]:
    """Judge a comparison, and say why.

    Returns:
        ``fail`` where a decoder's numbers stopped being finite, or its samples repeat themselves
        or read as noise, since its speed is no speed of text; and the reason, which names each
        such row.
    """
    faults = [f"{name} {fault}" for name, row in rows.items() for fault in _faults(row)]
    if faults:
        return "fail", "; ".join(faults)
    unjudged = [name for name, row in rows.items() if None in (row.is_repetitive, row.is_noise)]
    if unjudged:
        return "not_measured", f"not judged: {', '.join(unjudged)}"
    told = "the texts were judged, not the speed: none repeats itself or reads as noise"
    return "pass", f"{told}; {_fastest_in_words(rows)}"


def _fastest_in_words(rows: Mapping[str, SpeedupRow]) -> str:
    """What the comparison came to; how fast is fast enough is for the reader."""
    twin = rows.get("autoregressive")
    base = twin and twin.tokens_per_second
    rates = {x: row.tokens_per_second for x, row in rows.items() if x not in TOKEN_BY_TOKEN}
    timed = {name: rate for name, rate in rates.items() if rate}
    if not base or not timed:
        return "speed was not measured"
    name = max(timed, key=lambda name: timed[name])
    ratio = timed[name] / base
    return f"the fastest canvas decoder, {name}, runs at {ratio:.2f} times the twin's speed"


def _faults(row: SpeedupRow) -> Iterator[str]:
    """Why a row is not text."""
    broken = row.ended_by.get("not_finite", 0)
    if broken:
        yield f"ended {broken} of {row.n_rows} texts on numbers that are not finite"
    if row.is_repetitive:
        yield "repeats itself"
    if row.is_noise and row.quality is not None:
        yield f"reads as noise ({row.quality.twin_nats_per_token:.3g} nats per token)"


def _counted(made: list[Generated], new_tokens: int, counter: ForwardCounter) -> SpeedupRow:
    """Add up the rows of one decoder."""
    tokens = sum(len(row.ids) for row in made)
    forwards = sum(row.forwards for row in made)
    prefills = sum(row.prefill_forwards for row in made)
    token_forwards = sum(row.token_forwards for row in made)
    assert token_forwards == counter.tokens, (token_forwards, counter.tokens)
    by_prefill = sum(1 for row in made if row.canvases == 0 and row.ids)
    after = forwards - prefills
    return SpeedupRow(
        n_rows=len(made),
        new_tokens=new_tokens,
        tokens=tokens,
        forwards=forwards,
        prefill_forwards=prefills,
        encoding_forwards=sum(row.encoding_forwards for row in made),
        token_forwards=token_forwards,
        batch_forwards=counter.forwards,
        tokens_per_forward=tokens / forwards,
        tokens_per_forward_after_prompt=(tokens - by_prefill) / after if after else 0.0,
        verifications=sum(row.verifications for row in made),
        accepted=sum(row.accepted for row in made),
        ended_by=dict(Counter(row.reason for row in made)),
    )
