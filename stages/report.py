import os
from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main

_LOCK = typer.Option(help="what DVC recorded of its last run; not read under DVC")


def report(
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("reports/index.html"),
    lock: Annotated[Path, _LOCK] = Path("dvc.lock"),
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
    content = read_content(
        reports,
        profile=profile,
        params=section,
        home=os.path.relpath(reports, out.parent),
        # DVC writes its record when a stage has ended, and has just run what lies before this one.
        record=None
        if "DVC_STAGE" in os.environ
        else Record.read(lock, params, root=reports.parent),
    )
    drawings = draw_figures(content.curves, content.bars, content.times)
    write_bytes(out, render_page(content, drawings).encode())


if __name__ == "__main__":
    main(report)
