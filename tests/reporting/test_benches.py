"""Can a file that a bench wrote be believed?"""

from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting.benches import BenchResult, read_bench, read_benches
from canvaslm.reporting.files import write_json


def result(**changes: object) -> dict[str, object]:
    whole: dict[str, object] = {
        "bench": "loss",
        "machine": {"device": "cpu", "processor": "one", "cores": 2},
        "versions": {"torch": "2.13.0"},
        "threads": 1,
        "tiny": False,
        "rounds": 5,
        "rows": [{"form": "ours", "median_s": 0.5}],
        "ratios": {"loss/ours_over_products": 1.5},
        "not_measured": {},
        "fallbacks": [],
    }
    return whole | changes


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "loss.json", result())
    write_json(tmp_path / "step.json", result(bench="step"))
    found = read_benches(tmp_path)
    assert list(found) == ["loss", "step"]
    assert found["loss"] == BenchResult.model_validate(result())


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "loss.json", result())
    with pytest.raises(InputError, match="the folder of the results"):
        read_benches(tmp_path / "loss.json")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ratios": {"loss/a": None}}, "a reason in not_measured for loss/a"),
        ({"ratios": {"loss/a": "1.5"}}, "a valid number"),
        ({"ratios": {"loss/a": -1.0}}, "greater than or equal to 0"),
        ({"ratios": {"loss/a": None}, "not_measured": {"": "none"}}, "at least 4 characters"),
        ({"ratios": {"loss/a": None}, "not_measured": {"loss": ""}}, "at least 4 characters"),
        ({"machine": {"cores": 2}}, "a processor"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"rows": [{"nested": [1]}]}, "rows"),
        ({"extra": 1}, "a known key"),
    ],
)
def test_what_no_bench_writes_is_refused(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    write_json(tmp_path / "loss.json", result(**changes))
    with pytest.raises(InputError, match=told):
        read_bench(tmp_path / "loss.json")


@pytest.mark.parametrize("text", ["", "[]", '{"ratios": NaN}'])
def test_what_is_no_strict_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "loss.json").write_text(text)
    with pytest.raises(InputError, match=r"loss\.json"):
        read_bench(tmp_path / "loss.json")


def test_a_reason_holds_for_every_ratio_whose_id_contains_its_key() -> None:
    gaps = {"loss/liger/a": None, "loss/liger/b": None}
    found = BenchResult.model_validate(result(ratios=gaps, not_measured={"liger": "no GPU"}))
    assert [found.reason(name) for name in (*gaps, "loss/ours")] == ["no GPU", "no GPU", None]
