from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main


def docs_gate(
    root: Annotated[Path, typer.Option(help="the repository")] = Path(),
    out: Annotated[Path, typer.Option(help="where the findings go")] = Path("reports/docs_gate"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Hold the docs against the sources: citations, links, commands, figures."""
    from canvaslm.docs_gate import DocsGateParams
    from canvaslm.docs_gate.gate import check_docs
    from canvaslm.errors import GateClosedError
    from canvaslm.params import load_section
    from canvaslm.reporting.files import write_json

    report = check_docs(load_section(params, "docs_gate", DocsGateParams), root)
    write_json(out / "faults.json", report.listed())
    write_json(out / "metrics.json", report.metrics())
    for fault in report.faults:
        typer.echo(f"{fault.file}:{fault.line}: {fault.kind}: {fault.message}", err=True)
    if report.faults:
        raise GateClosedError(f"{len(report.faults)} faults, listed in {out / 'faults.json'}")


if __name__ == "__main__":
    main(docs_gate)
