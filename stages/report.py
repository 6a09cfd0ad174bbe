import os
from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main


def report(
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("reports/index.html"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Draw what all reports say on one page that works offline."""
    from canvaslm.params import load_section, read_yaml
    from canvaslm.reporting.charts import draw_figures
    from canvaslm.reporting.files import write_bytes
    from canvaslm.reporting.page import ReportParams, read_content, render_page
    from canvaslm.reporting.provenance import Record

    section = load_section(params, "report", ReportParams)
    profile = read_yaml(params)["profile"]
    home = os.path.relpath(reports, out.parent)
    record = None
    if "DVC_STAGE" not in os.environ:  # DVC has just run what lies before, and records it later
        record = Record.read(reports.parent / "dvc.lock", params, root=reports.parent)
    content = read_content(reports, profile=profile, params=section, home=home, record=record)
    drawings = draw_figures(
        content.curves, content.bars, content.times, content.bound, content.marks
    )
    write_bytes(out, render_page(content, drawings).encode())


if __name__ == "__main__":
    main(report)
