"""Which samplers write the best text for what they take, and what has each won by losing what?

One figure of a sample can be bought with another: nats with repetition, diversity with noise, and
forwards with either. So a sampler is first asked whether it writes text at all, held against
held-out text of the same length. Only those that do can stand on the frontier, or push another off
it: a text is on it where no other has fewer nats for no more forwards. The answer is in fixed
words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from canvaslm.evaluation.sample_quality import DIVERSITIES, SampleQuality, lost_diversity
from canvaslm.evaluation.speedup import SpeedupRow
from canvaslm.reporting.verdict import Verdict

NATS = "twin_nats_per_token"
FORWARDS = "forwards_per_token"
Word = Literal["frontier", "dominated", "trade", "not_finite", "not_measured"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one sampler stands among the others.

    Attributes:
        word: on the frontier of nats and forwards; dominated on it; a trade, which is no text;
            numbers that stopped being finite; or not measured.
        told: the same in fixed words.
        dominated_by: the id of the text with the fewest nats that costs no more forwards.
        is_on_frontier_of_seconds: whether no text has fewer nats in as few seconds; ``None`` where
            seconds were not measured, or it is no text.
        won: figures that are better than those of every sampler that writes text, or than held-out
            text's where none does; of a trade only.
        lost: figures that are too much worse than held-out text's; of a trade only.
    """

    word: Word
    told: str
    dominated_by: str | None = None
    is_on_frontier_of_seconds: bool | None = None
    won: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def tokens_with_end(row: SpeedupRow) -> int:
    """Tokens that a sampler has decided, the end of text among them and nothing behind it."""
    return row.tokens + row.ended_by.get("end_of_text", 0)


def forwards_per_token(row: SpeedupRow) -> float | None:
    """Forwards over tokens, both counted for each prompt; ``None`` where there is no token."""
    n_tokens = tokens_with_end(row)
    return row.forwards / n_tokens if n_tokens else None


def seconds_per_token(row: SpeedupRow) -> float | None:
    """Seconds of the median round over tokens; ``None`` where one of the two is not there."""
    n_tokens = tokens_with_end(row)
    return row.timing.median_s / n_tokens if row.timing and n_tokens else None


def stand(
    rows: Mapping[str, SpeedupRow],
    held_out: SampleQuality,
    *,
    min_diversity_share: float,
    max_excess_nats: float,
) -> dict[str, Standing]:
    """Say how each sampler stands.

    Args:
        rows: samplers by id, with their quality; seconds may be missing.
        held_out: what people wrote behind the same prompts.
        min_diversity_share: the least share of held-out text's diversity.
        max_excess_nats: the most by which a text may cost more than held-out text, per token.
    """
    losses = {
        name: _losses(row, held_out, min_share=min_diversity_share, max_excess_nats=max_excess_nats)
        for name, row in rows.items()
    }
    texts = {name: rows[name] for name, lost in losses.items() if lost == ()}
    by_forwards = _dominators(_points(texts, "forwards"))
    by_seconds = _dominators(_points(texts, "seconds"))
    bars = [row.quality for row in texts.values() if row.quality is not None] or [held_out]
    cheapest = min((cost for cost, _ in _points(texts, "forwards").values()), default=0.0)
    standings = {}
    for name, row in rows.items():
        lost = losses[name]
        if row.ended_by.get("not_finite"):
            told = f"ended {row.ended_by['not_finite']} texts on numbers that are not finite"
            standings[name] = Standing(word="not_finite", told=told)
        elif lost is None:
            standings[name] = Standing(word="not_measured", told="a figure was not measured")
        elif lost:
            standings[name] = _trade(row, lost, bars=bars, cheapest=cheapest)
        else:
            seconds = by_seconds[name] is None if name in by_seconds else None
            standings[name] = _text(by_forwards[name], is_on_frontier_of_seconds=seconds)
    return standings


def verdict_of_standings(standings: Mapping[str, Standing]) -> tuple[Verdict, str]:
    """Judge samplers together, and say why.

    Returns:
        ``fail`` where numbers stopped being finite, or where no sampler writes text; and the
        reason.
    """
    words = [standing.word for standing in standings.values()]
    broken = [name for name, standing in standings.items() if standing.word == "not_finite"]
    if broken:
        return "fail", f"not finite: {', '.join(broken)}"
    if set(words) <= {"not_measured"}:
        return "not_measured", "no sampler was judged"
    n_texts = words.count("frontier") + words.count("dominated")
    told = f"{n_texts} of {len(words)} samplers write text"
    if not n_texts:
        return "fail", f"{told}: each of the others trades one figure for another"
    best = ", ".join(name for name, x in standings.items() if x.word == "frontier")
    return "pass", f"{told}; on the frontier of nats and forwards: {best}"


def _losses(
    row: SpeedupRow, held_out: SampleQuality, *, min_share: float, max_excess_nats: float
) -> tuple[str, ...] | None:
    """Figures that are too much worse than held-out text's; ``None`` where one is not known."""
    if row.quality is None or row.ended_by.get("not_finite"):
        return None
    ours, usual = row.quality.twin_nats_per_token, held_out.twin_nats_per_token
    poor = lost_diversity(row.quality, held_out, min_share=min_share)
    if poor is None or ours is None or usual is None:
        return None
    return (*((NATS,) if ours > usual + max_excess_nats else ()), *poor)


def _points(
    texts: Mapping[str, SpeedupRow], cost: Literal["forwards", "seconds"]
) -> dict[str, tuple[float, float]]:
    """Cost per token and nats per token of each text that has both."""
    of = forwards_per_token if cost == "forwards" else seconds_per_token
    points = {}
    for name, row in texts.items():
        paid, nats = of(row), row.quality and row.quality.twin_nats_per_token
        if paid is not None and nats is not None:
            points[name] = (paid, nats)
    return points


def _dominators(points: Mapping[str, tuple[float, float]]) -> dict[str, str | None]:
    """For each point the best of those that are no worse in both and better in one."""

    def better(point: tuple[float, float]) -> Iterator[tuple[float, float, str]]:
        for name, (cost, nats) in points.items():
            if cost <= point[0] and nats <= point[1] and (cost, nats) != point:
                yield nats, cost, name

    return {name: min(better(point), default=(0, 0, None))[2] for name, point in points.items()}


def _text(dominated_by: str | None, *, is_on_frontier_of_seconds: bool | None) -> Standing:
    if dominated_by is None:
        return Standing(
            word="frontier",
            told="on the frontier of twin's nats and forwards",
            is_on_frontier_of_seconds=is_on_frontier_of_seconds,
        )
    return Standing(
        word="dominated",
        told=f"dominated by {dominated_by}",
        dominated_by=dominated_by,
        is_on_frontier_of_seconds=is_on_frontier_of_seconds,
    )


def _trade(
    row: SpeedupRow, lost: tuple[str, ...], *, bars: list[SampleQuality], cheapest: float
) -> Standing:
    """Name what was won by what was lost."""
    won = []
    for name in (NATS, *DIVERSITIES):
        sign = -1 if name in (NATS, "repetition_4") else 1  # less of these is better
        if sign * getattr(row.quality, name) > max(sign * getattr(bar, name) for bar in bars):
            won.append(name)
    paid = forwards_per_token(row)
    if paid is not None and paid < cheapest:
        won.append(FORWARDS)
    told = f"trade: wins {', '.join(won) or 'nothing'} by losing {', '.join(lost)}"
    return Standing(word="trade", told=told, won=tuple(won), lost=lost)
