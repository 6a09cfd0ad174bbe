import sys
from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main

_LOCK = typer.Option(help="what DVC recorded of its last run")


def print_verdicts(
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    lock: Annotated[Path, _LOCK] = Path("dvc.lock"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Print the verdict of every report; exit 1 when one of them is fail, or is missing."""
    from rich.console import Console
    from rich.table import Table

    from canvaslm.errors import GateClosedError, InputError
    from canvaslm.reporting.collected import find_foreign, judge, read_whole_metrics
    from canvaslm.reporting.provenance import Record, find_stale

    metrics, damaged = read_whole_metrics(reports)
    if not metrics and not damaged:
        raise InputError(reports, expected="reports", got="none", fix="run `make repro`")
    record = Record.read(lock, params, root=reports.parent)
    table = Table("report", "verdict", "reason", box=None)
    verdicts = judge(metrics, damaged, find_stale(metrics, record))
    for row in verdicts:
        table.add_row(row.place, row.verdict, row.reason)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    given = [row.place for row in verdicts if row.is_given]
    unknown = [place for place in given if record is None or not record.knows(place)]
    if unknown:
        source = f"{lock} does not tell" if record else f"without a whole {lock} nobody can tell"
        typer.echo(f"{source} from which values and files these were made: {', '.join(unknown)}")
    if foreign := find_foreign(reports):
        typer.echo(f"not judged, for no stage of the pipeline writes there: {', '.join(foreign)}")
    failed = [row.place for row in verdicts if row.verdict == "fail"]
    missing = [row.place for row in verdicts if not row.is_given]
    told = [("fail", failed), ("no verdict", missing)]
    if failed or missing:
        raise GateClosedError("; ".join(f"{kind}: {', '.join(x)}" for kind, x in told if x))


if __name__ == "__main__":
    main(print_verdicts)
