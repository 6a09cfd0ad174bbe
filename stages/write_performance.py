from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from door import main


def write_performance(
    results: Annotated[Path, typer.Option(help="where the benches write")] = Path("reports/bench"),
    bounds: Annotated[Path, typer.Option(help="what must hold")] = Path("bench/bounds.yaml"),
    root: Annotated[Path, typer.Option(help="the repository whose docs are written")] = Path(),
    partial: Annotated[bool, typer.Option("--partial", help="take what is there for all")] = False,
    only_snapshot: Annotated[Path | None, typer.Option(help="write this file and no page")] = None,
) -> None:
    """Copy what the benches found to docs/measured/, and write the tables and pictures from it."""
    from canvaslm.docs_gate.figures import SNAPSHOT, fill_figures
    from canvaslm.docs_gate.pages import read_page
    from canvaslm.errors import InputError
    from canvaslm.reporting.bench_charts import draw_benches
    from canvaslm.reporting.bench_snapshot import bench_snapshot, write_beside
    from canvaslm.reporting.benches import read_benches
    from canvaslm.reporting.bounds import judge_bounds, read_bounds
    from canvaslm.reporting.files import to_json, write_files

    if not (found := read_benches(results)):
        raise InputError(results, expected="results", got="none", fix="run `make bench`")
    known = read_bounds(bounds, anchors=read_page(root, "docs/performance.md").anchors)
    judged = judge_bounds(known, found)
    given = {ratio for result in found.values() for ratio in result.ratios}
    absent = [bound.id for bound in known if bound.id not in given and not bound.apart]
    if absent and not partial:
        raise InputError(
            results,
            expected=f"a ratio for each of {len(known)} bounds but those that run apart",
            got=f"none for {len(absent)}, among them {absent[0]}",
            fix="run `make bench`, or say --partial to write what is there",
        )
    snapshot = bench_snapshot(found, judged)
    counts = Counter(item.judgement for item in judged).items()
    said = ", ".join(f"{n} {judgement}" for judgement, n in counts)
    if only_snapshot is not None:
        write_beside(results, only_snapshot, snapshot)
        typer.echo(f"{only_snapshot}: {said}")
        return
    page = root / "docs/performance.md"
    text = fill_figures(page.read_text(encoding="utf-8"), snapshot, where=str(page))
    pictures = {f"docs/pictures/{name}.svg": svg for name, svg in draw_benches(snapshot).items()}
    files = {SNAPSHOT: to_json(snapshot), "docs/performance.md": text, **pictures}
    write_files({root / name: content.encode() for name, content in files.items()})
    for picture in (root / "docs/pictures").glob("*.svg"):
        if f"docs/pictures/{picture.name}" not in pictures:
            picture.unlink()  # of a bench that has no figures any more
    typer.echo(f"docs/performance.md, {SNAPSHOT} and {len(pictures)} pictures: {said}")


if __name__ == "__main__":
    main(write_performance)
