"""Do the tables of docs/performance.md come from what the benches wrote, and from nothing else?"""

import json
from pathlib import Path

import pytest

from canvaslm.docs_gate.figures import check_figures
from canvaslm.docs_gate.pages import read_page
from canvaslm.errors import InputError
from canvaslm.reporting.files import write_json
from write_performance import write_performance

PAGE = """# Performance

## Loss
Said before.

<!-- figures: {words} -->
<!-- end of figures -->

Said after.

## Why late
Because.
"""
ROWS: list[dict[str, object]] = [
    {"form": "ours", "D": 256, "median_s": 0.0123456, "flex": False},
    {"form": "dense", "D": 256, "median_s": 0.5, "flex": True},
    {"peer": "liger", "threads": 1, "median_s": None},
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/performance.md").write_text(PAGE.format(words="bounds loss"))
    (tmp_path / "bounds.yaml").write_text(
        "bounds:\n"
        "  - {id: loss/ours, at_most: 1.05, slack: 0.02}\n"
        "  - {id: loss/late, at_most: 1.0, slack: 0.0, held: 2.0, why: why-late}\n"
        "  - {id: gpu/ours, at_least: 0.45, slack: 0.0, apart: needs a GPU}\n"
    )
    write_result(tmp_path)
    return tmp_path


def write_result(place: Path, ours: float = 1.0412345) -> None:
    write_json(
        place / "results/loss.json",
        {
            "bench": "loss",
            "machine": {"processor": "a processor"},
            "versions": {"torch": "2.13.0"},
            "threads": 2,
            "tiny": False,
            "rounds": 7,
            "rows": ROWS,
            "ratios": {"loss/ours": ours, "loss/late": 1.5},
            "not_measured": {"liger": "no GPU"},
            "fallbacks": ["flex, to a mask"],
        },
    )


def written(place: Path, words: str = "bounds loss") -> str:
    page = place / "docs/performance.md"
    page.write_text(PAGE.format(words=words))
    write_performance(results=place / "results", bounds=place / "bounds.yaml", root=place)
    return page.read_text()


def test_results_that_lack_a_bound_are_taken_only_when_told_so(place: Path) -> None:
    with (place / "bounds.yaml").open("a") as file:
        file.write("  - {id: step/ours, at_most: 1.0, slack: 0.0}\n")
    before = (place / "docs/performance.md").read_text()

    def write(*, partial: bool) -> None:
        write_performance(
            results=place / "results", bounds=place / "bounds.yaml", root=place, partial=partial
        )

    with pytest.raises(InputError, match=r"none for 1, among them step/ours.*--partial"):
        write(partial=False)
    assert (place / "docs/performance.md").read_text() == before
    write(partial=True)
    assert "loss/ours" in (place / "docs/performance.md").read_text()


def test_a_snapshot_alone_is_written_where_it_is_asked_for_and_leaves_the_docs(place: Path) -> None:
    written(place)

    def docs() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in (place / "docs").rglob("*") if file.is_file()}

    before = docs()
    write_result(place, ours=1.5)
    write_performance(
        results=place / "results", bounds=place / "bounds.yaml", root=place,
        only_snapshot=place / "mine.json",
    )  # fmt: skip
    (bound,) = [x for x in json.loads((place / "mine.json").read_text())["bounds"]
                if x["id"] == "loss/ours"]  # fmt: skip
    assert bound["ratio"] == 1.5
    assert docs() == before


def test_a_snapshot_is_not_written_among_the_results(place: Path) -> None:
    written(place)
    with pytest.raises(InputError, match="outside of the results"):
        write_performance(
            results=place / "results", bounds=place / "bounds.yaml", root=place,
            only_snapshot=place / "results/mine.json",
        )  # fmt: skip
    assert not (place / "results/mine.json").exists()


def test_a_result_without_rows_and_a_reason_of_two_lines_break_no_table(place: Path) -> None:
    file = place / "results/loss.json"
    found = json.loads(file.read_text()) | {
        "rows": [],
        "not_measured": {"peer": "one\ntwo | three"},
    }
    write_json(file, found)
    assert "Not measured: no result of `loss` was there." in written(place, "rows loss")
    assert "| loss | peer | not measured: one two / three |" in written(place, "gaps")


