"""Does the snapshot of the benches hold what they found, and do the pictures show it?"""

import xml.etree.ElementTree as ElementTree

import pytest

from canvaslm.reporting.bench_charts import draw_benches
from canvaslm.reporting.bench_snapshot import bench_snapshot
from canvaslm.reporting.benches import BenchResult
from canvaslm.reporting.bounds import Bound, judge_bounds

BOUNDS = [
    Bound(id="loss/ours", at_most=1.0, slack=0.0, held=3.0, why="loss"),
    Bound(id="step/ours", at_least=0.5, slack=0.0),
    Bound(id="step/both", at_least=0.5, at_most=2.0, slack=0.0),
    Bound(id="gpu/ours", at_least=0.5, slack=0.0, apart="needs a GPU"),
]


def snapshot(loss: float = 2.0) -> dict[str, object]:
    result = BenchResult(
        bench="all",
        machine={"processor": "one"},
        versions={"torch": "2"},
        threads=1,
        tiny=False,
        rounds=3,
        rows=[{"form": "ours", "median_s": 0.5}],
        ratios={"loss/ours": loss, "step/ours": 0.75, "step/both": 2.5},
        not_measured={},
        fallbacks=[],
    )
    return bench_snapshot({"all": result}, judge_bounds(BOUNDS, {"all": result}))


@pytest.mark.parametrize(
    ("name", "ratio", "reached", "judgement"),
    [
        ("loss/ours", 2.0, 0.5, "explained"),
        ("step/ours", 0.75, 1.5, "pass"),
        ("step/both", 2.5, 0.8, "fail"),
        ("gpu/ours", None, None, "not_measured"),
    ],
)
def test_each_bound_says_how_much_of_its_aim_was_reached(
    name: str, ratio: float | None, reached: float | None, judgement: str
) -> None:
    bounds = snapshot()["bounds"]
    assert isinstance(bounds, list)
    (kept,) = (bound for bound in bounds if bound["id"] == name)
    assert (kept["ratio"], kept["reached"], kept["judgement"]) == (ratio, reached, judgement)


def test_each_bench_with_figures_has_a_picture_of_its_own() -> None:
    pictures = draw_benches(snapshot())
    assert sorted(pictures) == ["loss", "step"]
    for svg in pictures.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "ours" in pictures["loss"]
    assert "both" in pictures["step"]


def test_a_picture_changes_with_its_figures_and_not_without() -> None:
    assert draw_benches(snapshot()) == draw_benches(snapshot())
    before, after = draw_benches(snapshot()), draw_benches(snapshot(loss=2.5))
    assert before["loss"] != after["loss"]
    assert before["step"] == after["step"]
