"""What does the page show of the samplers: how each stands, and quality against what it takes?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from canvaslm.reporting.look import NOT_MEASURED

_COLUMNS = (
    ("forwards/token", "forwards_per_token", ".3f"),
    ("ms/token", "seconds_per_token", ".2f"),
    ("nats/token by the twin", "twin_nats_per_token", ".3f"),
    ("± (samples)", "twin_nats_standard_error", ".3f"),
    ("unigram entropy, nats", "unigram_entropy_nats", ".3f"),
    ("distinct-1", "distinct_1", ".3f"),
    ("distinct-2", "distinct_2", ".3f"),
    ("repeated runs of 4", "repetition_4", ".3f"),
    ("as the reference", "share_equal_to_reference", ".3f"),
    ("standing", "standing_reason", ""),
)
_TEXT = ("frontier", "dominated")


@dataclass(frozen=True, kw_only=True)
class SamplerMark:
    """One sampler as it is drawn.

    Attributes:
        acceptance: gives the colour.
        stopping: gives the shape.
        costs: what a token takes of each kind, as far as that was measured.
        nats: what a token costs the twin.
        is_text: whether it is filled; what trades one figure for another is hollow.
        frontiers: the costs on whose frontier it stands.
    """

    acceptance: str
    stopping: str
    costs: Mapping[str, float]
    nats: float
    is_text: bool
    frontiers: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class SamplerMarks:
    """What is drawn of the samplers.

    Attributes:
        samplers: one mark each.
        levels: nats per token of what they are held against, by its name.
    """

    samplers: Sequence[SamplerMark] = ()
    levels: Mapping[str, float] = field(default_factory=dict)


def sampler_marks(report: Mapping[str, Any]) -> SamplerMarks:
    """Read what is drawn; a sampler whose nats were not measured is left out."""
    marks = []
    for row in (report["rows"][name] for name in sorted(report["rows"])):
        nats = _number(row["twin_nats_per_token"])
        costs = {
            kind: (_number(row[f"{kind}_per_token"]), scale)
            for kind, scale in (("forwards", 1.0), ("seconds", 1000.0))
        }
        if nats is not None:
            mark = SamplerMark(
                acceptance=str(row["acceptance"]),
                stopping=str(row["stopping"]),
                costs={kind: x * scale for kind, (x, scale) in costs.items() if x is not None},
                nats=nats,
                is_text=row["standing"] in _TEXT,
                frontiers=_frontiers(row),
            )
            marks.append(mark)
    levels = {
        name: _number(report[key]["twin_nats_per_token"])
        for name, key in (("the twin's samples", "autoregressive"), ("held-out text", "held_out"))
    }
    return SamplerMarks(
        samplers=marks, levels={name: x for name, x in levels.items() if x is not None}
    )


def sampler_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row of text for held-out text, the twin and each sampler, the frontier first."""
    order = ("frontier", "dominated", "trade", "not_finite", "not_measured")
    rows = report["rows"]
    names = sorted(
        rows,
        key=lambda name: (
            order.index(rows[name]["standing"]),
            _number(rows[name]["forwards_per_token"]) or math.inf,
            name,
        ),
    )
    return [
        _row("held-out text", report["held_out"]),
        _row("the twin's samples", report["autoregressive"]),
        *(_row(name.replace("_", " "), rows[name]) for name in names),
    ]


def sampler_header() -> tuple[str, ...]:
    """The columns of :func:`sampler_rows`."""
    return ("acceptance/stopping/steps", *(name for name, *_ in _COLUMNS))


def _frontiers(row: Mapping[str, Any]) -> frozenset[str]:
    is_on = {
        "forwards": row["standing"] == "frontier",
        "seconds": row["is_on_frontier_of_seconds"] is True,
    }
    return frozenset(kind for kind, flag in is_on.items() if flag)


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    """One row; a column that makes no sense for it stays empty."""
    return [name, *(_cell(figures, key, form) for _, key, form in _COLUMNS)]


def _cell(figures: Mapping[str, Any], key: str, form: str) -> str:
    if key not in figures:
        return ""
    if key == "standing_reason":
        return str(figures[key]).replace("_", " ")
    value = _number(figures[key])
    if value is None:
        return NOT_MEASURED
    return f"{value * 1000 if key == 'seconds_per_token' else value:{form}}"


def _number(value: Any) -> float | None:
    """A figure that can be drawn; None of one that was not measured.

    Raises:
        ValueError: it is neither.
    """
    if value is None or value == "not_measured":
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no figure")
    return number
