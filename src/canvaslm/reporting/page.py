"""What did all the stages find, on one page that needs nothing but itself?

The page shows what the reports hold and invents nothing: a report that is missing, and a figure
that is null, are shown as not measured, and so, with the reason, is one that is damaged or of
another run. It has no date and asks no network for anything.
"""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from canvaslm.params import Params
from canvaslm.reporting.bound_section import (
    BoundCurves,
    read_curves,
    score_header,
    score_rows,
    share_header,
    share_rows,
)
from canvaslm.reporting.collected import Finding, judge, read_whole_metrics
from canvaslm.reporting.look import NOT_MEASURED, printable, render
from canvaslm.reporting.provenance import Record, find_stale, look_up, without
from canvaslm.reporting.samples_section import (
    SamplerMarks,
    sampler_header,
    sampler_marks,
    sampler_rows,
)

T = TypeVar("T")

_TEMPLATE = Path(__file__).with_name("page.html")
_OBJECTIVES = ("diffusion", "autoregressive")
# What a report that is cut off, of an older version, or edited by hand can raise when it is read.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError,
           ValueError, csv.Error)  # fmt: skip
_SPEED_COLUMNS = (
    ("tokens/forward", "tokens_per_forward", ".2f"),
    ("accepted/forward", "accepted_per_forward", ".2f"),
    ("tokens/s", "tokens_per_second", ".1f"),
    ("× the twin", "speedup_over_autoregressive", ".2f"),
    ("nats/token by the twin", "twin_nats_per_token", ".3f"),
    ("unigram entropy, nats", "unigram_entropy_nats", ".3f"),
    ("distinct-1", "distinct_1", ".3f"),
    ("distinct-2", "distinct_2", ".3f"),
    ("repeats itself", "is_repetitive", ""),
    ("reads as noise", "is_noise", ""),
)


class ReportParams(Params):
    """Section ``report``."""

    n_samples: int = Field(ge=0, description="samples shown of each kind")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """Everything that the page shows, but for its drawings.

    Attributes:
        answer: what the comparison says to the question that one came with.
        curves: the columns of ``loss.csv`` for each objective that has one.
        bars: nats per token and standard error for each objective that was scored.
        samples: for each decoder, prompts and what came after them.
        times: what each diffusion time adds to the bound, in nats per token.
        bound: the curves of the bound in full.
        marks: what is drawn of the samplers.
        code: stage, digest and number of files of each code fingerprint.
        pages: for each run that was audited, where the page of its audit lies.
        traces: for each training that was not finite throughout, where its trace lies.
    """

    profile: str
    answer: str
    verdicts: Sequence[Finding]
    tiles: Sequence[tuple[str, str, str]]
    tables: Mapping[str, Table | None]
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    bars: Mapping[str, tuple[float, float | None]]
    samples: Mapping[str, Sequence[tuple[str, str]]]
    times: Sequence[float]
    bound: BoundCurves
    marks: SamplerMarks
    code: Sequence[tuple[str, str, int]]
    pages: Mapping[str, str]
    traces: Mapping[str, str]

    @property
    def headline(self) -> str:
        """The worst of the verdicts: what fails outweighs what was not measured."""
        given = {verdict.verdict for verdict in self.verdicts}
        return next((word for word in ("fail", "not_measured") if word in given), "pass")

    @property
    def summary(self) -> str:
        """How many verdicts there are of each kind."""
        given = [verdict.verdict for verdict in self.verdicts]
        counts = {word: given.count(word) for word in ("fail", "not_measured", "pass")}
        if counts["pass"] == len(given):
            return "every check passes"
        return ", ".join(f"{n} {word.replace('_', ' ')}" for word, n in counts.items() if n)


