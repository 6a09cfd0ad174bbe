"""Do the tables that come from the benches show what the snapshot of the benches holds?

Such a table stands between two comments, of which the first says what it shows::

    <!-- figures: bounds loss -->       the bounds of one bench, and its picture
    <!-- figures: rows loss D form -->  rows of one result: all columns, or those named
    <!-- figures: machine -->           on what, and with which versions, each bench ran
    <!-- figures: gaps -->              what was not measured or fell back, and why
    <!-- end of figures -->

Everything between the comments is written by ``make performance``.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canvaslm.docs_gate.pages import Fault, Page
from canvaslm.errors import InputError

SNAPSHOT = "docs/measured/bench.json"

_BLOCK = re.compile(
    r"(?P<open>^<!-- figures: (?P<words>[^\n]+?) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<close>^<!-- end of figures -->$)",
    flags=re.MULTILINE | re.DOTALL,
)
_ANY_MARK = re.compile(r"^<!-- (figures:|end of figures)", flags=re.MULTILINE)


def fill_figures(text: str, snapshot: Mapping[str, Any], *, where: str) -> str:
    """Write every block of figures anew.

    Args:
        text: a Markdown page.
        snapshot: what ``docs/measured/bench.json`` holds.
        where: the page's name, for the message.

    Raises:
        InputError: a block asks for what the snapshot has not, or is not closed.
    """
    if len(_ANY_MARK.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise InputError(
            where,
            expected="each `figures` comment closed by `<!-- end of figures -->`",
            got="one that is not",
            fix="close it",
        )

    def filled(block: re.Match[str]) -> str:
        table = _drawn(block["words"].split(), snapshot, where=where)
        return f"{block['open']}\n{table}\n\n{block['close']}"

    return _BLOCK.sub(filled, text)


def check_figures(page: Page, root: Path) -> Iterator[Fault]:
    """Find blocks of figures that are not what the snapshot of the benches would give."""
    text = (root / page.file).read_text(encoding="utf-8")
    if not _ANY_MARK.search(text):
        return
    try:
        snapshot = json.loads((root / SNAPSHOT).read_text(encoding="utf-8"))
        expected = fill_figures(text, snapshot, where=page.file)
    except FileNotFoundError:
        yield Fault(file=page.file, line=1, kind="figure", message=f"there is no {SNAPSHOT}")
        return
    except (ValueError, InputError) as error:
        yield Fault(file=page.file, line=1, kind="figure", message=str(error))
        return
    for have, want in zip(_BLOCK.finditer(text), _BLOCK.finditer(expected), strict=True):
        if have["body"] != want["body"]:
            message = f"{have['words']!r} is not what {SNAPSHOT} holds; run `make performance`"
            line = text.count("\n", 0, have.start()) + 1
            yield Fault(file=page.file, line=line, kind="figure", message=message)


def _drawn(words: Sequence[str], snapshot: Mapping[str, Any], *, where: str) -> str:
    """The Markdown of one block."""
    kind, *rest = words or [""]
    benches, bounds = snapshot["benches"], snapshot["bounds"]
    if kind == "bounds" and len(rest) == 1:
        chosen = [bound for bound in bounds if bound["id"].partition("/")[0] == rest[0]]
        if chosen:
            return _bounds(rest[0], chosen)
    if kind == "rows" and rest:
        if not benches.get(rest[0], {}).get("rows"):
            return f"Not measured: no result of `{rest[0]}` was there."
        return _rows(benches[rest[0]]["rows"], rest[1:], where=f"{where}: {' '.join(words)}")
    if kind == "machine" and not rest:
        return _machine(benches)
    if kind == "gaps" and not rest:
        return _gaps(benches, bounds)
    raise InputError(
        where,
        expected="figures: bounds NAME (of a bench that has some), rows NAME, machine, or gaps",
        got=" ".join(words),
        fix="correct the comment",
    )


def _bounds(name: str, bounds: Sequence[Mapping[str, Any]]) -> str:
    """Aim and ratio of each bound, and what came of it; and its picture, where there is one."""
    rows = []
    for bound in bounds:
        judgement = bound["judgement"].replace("_", " ")
        if bound["judgement"] == "explained":
            judgement = f"[explained](#{bound['why']})"
        held = "" if bound["held"] is None else f"{bound['held']:g}"
        aim = f"{bound['aim']} ± {bound['slack']:.0%}"
        rows.append([bound["id"], aim, held, _shown(bound["ratio"]), judgement])
    table = _table(["ratio", "aim and slack", "held", "found", "judgement"], rows)
    if all(bound["ratio"] is None for bound in bounds):
        return table
    return f"{table}\n\n![{name}: the share of each aim that was reached](pictures/{name}.svg)"


def _rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, where: str) -> str:
    """Rows of one result; rows of equal columns stand in one table."""
    unknown = [name for name in columns if not any(name in row for row in rows)]
    if unknown:
        known = dict.fromkeys(key for row in rows for key in row)
        raise InputError(
            where,
            expected=f"columns among {', '.join(known)}",
            got=unknown[0],
            fix="correct the comment",
        )
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    orders: dict[frozenset[str], tuple[str, ...]] = {}
    for row in rows:
        if columns and not all(name in row for name in columns):
            continue
        order = tuple(columns or sorted(row, key=lambda name: _rank(row[name])))
        names = orders.setdefault(frozenset(order), order)  # the first row of its kind decides
        cells = [_shown(row[name]) for name in names]
        if cells not in tables.setdefault(names, []):
            tables[names].append(cells)
    titles = ([name.replace("_", " ") for name in names] for names in tables)
    pairs = zip(titles, tables.values(), strict=True)
    return "\n\n".join(_table(names, cells) for names, cells in pairs)


def _rank(value: object) -> int:
    """What a row is about comes before what was measured: the order of keys is lost in JSON."""
    return 0 if isinstance(value, str) else 1 if isinstance(value, int) else 2


def _machine(benches: Mapping[str, Mapping[str, Any]]) -> str:
    """Where each bench ran, and with which versions."""
    rows = []
    has_tiles = {0: "no", 1: "yes", None: "not said"}
    for name, bench in benches.items():
        machine = bench["machine"]
        versions = ", ".join(f"{key} {value}" for key, value in sorted(bench["versions"].items()))
        tiles = has_tiles[machine.get("bfloat16_tiles")]
        numbers = [str(bench["threads"]), str(bench["rounds"])]
        rows.append([name, str(machine["processor"]), tiles, *numbers, versions])
    header = ["bench", "processor", "bfloat16 tiles", "threads", "rounds", "versions"]
    return _table(header, rows)


def _gaps(benches: Mapping[str, Mapping[str, Any]], bounds: Sequence[Mapping[str, Any]]) -> str:
    """What was not measured, and what fell back."""
    rows = []
    for name, bench in benches.items():
        rows += [[name, key, f"not measured: {why}"] for key, why in bench["not_measured"].items()]
        rows += [[name, "", f"fell back: {what}"] for what in bench["fallbacks"]]
    absent = [bound for bound in bounds if bound["judgement"] == "not_measured"]
    apart: dict[tuple[str, str], int] = {}
    for bound in absent:
        if not any(bound["id"] in bench["ratios"] for bench in benches.values()):
            key = bound["id"].partition("/")[0], bound["reason"]
            apart[key] = apart.get(key, 0) + 1
    rows += [[name, f"{n} bounds", f"not measured: {why}"] for (name, why), n in apart.items()]
    return _table(["bench", "what", "why"], rows) if rows else "Nothing is missing."


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [
        f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |"
        for row in rows
    ]
    return "\n".join(lines)


def _shown(value: object) -> str:
    """A value as a table shows it: four digits, not measured for none."""
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
