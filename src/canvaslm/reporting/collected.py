"""What do all reports say together: their figures under one roof, and their verdicts?"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvaslm.errors import InputError

_VERDICTS = ("pass", "fail", "not_measured")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one report holds of what it measured."""

    place: str
    verdict: str
    reason: str


def read_metrics(reports: Path) -> dict[str, Any]:
    """Read every ``metrics.json`` below a folder, nested as the folders are.

    Args:
        reports: the folder; ``pretrain/diffusion/metrics.json`` comes out as
            ``["pretrain"]["diffusion"]``. An empty or missing folder gives an empty result.

    Raises:
        InputError: a file is not a JSON object.
    """
    collected: dict[str, Any] = {}
    for file in sorted(reports.rglob("metrics.json")):
        *outer, last = file.relative_to(reports).parent.parts
        into = collected
        for name in outer:
            into = into.setdefault(name, {})
        into[last] = _read_object(file)
    return collected


def find_verdicts(metrics: dict[str, Any], place: str = "") -> Iterator[Verdict]:
    """List every ``verdict`` in what :func:`read_metrics` returned, with its ``reason`` if any.

    Raises:
        InputError: a verdict is none of pass, fail and not_measured.
    """
    if "verdict" in metrics:
        verdict = metrics["verdict"]
        if verdict not in _VERDICTS:
            raise InputError(
                place,
                expected=f"a verdict: {', '.join(_VERDICTS)}",
                got=repr(verdict),
                fix="run that stage again",
            )
        reason = metrics.get("reason") or metrics.get("verdict_reason") or ""
        yield Verdict(place=place, verdict=verdict, reason=str(reason))
    for name, value in sorted(metrics.items()):
        if isinstance(value, dict):
            yield from find_verdicts(value, f"{place}.{name}" if place else name)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise InputError(
            file, expected="strict JSON", got=str(error), fix="run that stage again"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            file, expected="an object", got=type(content).__name__, fix="run that stage again"
        )
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
