"""Does a bound tell a ratio that holds from one that does not?"""

from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting.benches import BenchResult
from canvaslm.reporting.bounds import Bound, judge_bounds, read_bounds

ABOVE = Bound(id="a/ours", at_most=1.0, slack=0.1)
HELD = Bound(id="a/ours", at_most=1.0, slack=0.1, held=2.0, why="loss")
BELOW = Bound(id="a/ours", at_least=2.0, slack=0.1)
HELD_BELOW = Bound(id="a/ours", at_least=2.0, slack=0.1, held=1.0, why="loss")
NONE = Bound(id="a/ours", at_most=0.0, slack=0.1)
BOTH = Bound(id="a/ours", at_least=0.9, at_most=1.1, slack=0.0)


TILED = Bound(id="a/ours", at_least=2.0, slack=0.1, held_with_tiles=0.5, why="loss")
TILED_HELD = Bound(id="a/ours", at_most=1.0, slack=0.0, held=2.0, held_with_tiles=4.0, why="loss")


def found(
    ratios: dict[str, float | None], *, tiny: bool = False, tiles: int | None = None, **reasons: str
) -> BenchResult:
    return BenchResult(
        bench="a",
        machine={"processor": "one"} | ({} if tiles is None else {"bfloat16_tiles": tiles}),
        versions={},
        threads=1,
        tiny=tiny,
        rounds=1,
        rows=[],
        ratios=ratios,
        not_measured=reasons,
        fallbacks=[],
    )


@pytest.mark.parametrize(
    ("bound", "ratio", "judgement"),
    [
        (ABOVE, 0.5, "pass"),
        (ABOVE, 1.09, "pass"),
        (ABOVE, 1.11, "fail"),
        (HELD, 1.09, "pass"),
        (HELD, 1.11, "explained"),
        (HELD, 2.19, "explained"),
        (HELD, 2.21, "fail"),
        (BELOW, 5.0, "pass"),
        (BELOW, 1.81, "pass"),
        (BELOW, 1.79, "fail"),
        (HELD_BELOW, 1.79, "explained"),
        (HELD_BELOW, 0.91, "explained"),
        (HELD_BELOW, 0.89, "fail"),
        (NONE, 0.0, "pass"),
        (NONE, 1.0, "fail"),
        (BOTH, 1.0, "pass"),
        (BOTH, 0.89, "fail"),
        (BOTH, 1.11, "fail"),
    ],
)
def test_a_ratio_passes_is_explained_or_fails(bound: Bound, ratio: float, judgement: str) -> None:
    (judged,) = judge_bounds([bound], {"a": found({"a/ours": ratio})})
    assert judged.judgement == judgement


@pytest.mark.parametrize(
    ("bound", "tiles", "ratio", "held", "judgement"),
    [
        (TILED, 1, 1.81, 0.5, "pass"),
        (TILED, 1, 0.46, 0.5, "explained"),
        (TILED, 1, 0.44, 0.5, "fail"),
        (TILED, 0, 1.79, None, "fail"),
        (TILED, None, 1.79, None, "fail"),
        (TILED_HELD, 1, 3.9, 4.0, "explained"),
        (TILED_HELD, 0, 3.9, 2.0, "fail"),
        (HELD, 1, 1.5, 2.0, "explained"),
    ],
)
def test_where_a_cpu_has_tiles_another_figure_may_be_held(
    bound: Bound, tiles: int | None, ratio: float, held: float | None, judgement: str
) -> None:
    (judged,) = judge_bounds([bound], {"a": found({"a/ours": ratio}, tiles=tiles)})
    assert (judged.held, judged.judgement) == (held, judgement)


def test_a_ratio_that_no_bench_gave_fails() -> None:
    (judged,) = judge_bounds([ABOVE], {"a": found({"a/other": 0.5})})
    assert (judged.judgement, judged.reason) == (
        "fail",
        "no result has it; run `python bench/a.py`",
    )


def test_a_ratio_with_a_reason_was_not_measured() -> None:
    (judged,) = judge_bounds([ABOVE], {"a": found({"a/ours": None}, ours="no peer")})
    assert (judged.judgement, judged.reason) == ("not_measured", "no peer")


def test_a_bench_that_runs_apart_may_be_absent_and_is_judged_where_it_is_not() -> None:
    bound = Bound(id="a/ours", at_most=1.0, slack=0.1, apart="takes long")
    (absent,) = judge_bounds([bound], {})
    (missed,) = judge_bounds([bound], {"a": found({"a/ours": 2.0})})
    assert (absent.judgement, absent.reason) == ("not_measured", "takes long")
    assert missed.judgement == "fail"


def test_figures_of_tiny_sizes_are_not_judged() -> None:
    with pytest.raises(InputError, match="tiny"):
        judge_bounds([ABOVE], {"a": found({"a/ours": 0.5}, tiny=True)})


def test_two_files_with_one_ratio_are_refused() -> None:
    with pytest.raises(InputError, match=r"a/ours: .*a\.json and b\.json"):
        judge_bounds([ABOVE], {"a": found({"a/ours": 0.5}), "b": found({"a/ours": 0.6})})


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ("{id: a, slack: 0.1}", "at_most or at_least"),
        ("{id: a, at_least: 2, at_most: 1, slack: 0.1}", "at_least below at_most"),
        ("{id: a, at_most: 1, slack: 0.1, held: 2}", "held and why together"),
        ("{id: a, at_most: 1, slack: 0.1, why: loss}", "held and why together"),
        ("{id: a, at_most: 1, slack: 0.1, held: 0.5, why: loss}", "far side"),
        ("{id: a, at_least: 1, slack: 0.1, held: 1.5, why: loss}", "far side"),
        ("{id: a, at_most: 1, slack: 0.1, held_with_tiles: 2}", "held and why together"),
        ("{id: a, at_least: 1, slack: 0.1, held_with_tiles: 1.5, why: loss}", "far side"),
        ("{id: a, at_least: 1, at_most: 2, slack: 0.1, held: 3, why: loss}", "far side"),
        ("{id: a, at_most: 1, slack: 0.1, held: 2, why: nowhere}", "a.why: .* 'nowhere'"),
        ("{id: a, at_mots: 1, slack: 0.1}", "did you mean 'at_most'"),
        ("{at_most: 1, slack: 0.1}", "entry 1.id"),
        ("{id: a, at_most: 1, slack: 0.1}, {id: a, at_most: 2, slack: 0.1}", "got two"),
        ("3", "entry 1"),
        ("", "a list under `bounds`"),
    ],
)
def test_what_is_no_bound_is_refused_with_its_place(
    tmp_path: Path, entries: str, told: str
) -> None:
    (tmp_path / "bounds.yaml").write_text(f"bounds: [{entries}]\n")
    with pytest.raises(InputError, match=told):
        read_bounds(tmp_path / "bounds.yaml", anchors=frozenset({"loss"}))
