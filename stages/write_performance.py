from pathlib import Path
from typing import Annotated

import typer

from door import main


def write_performance(
    results: Annotated[Path, typer.Option(help="where the benches write")] = Path("reports/bench"),
    bounds: Annotated[Path, typer.Option(help="what must hold")] = Path("bench/bounds.yaml"),
    root: Annotated[Path, typer.Option(help="the repository whose docs are written")] = Path(),
) -> None:
    """Copy what the benches found to docs/measured/, and write the tables and pictures from it."""
    from canvaslm.docs_gate.figures import SNAPSHOT, fill_figures
    from canvaslm.docs_gate.pages import read_page
    from canvaslm.errors import InputError
    from canvaslm.reporting.bench_charts import draw_benches
    from canvaslm.reporting.bench_snapshot import bench_snapshot
    from canvaslm.reporting.benches import read_benches
    from canvaslm.reporting.bounds import judge_bounds, read_bounds
    from canvaslm.reporting.files import to_json, write_files

    found = read_benches(results)
    if not found:
        raise InputError(results, expected="results", got="none", fix="run `make bench`")
    page = root / "docs/performance.md"
    known = read_bounds(bounds, anchors=read_page(root, "docs/performance.md").anchors)
    snapshot = bench_snapshot(found, judge_bounds(known, found))
    text = fill_figures(page.read_text(encoding="utf-8"), snapshot, where=str(page))
    pictures = {f"docs/pictures/{name}.svg": svg for name, svg in draw_benches(snapshot).items()}
    files = {SNAPSHOT: to_json(snapshot), "docs/performance.md": text, **pictures}
    write_files({root / name: content.encode() for name, content in files.items()})
    for picture in (root / "docs/pictures").glob("*.svg"):
        if f"docs/pictures/{picture.name}" not in pictures:
            picture.unlink()  # of a bench that has no figures any more


if __name__ == "__main__":
    main(write_performance)
