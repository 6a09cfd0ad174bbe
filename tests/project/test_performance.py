"""Are the figures of docs/performance.md those of the bounds and benches that stand here?"""

import json
from pathlib import Path
from typing import Any

import pytest

from canvaslm.docs_gate.figures import SNAPSHOT
from canvaslm.docs_gate.pages import read_page
from canvaslm.reporting.bench_charts import draw_benches
from canvaslm.reporting.benches import BenchResult
from canvaslm.reporting.bounds import read_bounds

ROOT = Path(__file__).resolve().parents[2]
PAGE = read_page(ROOT, "docs/performance.md")
BOUNDS = {
    bound.id: bound for bound in read_bounds(ROOT / "bench/bounds.yaml", anchors=PAGE.anchors)
}


@pytest.fixture(scope="module")
def snapshot() -> dict[str, Any]:
    return json.loads((ROOT / SNAPSHOT).read_text())


def test_the_snapshot_was_judged_by_the_bounds_that_stand_here(snapshot: dict[str, Any]) -> None:
    kept = {x["id"]: (x["aim"], x["slack"], x["held"], x["why"]) for x in snapshot["bounds"]}
    assert kept == {x.id: (x.aim, x.slack, x.held, x.why) for x in BOUNDS.values()}


def test_no_bound_failed_when_the_snapshot_was_taken(snapshot: dict[str, Any]) -> None:
    assert [x["id"] for x in snapshot["bounds"] if x["judgement"] == "fail"] == []


def test_the_snapshot_holds_results_at_full_size(snapshot: dict[str, Any]) -> None:
    results = [BenchResult.model_validate(result) for result in snapshot["benches"].values()]
    assert results
    assert [result.bench for result in results if result.tiny] == []


def test_every_bench_with_bounds_has_its_tables_and_its_picture_on_the_page(
    snapshot: dict[str, Any],
) -> None:
    text = (ROOT / "docs/performance.md").read_text()
    for name in {bound.partition("/")[0] for bound in BOUNDS}:
        assert f"<!-- figures: bounds {name} -->" in text
    shown = {link.target for link in PAGE.links if link.target.endswith(".svg")}
    assert shown == {f"pictures/{name}.svg" for name in draw_benches(snapshot)}


def test_the_pictures_are_those_of_the_snapshot(snapshot: dict[str, Any]) -> None:
    drawn = {f"{name}.svg": svg for name, svg in draw_benches(snapshot).items()}
    kept = {file.name: file.read_text() for file in (ROOT / "docs/pictures").glob("*.svg")}
    assert kept == drawn
