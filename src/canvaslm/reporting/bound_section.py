"""What does the page show of the bound in full: scores, shares of the gap, and three curves?"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canvaslm.reporting.look import NOT_MEASURED

_SCORES = (
    ("nats/token", "bound_nats_per_token"),
    ("± (documents)", "standard_error_nats"),
    ("bits/byte", "bits_per_byte"),
    ("above the twin", "gap_nats"),
    ("± ", "gap_standard_error_nats"),
)
_SHARES = ("gap", "discretisation", "context", "model")
_DRAWN = ("continuous", "off")  # the tightest bound that every network has

Line = tuple[list[float], list[float]]  # places, and nats per token there


@dataclass(frozen=True, kw_only=True)
class BoundCurves:
    """What is drawn of the bound in continuous time, without self-conditioning.

    Attributes:
        times: what each part of time adds to it, in nats per token.
        positions: it, and the twin's loss, by place in the canvas, for each objective.
        canvases: the same by canvas in the window.
    """

    times: Sequence[float] = ()
    positions: Mapping[str, Line] = field(default_factory=dict)
    canvases: Mapping[str, Line] = field(default_factory=dict)


def read_curves(folder: Path) -> BoundCurves:
    """Read the curves of a report; without one there is nothing to draw."""
    if not (folder / "by_time.csv").is_file():
        return BoundCurves()
    return BoundCurves(
        times=[_number(row["bound_nats_per_token"]) for row in _drawn(folder / "by_time.csv")],
        positions=_lines(folder / "by_position.csv", "position"),
        canvases=_lines(folder / "by_canvas.csv", "canvas"),
    )


def score_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row of text for each bound: its sweep and self-conditioning, then its figures."""
    rows = []
    for conditioning, sweeps in sorted(report["diffusion"].items()):
        if isinstance(sweeps, Mapping) and conditioning in ("off", "two_pass"):
            for name, row in sorted(sweeps.items()):
                told = f"{name.replace('_', ' ')}, {conditioning.replace('_', ' ')}"
                rows.append([told, *(_shown(row.get(key)) for _, key in _SCORES)])
    return rows


def score_header() -> tuple[str, ...]:
    """The columns of :func:`score_rows`."""
    return ("bound, self-conditioning", *(name for name, _ in _SCORES))


def share_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row of text for each sweep on a grid: its gap and the shares of it, with errors."""
    return [
        [
            name.replace("_", " "),
            *(
                f"{_shown(shares.get(f'{part}_nats'))} ± "
                f"{_shown(shares.get(f'{part}_standard_error_nats'))}"
                for part in _SHARES
            ),
        ]
        for name, shares in sorted(report["shares"].items())
    ]


def share_header() -> tuple[str, ...]:
    """The columns of :func:`share_rows`."""
    return ("nats/token", *_SHARES)


def _lines(file: Path, place: str) -> dict[str, Line]:
    """Both models over places, which count from 1 on the page."""
    rows = list(_drawn(file))
    places = [_number(row[place]) + 1 for row in rows]
    columns = {"diffusion": "bound", "autoregressive": "autoregressive"}
    return {
        objective: (places, [_number(row[f"{column}_nats_per_token"]) for row in rows])
        for objective, column in columns.items()
        if rows
    }


def _drawn(file: Path) -> Iterator[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["sweep"], row["self_conditioning"]) == _DRAWN:
                yield row


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else NOT_MEASURED


def _number(value: Any) -> float:
    """A number that can be drawn."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no figure")
    return number