def read_content(
    reports: Path,
    *,
    profile: str,
    params: ReportParams,
    home: str = ".",
    record: Record | None = None,
) -> PageContent:
    """Read what the page shows from all reports that are there, and of one run.

    Args:
        reports: the folder of reports.
        home: that folder, seen from where the page will lie.
        record: of DVC's last run, if it has ended.
        profile: the profile that the values came from.
        params: how much is shown.
    """
    metrics, damaged = read_whole_metrics(reports)
    stale = find_stale(metrics, record)
    found = judge(metrics, damaged, stale)
    metrics = without(metrics, stale)

    def part(place: str, read: Callable[[], T], nothing: T) -> T:
        """One part of the page, or nothing and a line that says why."""
        try:
            return read()
        except _DAMAGE as error:
            reason = f"cannot be shown: {type(error).__name__}: {error}"
            finding = Finding(place=place, verdict="not_measured", reason=reason, is_given=False)
            found.append(finding)
            return nothing

    n = params.n_samples
    audited = reports / "audit_windows" / "samples.json"
    written = reports / "eval_speedup" / "samples.json"
    tables = {
        "training": part("pretrain", lambda: _training_table(metrics), None),
        "parity": part("eval_loss_parity", lambda: _parity_table(metrics), None),
        "bound": part("eval_bound", lambda: _bound_table(metrics), None),
        "shares": part("eval_bound", lambda: _shares_table(metrics), None),
        "speed": part("eval_speedup", lambda: _speed_table(metrics), None),
        "samplers": part("eval_samples", lambda: _samplers_table(metrics), None),
        "runs": part("audit_run", lambda: _runs_table(metrics), None),
        "audit": part("audit_windows", lambda: _audit_table(metrics), None),
        "docs": part("docs_gate", lambda: _docs_table(metrics), None),
    }
    curves = {
        name: part(f"pretrain.{name}.loss", lambda name=name: _curve(reports, name), {})
        for name in _OBJECTIVES
        if f"pretrain.{name}" not in stale
    }
    by_time = reports / "eval_loss_parity" / "by_time.csv"
    return PageContent(
        profile=profile,
        answer=_answer(metrics),
        tiles=_tiles(metrics),
        tables=tables,
        curves={name: curve for name, curve in curves.items() if curve},
        bars=part("eval_loss_parity.bars", lambda: _bars(metrics), {}),
        times=[]
        if "eval_loss_parity" in stale
        else part("eval_loss_parity.by_time", lambda: _times(by_time), []),
        bound=BoundCurves()
        if "eval_bound" in stale
        else part("eval_bound.curves", lambda: read_curves(reports / "eval_bound"), BoundCurves()),
        marks=part("eval_samples.marks", lambda: _marks(metrics), SamplerMarks()),
        samples=part("audit_windows.samples", lambda: _held_out(audited, n), {})
        | (
            {}
            if "eval_speedup" in stale
            else part("eval_speedup.samples", lambda: _written(written, n), {})
        ),
        code=part("code", lambda: _code(reports / "code"), []),
        pages={
            name: f"{home}/audit_run/{name}/index.html"
            for name in _OBJECTIVES
            if look_up(metrics, f"audit_run.{name}") is not None
        },
        traces={
            name: f"{home}/pretrain/{name}/nonfinite"
            for name in _OBJECTIVES
            if any(look_up(metrics, f"pretrain.{name}.{key}") for key in ("bad_steps", "rollbacks"))
        },
        verdicts=sorted(found, key=lambda finding: finding.place),  # the last: all parts are read
    )


def render_page(content: PageContent, drawings: Mapping[str, str]) -> str:
    """Lay out the page.

    Args:
        content: what it shows.
        drawings: SVG of each drawing by name; one that is missing is shown as not measured.
    """
    return render(_TEMPLATE, page=content, drawings=drawings)


def _shown(value: Any, form: str = "") -> str:
    """A value as text, in a format; None is not measured."""
    if value is None or value == "not_measured":
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:{form or '.4g'}}" if isinstance(value, float) else str(value)


