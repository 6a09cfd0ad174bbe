"""Does `bench/check.py` let a ratio through that it must not?"""

from pathlib import Path

import pytest

import check
from canvaslm.docs_gate.pages import read_page
from canvaslm.errors import InputError
from canvaslm.reporting.bounds import read_bounds
from canvaslm.reporting.files import write_json

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = """bounds:
  - {id: loss/ours, at_most: 1.05, slack: 0.02}
  - {id: loss/late, at_most: 1.0, slack: 0.02, held: 1.5, why: why-late}
  - {id: gpu/ours, at_least: 0.45, slack: 0.0, apart: needs a GPU}
"""
RATIOS: dict[str, float | None] = {"loss/ours": 1.04, "loss/late": 1.4}


class Bench:
    """A folder with bounds, a page and results, and the command that judges them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        (folder / "bounds.yaml").write_text(BOUNDS)
        (folder / "page.md").write_text("# Page\n\n## Why late\n")

    def write(self, ratios: dict[str, float | None], **changes: object) -> None:
        whole: dict[str, object] = {
            "bench": "loss",
            "machine": {"processor": "one"},
            "versions": {},
            "threads": 1,
            "tiny": False,
            "rounds": 1,
            "rows": [],
            "ratios": ratios,
            "not_measured": {},
            "fallbacks": [],
        }
        write_json(self.folder / "results/loss.json", whole | changes)

    def status(self) -> int:
        words = ["check.py", "--results", str(self.folder / "results")]
        words += ["--bounds", str(self.folder / "bounds.yaml")]
        self._monkeypatch.setattr("sys.argv", [*words, "--page", str(self.folder / "page.md")])
        return check.main()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_bounds_that_are_kept_explained_or_apart_exit_0(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(RATIOS)
    assert bench.status() == 0
    assert "1 pass, 1 explained, 0 fail, 1 not_measured" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "ratio"), [("loss/ours", 1.08), ("loss/late", 1.54)])
def test_a_ratio_moved_beyond_its_bound_exits_1(bench: Bench, name: str, ratio: float) -> None:
    bench.write(RATIOS | {name: ratio})
    assert bench.status() == 1


@pytest.mark.parametrize("name", RATIOS)
def test_a_missing_ratio_exits_1(
    bench: Bench, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    bench.write({key: ratio for key, ratio in RATIOS.items() if key != name})
    assert bench.status() == 1
    assert "no result has it; run" in capsys.readouterr().out


def test_a_null_ratio_passes_with_its_reason_and_is_refused_without(bench: Bench) -> None:
    bench.write(RATIOS | {"loss/ours": None}, not_measured={"loss/ours": "no peer"})
    assert bench.status() == 0
    bench.write(RATIOS | {"loss/ours": None})
    assert bench.status() == 2


def test_a_why_without_its_section_exits_2(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(RATIOS)
    (bench.folder / "page.md").write_text("# Page\n\n## Something else\n")
    assert bench.status() == 2
    told = capsys.readouterr().err
    assert "loss/late.why: expected an anchor" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("missing", ["bounds.yaml", "page.md", "results/loss.json"])
def test_a_missing_file_exits_2_in_one_line(
    bench: Bench, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    bench.write(RATIOS)
    (bench.folder / missing).unlink()
    assert bench.status() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_result_of_tiny_sizes_exits_2(bench: Bench) -> None:
    bench.write(RATIOS, tiny=True)
    assert bench.status() == 2


def test_the_bounds_of_the_project_are_bounds_and_their_explanations_are_there() -> None:
    anchors = read_page(ROOT, "docs/performance.md").anchors
    assert read_bounds(ROOT / "bench/bounds.yaml", anchors=anchors)


def test_what_looks_like_markup_is_printed_as_it_is(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(RATIOS | {"loss/ours": None}, not_measured={"ours": "in canvaslm[bench], [/red]"})
    assert bench.status() == 0
    assert "in canvaslm[bench], [/red]" in capsys.readouterr().out


def test_bounds_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="check the path"):
        read_bounds(tmp_path / "bounds.yaml", anchors=frozenset())
