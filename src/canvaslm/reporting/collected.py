"""What do all reports say together: their figures under one roof, and their verdicts?"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from canvaslm.errors import InputError
from canvaslm.reporting.provenance import look_up
from canvaslm.reporting.verdict import Verdict

_VERDICTS = get_args(Verdict)
_JUDGED = (  # the reports that owe a verdict
    "audit_run.autoregressive",
    "audit_run.diffusion",
    "audit_windows",
    "docs_gate",
    "eval_bound",
    "eval_loss_parity",
    "eval_samples",
    "eval_speedup",
    "pretrain.autoregressive",
    "pretrain.diffusion",
)
_ABLATIONS = "ablations/"
_UNJUDGED = ("collect_documents",)  # the pipeline's other reports


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one report holds of what it measured.

    Attributes:
        place: the report, dotted as its folders are nested.
        is_given: whether the report says so itself; without one, nothing was measured.
    """

    place: str
    verdict: Verdict
    reason: str
    is_given: bool = True


def read_metrics(reports: Path) -> dict[str, Any]:
    """Read ``metrics.json`` of every stage of the pipeline, nested as the folders are.

    What else lies there, as the report of a run that a user started elsewhere, is none of them
    (:func:`find_foreign`).

    Args:
        reports: the folder; ``pretrain/diffusion/metrics.json`` comes out as
            ``["pretrain"]["diffusion"]``. An empty or missing folder gives an empty result.

    Raises:
        InputError: a file is not a JSON object.
    """
    collected, damaged = read_whole_metrics(reports)
    for error in damaged.values():
        raise error
    return collected


def read_whole_metrics(reports: Path) -> tuple[dict[str, Any], dict[str, InputError]]:
    """Read every ``metrics.json`` that is whole, as :func:`read_metrics` does.

    Returns:
        The figures, and for each report that is not strict JSON, by its place, what is wrong.
    """
    collected: dict[str, Any] = {}
    damaged: dict[str, InputError] = {}
    for place in sorted((*_JUDGED, *_UNJUDGED)):
        *outer, last = place.split(".")
        file = reports.joinpath(*outer, last, "metrics.json")
        if not os.path.lexists(file):
            continue
        try:
            content = _read_object(file)
        except InputError as error:
            damaged[place] = error
            continue
        into = collected
        for name in outer:
            into = into.setdefault(name, {})
        into[last] = content
    return collected, damaged


def find_foreign(reports: Path) -> list[str]:
    """Every other ``metrics.json`` below a folder, by its path there: nobody judges it.

    Those of ablations are committed results of their own, and no run that was sent there.
    """
    own = {f"{place.replace('.', '/')}/metrics.json" for place in (*_JUDGED, *_UNJUDGED)}
    found = {file.relative_to(reports).as_posix() for file in reports.rglob("metrics.json")}
    return sorted(name for name in found - own if not name.startswith(_ABLATIONS))


def judge(
    metrics: dict[str, Any], damaged: Mapping[str, InputError], stale: Mapping[str, str]
) -> list[Finding]:
    """Give every verdict, and a ``not_measured`` for each report that owes one and has none.

    Args:
        metrics: the figures of :func:`read_whole_metrics`.
        damaged: its reports that are not strict JSON.
        stale: why a report is of another run, for each that is; its own verdict is not given.
    """
    found = [_not_given(place, reason) for place, reason in stale.items()]
    for place, report in _reports_in(metrics):
        if place in stale:
            continue
        try:
            found += find_verdicts(report, place)
        except InputError as error:
            found.append(_not_given(place, str(error)))
    found += [_not_given(place, str(error)) for place, error in damaged.items()]
    have = {finding.place for finding in found}
    for place in _JUDGED:
        if not any(f"{name}.".startswith(f"{place}.") for name in have):
            reason = "no report" if look_up(metrics, place) is None else "no verdict in its report"
            found.append(_not_given(place, reason))
    return sorted(found, key=lambda finding: finding.place)


def find_verdicts(metrics: dict[str, Any], place: str = "") -> Iterator[Finding]:
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
        yield Finding(place=place, verdict=verdict, reason=str(reason))
    for name, value in sorted(metrics.items()):
        if isinstance(value, dict):
            yield from find_verdicts(value, f"{place}.{name}" if place else name)


def refuse_other_run(reports: Path, *, recorded: dict[str, Any], params: dict[str, Any]) -> None:
    """Refuse reports that are not those of these params, by DVC's record of its last run.

    Args:
        reports: the folder of reports, as it is named in ``dvc.yaml``.
        recorded: the content of ``dvc.lock``.
        params: the content of the params file.

    Raises:
        InputError: a stage ran with other values, or a report is not the one that it wrote.
    """
    for name, stage in recorded.get("stages", {}).items():
        for section, values in stage.get("params", {}).get("params.yaml", {}).items():
            if params.get(section) != values:
                raise InputError(
                    f"dvc.lock:{name}",
                    expected=f"a run with the values of params.yaml:{section}",
                    got="one with others",
                    fix="run `make repro`",
                )
        for out in stage.get("outs", []):
            file = reports.parent / out["path"]
            if out["path"].endswith("/metrics.json") and file.is_file():
                content = hashlib.md5(file.read_bytes(), usedforsecurity=False)
                if content.hexdigest() != out.get("md5"):
                    raise InputError(
                        file,
                        expected=f"the report that {name} wrote when DVC last ran it",
                        got="another",
                        fix="run `make repro`",
                    )


def _reports_in(metrics: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each report on its own, so that a fault in one hides no other; unjudged ones last."""
    rest = dict(metrics)
    for place in _JUDGED:
        outer, _, inner = place.partition(".")
        report = look_up(metrics, place)
        if isinstance(report, dict):
            yield place, report
            if inner:
                rest[outer] = {key: rest[outer][key] for key in rest[outer] if key != inner}
            else:
                del rest[outer]
    for place, report in rest.items():
        if isinstance(report, dict):
            yield place, report


def _not_given(place: str, reason: str) -> Finding:
    return Finding(place=place, verdict="not_measured", reason=reason, is_given=False)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
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
