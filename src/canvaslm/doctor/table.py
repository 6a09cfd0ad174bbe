"""How are findings laid out as they come, and what do they come to in the end?"""

import textwrap
from collections.abc import Sequence

from canvaslm.doctor.probe import Finding
from canvaslm.errors import GateClosedError

_WIDTHS = (12, 30, 14)  # verdict, symptom, whose run
_SPACE = 2
_LEAST = 24  # columns that the last cells keep on a narrow screen
_LONGEST = 160  # characters of what was measured, in the last line
_LOOKED_SHARE = 0.35  # of what is left, for what was looked at

HEADING = ("verdict", "symptom", "run", "looked at", "measured")


def lay_out(finding: Finding, *, width: int) -> str:
    """One row of the table, wrapped in its cells.

    Args:
        finding: the row.
        width: columns of the screen.
    """
    then = f": {finding.next_step}" if finding.verdict == "not_measured" else ""
    measured = finding.measured + (then if finding.next_step else "")
    cells = (
        finding.verdict,
        finding.symptom,
        finding.objective,
        finding.looked_at,
        measured,
    )
    return lay_out_cells(cells, width=width)


def lay_out_cells(cells: Sequence[str], *, width: int) -> str:
    """Cells side by side, each wrapped in its own column."""
    left = max(width - sum(_WIDTHS) - _SPACE * len(_WIDTHS) - _SPACE, 2 * _LEAST)
    looked = int(left * _LOOKED_SHARE)
    widths = (*_WIDTHS, looked, left - looked)
    columns = [
        textwrap.wrap(" ".join(cell.split()), size) or [""]
        for cell, size in zip(cells, widths, strict=True)
    ]
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    lines = (
        (" " * _SPACE).join(f"{text:<{size}}" for text, size in zip(line, widths, strict=True))
        for line in zip(*padded, strict=True)
    )
    return "\n".join(line.rstrip() for line in lines)


def conclude(findings: Sequence[Finding]) -> str:
    """What the findings come to, in one line.

    Raises:
        GateClosedError: one failed; the first is named, with what to do and where to read on.
    """
    failed = [finding for finding in findings if finding.verdict == "fail"]
    missing = sum(finding.verdict == "not_measured" for finding in findings)
    if failed:
        first = failed[0]
        whose = f" ({first.objective})" if first.objective else ""
        raise GateClosedError(
            f"doctor: {first.symptom}{whose}: {first.probe}: "
            f"{_short(first.measured)}; {_short(first.next_step)}; read {first.anchor}"
        )
    return f"nothing fails: {len(findings) - missing} pass, {missing} not measured"


def _short(text: str) -> str:
    """The beginning of a text; all of it stands in its row."""
    return textwrap.shorten(text, _LONGEST, placeholder=" ..")
