"""Does every link lead somewhere, and is every measured figure the one in its snapshot?"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from canvaslm.docs_gate.pages import Fault, Page, read_page

_ELSEWHERE = ("http://", "https://", "mailto:")
_NOT_IN_GIT = ("reports/", "data/", "checkpoints/")
_IN_GIT = re.compile(r"reports/(.*/metrics\.json|ablations/.*)")
_BARE_NUMBER = re.compile(r"[^\w]*\d[\d,]*(\.\d+)?([eE][-+]?\d+)?[^\w]*")
_NUMBER = re.compile(r"[-+−]?[\d,]+(\.\d+)?([eE][-+]?\d+)?")


def check_links(page: Page, pages: Mapping[str, Page], root: Path) -> Iterator[Fault]:
    """Find links to files, anchors and snapshot keys that are not there, and wrong figures."""
    for link in page.links:
        if link.target.startswith(_ELSEWHERE):
            continue
        name, _, anchor = link.target.partition("#")
        path = (root / page.file).parent / name if name else root / page.file
        message = _wrong_with(path, anchor, link.text, pages, root)
        if message:
            kind = "figure" if name.endswith(".json") and anchor else "link"
            yield Fault(file=page.file, line=link.line, kind=kind, message=message)


def check_measured_cells(page: Page) -> Iterator[Fault]:
    """Find figures that are called measured and that no link ties to a snapshot or report.

    Called so are a column that is headed "measured", in which any digit is a figure, and a section
    whose heading says it, in whose tables a cell that is nothing but a number is one.
    """
    for cell in page.cells:
        in_column = "measured" in cell.header.lower() and re.search(r"\d", cell.text)
        in_section = "measured" in cell.section.lower() and _BARE_NUMBER.fullmatch(cell.text)
        is_tied = any(".json#" in target for target in cell.targets)
        if (in_column or in_section) and not is_tied:
            yield Fault(
                file=page.file,
                line=cell.line,
                kind="figure",
                message=f"{cell.text!r} is called measured; link it to docs/measured/*.json#key",
            )


def _wrong_with(
    path: Path, anchor: str, text: str, pages: Mapping[str, Page], root: Path
) -> str | None:
    try:
        file = path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return f"{path} lies outside the repository"
    if file.startswith(_NOT_IN_GIT) and not _IN_GIT.fullmatch(file):
        return f"{file} is made by the pipeline and not in git; run `make measured` and link that"
    if not path.exists():
        return f"there is no {file}"
    if not anchor:
        return None
    if path.suffix == ".json":
        return _wrong_figure(path, file, anchor, text)
    if path.suffix == ".md":
        page = pages.get(file) or read_page(root, file)
        return None if anchor in page.anchors else f"{file} has no anchor #{anchor}"
    return f"{file} has no anchors"


def _wrong_figure(path: Path, file: str, key: str, text: str) -> str | None:
    """Compare what a link shows with the value of its key, at the digits shown."""
    try:
        value = _look_up(json.loads(path.read_text(encoding="utf-8")), key.split("."))
    except KeyError:
        return f"{file} has no key {key}"
    except ValueError as error:
        return f"{file} is not JSON: {error}"
    if isinstance(value, (bool, str)) or value is None:
        expected = "not measured" if value is None else str(value)
        return None if text == expected else f"shows {text!r}, {file}#{key} is {expected!r}"
    if not isinstance(value, (int, float)):
        return f"{file}#{key} is not a single value"
    if not _NUMBER.fullmatch(text):
        return f"shows {text!r}, which is not a number, for {file}#{key}"
    return None if _agree(text, value) else f"shows {text}, {file}#{key} is {value}"


def _agree(text: str, value: float) -> bool:
    """Whether the value rounds to the number shown."""
    try:
        shown = Decimal(text.replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return False
    exponent = shown.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(Decimal(repr(value)) - shown) <= Decimal(1).scaleb(exponent) / 2


def _look_up(values: Any, parts: list[str]) -> Any:
    """Follow a dotted key; a key may itself hold dots, and a list is indexed."""
    if not parts:
        return values
    if isinstance(values, list) and parts[0].isdigit() and int(parts[0]) < len(values):
        return _look_up(values[int(parts[0])], parts[1:])
    if isinstance(values, dict):
        for n_joined in range(len(parts), 0, -1):
            key = ".".join(parts[:n_joined])
            if key in values:
                return _look_up(values[key], parts[n_joined:])
    raise KeyError(".".join(parts))
