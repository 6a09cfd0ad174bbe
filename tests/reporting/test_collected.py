import json
from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting.collected import find_verdicts, read_metrics


def put(folder: Path, **reports: object) -> Path:
    for place, content in reports.items():
        file = folder.joinpath(*place.split("__"), "metrics.json")
        file.parent.mkdir(parents=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_metrics_are_nested_as_their_folders_are(tmp_path: Path) -> None:
    put(tmp_path, audit={"n": 1}, pretrain__diffusion={"n": 2}, pretrain__autoregressive={"n": 3})
    assert read_metrics(tmp_path) == {
        "audit": {"n": 1},
        "pretrain": {"diffusion": {"n": 2}, "autoregressive": {"n": 3}},
    }


def test_no_reports_are_an_empty_result(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("text", ['{"loss": NaN}', '{"loss": -Infinity}', "{", "[1]", ""])
def test_what_is_not_strict_json_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    put(tmp_path, audit=text)
    with pytest.raises(InputError, match=r"audit.metrics\.json"):
        read_metrics(tmp_path)


def test_verdicts_are_found_at_any_depth_with_their_reasons() -> None:
    found = list(
        find_verdicts(
            {
                "b": {"verdict": "fail", "verdict_reason": "too far"},
                "a": {"diffusion": {"verdict": "pass"}, "n": 3},
                "c": {"rows": [1]},
            }
        )
    )
    assert [(row.place, row.verdict, row.reason) for row in found] == [
        ("a.diffusion", "pass", ""),
        ("b", "fail", "too far"),
    ]


def test_a_verdict_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="'ok'"):
        list(find_verdicts({"a": {"verdict": "ok"}}))