def _tiles(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The few figures that one looks for first: name, value, unit."""
    wanted = (
        ("parameters", "pretrain.diffusion.parameters", "", ""),
        ("trained on", "pretrain.diffusion.tokens", "", "tokens"),
        ("diffusion bound", "eval_loss_parity.diffusion.bound_nats_per_token", ".3f", "nats/token"),
        ("twin", "eval_loss_parity.autoregressive.nats_per_token", ".3f", "nats/token"),
        ("gap", "eval_loss_parity.gap_percent", ".1f", "%"),
    )
    tiles = [(name, _shown(look_up(metrics, key), form), unit) for name, key, form, unit in wanted]
    return [*tiles, ("fastest decoder", _shown(_fastest(metrics), ".2f"), "× the twin")]


def _fastest(metrics: Mapping[str, Any]) -> float | None:
    """The best speed of a decoder with canvases, in multiples of the twin's."""
    rows = look_up(metrics, "eval_speedup.rows")
    speedups = [
        look_up(row, "speedup_over_autoregressive")
        for name, row in (rows.items() if isinstance(rows, Mapping) else ())
        if name not in ("autoregressive", "companion")  # these go token by token
    ]
    return max((x for x in speedups if isinstance(x, float)), default=None)


def _answer(metrics: Mapping[str, Any]) -> str:
    """One sentence: can the denoiser stand in for the twin, by how much not, and at what speed?"""
    gap, limit = (
        look_up(metrics, f"eval_loss_parity.{key}") for key in ("gap_percent", "max_gap_percent")
    )
    if not isinstance(gap, float) or not isinstance(limit, float):
        return "Not answered: no comparison of these two models lies here."
    word = "In likelihood yes" if gap <= limit else "No, not as trained here"
    side = "above" if gap >= 0 else "below"
    sentence = f"{word}: the bound lies {abs(gap):.1f} % {side} the twin; {limit:g} % is allowed"
    fastest = _fastest(metrics)
    if fastest is None:
        return f"{sentence}. Speed was not measured."
    return f"{sentence}. The fastest canvas decoder runs at {fastest:.2f} times the twin's speed."


def _training_table(metrics: Mapping[str, Any]) -> Table | None:
    """Both trainings side by side: how far they came, and what they lost on the way."""
    columns = [x for x in _OBJECTIVES if look_up(metrics, f"pretrain.{x}") is not None]
    if not columns:
        return None
    rows = [
        [
            key.replace("_", " "),
            *(_shown(look_up(metrics, f"pretrain.{x}.{key}")) for x in columns),
        ]
        for key in ("steps", "tokens", "bad_steps", "rollbacks")
    ]
    return Table(header=("", *columns), rows=rows)


def _parity_table(metrics: Mapping[str, Any]) -> Table | None:
    parity = metrics.get("eval_loss_parity")
    if parity is None:
        return None
    rows = []
    for objective, key in (
        ("diffusion", "bound_nats_per_token"),
        ("autoregressive", "nats_per_token"),
    ):
        score = parity.get(objective, {})
        rows.append(
            [
                objective,
                _shown(score.get(key), ".4f"),
                _shown(score.get("standard_error_nats"), ".4f"),
                _shown(score.get("bits_per_byte"), ".4f"),
                _shown(score.get("trained_tokens")),
                _shown(score.get("trained_flops"), ".3g"),
                _shown(score.get("trained_skipped_steps")),
                _shown(score.get("judged_weights")),
                _shown(score.get("estimator")),
            ]
        )
    header = (
        "model",
        "nats/token",
        "± (documents)",
        "bits/byte",
        "tokens",
        "FLOPs",
        "steps skipped",
        "weights",
        "estimator",
    )
    return Table(header=header, rows=rows)


def _bound_table(metrics: Mapping[str, Any]) -> Table | None:
    bound = metrics.get("eval_bound")
    return None if bound is None else Table(header=score_header(), rows=score_rows(bound))


def _shares_table(metrics: Mapping[str, Any]) -> Table | None:
    bound = metrics.get("eval_bound")
    return None if bound is None else Table(header=share_header(), rows=share_rows(bound))


def _speed_table(metrics: Mapping[str, Any]) -> Table | None:
    """Each decoder: its speed, and the quality of what it wrote at that speed."""
    speed = metrics.get("eval_speedup")
    if speed is None:
        return None
    decoders = sorted(speed["rows"], key=lambda name: (name != "autoregressive", name))
    rows = [_speed_row(name, speed["rows"][name]) for name in decoders]
    rows.append(_speed_row("held-out text", speed["held_out"]))
    columns = [name for name, *_ in _SPEED_COLUMNS]
    return Table(header=("decoder", *columns), rows=rows)


def _samplers_table(metrics: Mapping[str, Any]) -> Table | None:
    report = metrics.get("eval_samples")
    return None if report is None else Table(header=sampler_header(), rows=sampler_rows(report))


def _marks(metrics: Mapping[str, Any]) -> SamplerMarks:
    report = metrics.get("eval_samples")
    return SamplerMarks() if report is None else sampler_marks(report)


def _speed_row(name: str, figures: Mapping[str, Any]) -> list[str]:
    """One row; a column that makes no sense for it stays empty."""
    cells = [
        _shown(figures[key], form) if key in figures else "" for _, key, form in _SPEED_COLUMNS
    ]
    return [name.replace("_", " "), *cells]


def _audit_table(metrics: Mapping[str, Any]) -> Table | None:
    audit = metrics.get("audit_windows")
    if audit is None:
        return None
    splits = [name for name in ("train", "val") if name in audit]
    figures = sorted({key for split in splits for key in audit[split]})
    rows = [
        [key.replace("_", " "), *(_shown(audit[split].get(key)) for split in splits)]
        for key in figures
    ]
    for key in ("shared_windows", "shared_ngram_share"):
        rows.append([f"{key.replace('_', ' ')} (train and val)", _shown(audit.get(key)), ""])
    return Table(header=("", *splits), rows=rows)


def _runs_table(metrics: Mapping[str, Any]) -> Table | None:
    """Both audits side by side: how many checks there are, and the first that fails."""
    audits = metrics.get("audit_run")
    if audits is None:
        return None
    columns = [name for name in _OBJECTIVES if name in audits]
    rows = [
        [key.removeprefix("n_").replace("_", " "), *(_shown(audits[x].get(key)) for x in columns)]
        for key in ("n_checks", "n_failed", "n_not_measured")
    ]
    first = [(audits[x].get("first_failure") or "none").replace("_", " ") for x in columns]
    return Table(header=("", *columns), rows=[*rows, ["first failure", *first]])


def _docs_table(metrics: Mapping[str, Any]) -> Table | None:
    docs = metrics.get("docs_gate")
    if docs is None:
        return None
    rows = [[name.replace("_", " "), _shown(n)] for name, n in sorted(docs["n_checked"].items())]
    return Table(header=("checked", "number"), rows=[*rows, ["faults", _shown(docs["n_faults"])]])


def _curve(reports: Path, objective: str) -> dict[str, list[float]]:
    """Columns of a loss log; a row without a loss (nothing trained in it) is left out."""
    file = reports / "pretrain" / objective / "loss.csv"
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["loss_nats"]]
    columns = ("tokens", "flops", "loss_nats")
    return {name: [_number(row[name]) for row in rows] for name in columns} if rows else {}


