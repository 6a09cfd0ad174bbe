from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main


def take_snapshot(
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    out: Annotated[Path, typer.Option(help="where the docs cite from")] = Path("docs/measured"),
    lock: Annotated[Path, typer.Option(help="what DVC recorded of the run")] = Path("dvc.lock"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Copy the figures of all reports into one file, named by the profile, that the docs cite."""
    from canvaslm.errors import InputError
    from canvaslm.params import read_yaml
    from canvaslm.reporting.collected import read_metrics, refuse_other_run
    from canvaslm.reporting.files import write_json

    metrics = read_metrics(reports)
    metrics.pop("docs_gate", None)  # it checks the snapshot, and would change with it
    if not metrics:
        raise InputError(reports, expected="reports", got="none", fix="run `make repro`")
    refuse_other_run(reports, recorded=read_yaml(lock), params=read_yaml(params))
    profile = read_yaml(params)["profile"]
    write_json(out / f"{profile}.json", {"profile": profile, **metrics})


if __name__ == "__main__":
    main(take_snapshot)
