from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main


def take_snapshot(
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    out: Annotated[Path, typer.Option(help="where the docs cite from")] = Path("docs/measured"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Copy the figures of all reports into one file, named by the profile, that the docs cite."""
    from canvaslm.errors import InputError
    from canvaslm.params import read_yaml
    from canvaslm.reporting.collected import read_metrics
    from canvaslm.reporting.files import write_json

    metrics = read_metrics(reports)
    metrics.pop("docs_gate", None)  # it checks the snapshot, and would change with it
    if not metrics:
        raise InputError(reports, expected="reports", got="none", fix="run `make repro`")
    profile = read_yaml(params)["profile"]
    write_json(out / f"{profile}.json", {"profile": profile, **metrics})


if __name__ == "__main__":
    main(take_snapshot)
