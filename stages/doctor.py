import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from door import ROOT, main, validate_params

COLOURS = {"pass": None, "fail": "red", "not_measured": "yellow"}


def doctor(
    objective: Annotated[
        Literal["both", "diffusion", "autoregressive"], typer.Option(help="whose run")
    ] = "both",
    root: Annotated[Path, typer.Option(help="the repository: code and docs")] = ROOT,
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    tokenizer: Annotated[Path, typer.Option(help="theirs")] = Path("data/tokenizer/tokenizer.json"),
    checkpoints: Annotated[Path, typer.Option(help="final checkpoints")] = Path("checkpoints"),
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    params_file: Annotated[Path, typer.Option("--params", help="knobs")] = Path("params.yaml"),
    show_all: Annotated[bool, typer.Option("--all", help="show what passes too")] = False,
) -> None:
    """Try the first test of each symptom on your own run; exit 1 when one fails, and say which."""
    from rich.console import Console

    from canvaslm.doctor.examination import examine
    from canvaslm.doctor.patient import Places
    from canvaslm.doctor.table import HEADING, conclude, lay_out, lay_out_cells

    places = Places(
        root=root,
        params=params_file,
        shards=shards,
        tokenizer=tokenizer,
        checkpoints=checkpoints,
        reports=reports,
        work=Path(os.environ.get("DVC_ROOT", ROOT)) / ".work" / "pretrain",
        validate=validate_params,
    )
    console, findings = Console(width=None if sys.stdout.isatty() else 160), []
    chosen = ("diffusion", "autoregressive") if objective == "both" else (objective,)
    with console.status("doctor") as status:
        print_row = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
        heading = [lay_out_cells(HEADING, width=console.width)]
        for finding in examine(places, chosen, announce=status.update):
            findings.append(finding)
            if show_all or finding.verdict != "pass":
                if heading:
                    print_row(heading.pop())
                print_row(lay_out(finding, width=console.width), style=COLOURS[finding.verdict])
    typer.echo(conclude(findings))


if __name__ == "__main__":
    main(doctor)