def _bars(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    bars = {}
    for objective, key in zip(_OBJECTIVES, ("bound_nats_per_token", "nats_per_token"), strict=True):
        score = look_up(metrics, f"eval_loss_parity.{objective}") or {}
        if score.get(key) is not None:
            error = score.get("standard_error_nats")
            bars[objective] = (_number(score[key]), None if error is None else _number(error))
    unigram = look_up(metrics, "eval_loss_parity.unigram_entropy_nats")
    if bars and unigram is not None:
        bars["unigram entropy"] = (_number(unigram), None)
    return bars


def _times(file: Path) -> list[float]:
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [_number(row["bound_nats_per_token"]) for row in csv.DictReader(lines)]


def _held_out(file: Path, n_samples: int) -> dict[str, list[tuple[str, str]]]:
    """Windows of held-out text, which have no prompt."""
    if not file.is_file():
        return {}
    windows = json.loads(file.read_text(encoding="utf-8"))["val"]
    return _first({"held-out text": [("", window["text"]) for window in windows]}, n_samples)


def _written(file: Path, n_samples: int) -> dict[str, list[tuple[str, str]]]:
    """Prompts and what came after them, for each decoder."""
    if not file.is_file():
        return {}
    samples: dict[str, list[tuple[str, str]]] = {}
    texts = json.loads(file.read_text(encoding="utf-8"))["samples"]
    texts = texts if isinstance(texts, list) else []  # not measured
    longest = max((text["new_tokens"] for text in texts), default=0)
    for text in texts:
        if text["new_tokens"] == longest:
            kind = text["decoder"].replace("_", " ")
            samples.setdefault(kind, []).append((text["prompt"], text["text"]))
    return _first(samples, n_samples)


def _first(
    samples: Mapping[str, Sequence[tuple[str, str]]], n_samples: int
) -> dict[str, list[tuple[str, str]]]:
    return {
        kind: [(printable(prompt), printable(text)) for prompt, text in texts[:n_samples]]
        for kind, texts in samples.items()
        if texts[:n_samples]
    }


def _number(value: Any) -> float:
    """A number that can be drawn."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no figure")
    return number


def _code(folder: Path) -> list[tuple[str, str, int]]:
    found = []
    for file in sorted(folder.glob("*.json")):
        code = json.loads(file.read_text(encoding="utf-8"))
        found.append((code["stage"], str(code["digest"]), len(code["files"])))
    return found
