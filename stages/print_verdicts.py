import sys
from pathlib import Path
from typing import Annotated

import typer

from door import main


def print_verdicts(
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
) -> None:
    """Print the verdict of every report; exit 1 when one of them is fail, or is missing."""
    from rich.console import Console
    from rich.table import Table

    from canvaslm.errors import GateClosedError, InputError
    from canvaslm.reporting.collected import judge, read_whole_metrics

    metrics, damaged = read_whole_metrics(reports)
    if not metrics and not damaged:
        raise InputError(reports, expected="reports", got="none", fix="run `make repro`")
    table = Table("report", "verdict", "reason", box=None)
    verdicts = judge(metrics, damaged)
    for row in verdicts:
        table.add_row(row.place, row.verdict, row.reason)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    failed = [row.place for row in verdicts if row.verdict == "fail"]
    missing = [row.place for row in verdicts if not row.is_given]
    told = [("fail", failed), ("no verdict", missing)]
    if failed or missing:
        raise GateClosedError("; ".join(f"{kind}: {', '.join(x)}" for kind, x in told if x))


if __name__ == "__main__":
    main(print_verdicts)