def faults(place: Path) -> list[str]:
    page = read_page(place, "docs/performance.md")
    return [f"{fault.line}: {fault.message}" for fault in check_figures(page, place)]


def test_bounds_stand_with_aim_ratio_and_judgement(place: Path) -> None:
    text = written(place)
    assert "| loss/ours | ≤ 1.05 ± 2% |  | 1.041 | pass |" in text
    assert "| loss/late | ≤ 1 ± 0% | 2 | 1.5 | [explained](#why-late) |" in text
    assert "gpu/ours" not in text
    assert "Said before." in text
    assert "Said after." in text


def test_rows_stand_with_all_columns_or_with_those_named(place: Path) -> None:
    text = written(place, "rows loss")
    assert "| form | D | flex | median s |" in text
    assert "| ours | 256 | no | 0.01235 |" in text
    assert "| dense | 256 | yes | 0.5 |" in text
    assert "| liger | 1 | not measured |" in text
    text = written(place, "rows loss median_s form")
    assert "| 0.01235 | ours |" in text
    assert "liger" not in text


def test_machine_and_gaps_stand_in_tables(place: Path) -> None:
    assert "| loss | a processor | not said | 2 | 7 | torch 2.13.0 |" in written(place, "machine")
    text = written(place, "gaps")
    assert "| loss | liger | not measured: no GPU |" in text
    assert "| loss |  | fell back: flex, to a mask |" in text
    assert "| gpu | 1 bounds | not measured: needs a GPU |" in text


def test_a_bench_that_did_not_run_is_said_not_to_be_measured(place: Path) -> None:
    assert "no result of `pipeline` was there" in written(place, "rows pipeline")


def test_the_gate_is_content_with_what_was_written_and_with_nothing_else(place: Path) -> None:
    text = written(place)
    assert faults(place) == []
    (place / "docs/performance.md").write_text(text.replace("1.041", "1.040"))
    (fault,) = faults(place)
    assert fault.startswith("6: 'bounds loss' is not what docs/measured/bench.json holds")


def test_a_snapshot_that_changed_makes_the_page_wrong(place: Path) -> None:
    written(place)
    snapshot = place / "docs/measured/bench.json"
    content = json.loads(snapshot.read_text())
    content["bounds"][0]["ratio"] = 1.02
    write_json(snapshot, content)
    assert len(faults(place)) == 1


def test_a_page_with_figures_and_no_snapshot_is_wrong(place: Path) -> None:
    assert faults(place) == ["1: there is no docs/measured/bench.json"]


@pytest.mark.parametrize("words", ["bounds nothing", "rows loss no_column", "pie", "gaps loss"])
def test_a_comment_that_asks_for_what_is_not_there_is_refused(place: Path, words: str) -> None:
    with pytest.raises(InputError, match=r"performance\.md"):
        written(place, words)
    assert not (place / "docs/measured").exists()


def test_a_block_that_is_not_closed_is_refused(place: Path) -> None:
    page = place / "docs/performance.md"
    page.write_text(page.read_text().replace("<!-- end of figures -->\n", ""))
    with pytest.raises(InputError, match="closed"):
        write_performance(results=place / "results", bounds=place / "bounds.yaml", root=place)


def test_no_results_give_no_figures(place: Path) -> None:
    (place / "results/loss.json").unlink()
    with pytest.raises(InputError, match="make bench"):
        written(place)


def test_each_bench_with_figures_gets_its_picture(place: Path) -> None:
    assert "](pictures/loss.svg)" in written(place)
    assert (place / "docs/pictures/loss.svg").read_text().startswith("<svg")
    assert "pictures" not in written(place, "bounds gpu")
    assert not (place / "docs/pictures/gpu.svg").exists()


def test_a_bench_without_figures_loses_the_picture_that_it_had(place: Path) -> None:
    stale = place / "docs/pictures/gpu.svg"
    stale.parent.mkdir()
    stale.write_text("<svg/>")
    written(place)
    assert [file.name for file in stale.parent.iterdir()] == ["loss.svg"]
