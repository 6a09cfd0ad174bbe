"""Are the ratios of the benches within their bounds?

Reads what the benches have written and holds it against ``bench/bounds.yaml``. Exits 0 when every
bound is kept, explained on ``docs/performance.md`` or not measured for a stated reason; 1 when one
fails; 2 when a file is not what it should be.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from canvaslm.docs_gate.pages import read_page
from canvaslm.errors import InputError
from canvaslm.reporting.benches import read_benches
from canvaslm.reporting.bounds import Judged, judge_bounds, read_bounds

_COLOURS = {"pass": "green", "explained": "yellow", "fail": "red", "not_measured": "dim"}


def main() -> int:
    """Judge, print, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("reports/bench"))
    parser.add_argument("--bounds", type=Path, default=Path("bench/bounds.yaml"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    options = parser.parse_args()
    try:
        results = read_benches(options.results)
        if not results:
            raise InputError(
                options.results, expected="results", got="none", fix="run `make bench`"
            )
        anchors = read_page(options.page.parent, options.page.name).anchors
        judged = judge_bounds(read_bounds(options.bounds, anchors=anchors), results)
    except InputError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:
        said = f"{error.filename}: expected a file that can be read, got {error.strerror}"
        print(f"{said}; check the path and who may read it", file=sys.stderr)
        return 2
    _show(judged)
    return 1 if any(item.judgement == "fail" for item in judged) else 0


def _show(judged: list[Judged]) -> None:
    """One line a bound, those that fail last, and how many of each kind there are."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table("bound", "aim", "held", "ratio", "judgement", "why")
    for item in sorted(judged, key=lambda item: (item.judgement == "fail", item.ratio is not None)):
        colour, bound = _COLOURS[item.judgement], item.bound
        table.add_row(
            escape(bound.id),
            f"{bound.aim} ± {bound.slack:.0%}",
            "" if item.held is None else f"{item.held:g}",
            "" if item.ratio is None else f"{item.ratio:.4g}",
            f"[{colour}]{item.judgement}[/]",
            escape(item.reason or (bound.why or "" if item.judgement == "explained" else "")),
        )
    console.print(table)
    counts = Counter(item.judgement for item in judged)
    console.print(", ".join(f"{counts[name]} {name}" for name in _COLOURS), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
