import json
from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting.collected import find_verdicts, judge, read_metrics, read_whole_metrics


def put(folder: Path, **reports: object) -> Path:
    for place, content in reports.items():
        file = folder.joinpath(*place.split("__"), "metrics.json")
        file.parent.mkdir(parents=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_metrics_are_nested_as_their_folders_are(tmp_path: Path) -> None:
    put(
        tmp_path,
        docs_gate={"n": 1},
        pretrain__diffusion={"n": 2},
        pretrain__autoregressive={"n": 3},
    )
    assert read_metrics(tmp_path) == {
        "docs_gate": {"n": 1},
        "pretrain": {"diffusion": {"n": 2}, "autoregressive": {"n": 3}},
    }


def test_no_reports_are_an_empty_result(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("text", ['{"loss": NaN}', '{"loss": -Infinity}', "{", "[1]", ""])
def test_what_is_not_strict_json_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    put(tmp_path, docs_gate=text)
    with pytest.raises(InputError, match=r"docs_gate.metrics\.json"):
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


WHOLE = {
    "audit_run__autoregressive": {"verdict": "pass"},
    "audit_run__diffusion": {"verdict": "pass"},
    "audit_windows": {"verdict": "pass"},
    "docs_gate": {"verdict": "pass"},
    "eval_bound": {"verdict": "pass"},
    "eval_loss_parity": {"verdict": "pass"},
    "eval_samples": {"verdict": "pass"},
    "eval_speedup": {"verdict": "pass"},
    "pretrain__autoregressive": {"verdict": "pass"},
    "pretrain__diffusion": {"verdict": "pass"},
}


def test_whole_reports_owe_nothing(tmp_path: Path) -> None:
    found = judge(*read_whole_metrics(put(tmp_path, **WHOLE)), {})
    assert [finding.place.replace(".", "__") for finding in found] == sorted(WHOLE)
    assert {(finding.verdict, finding.is_given) for finding in found} == {("pass", True)}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no report"),
        ("{", "expected strict JSON"),
        ({"n": 1}, "no verdict in its report"),
        ({"verdict": "ok"}, "'ok'"),
    ],
)
def test_a_verdict_that_is_owed_and_not_given_is_not_measured(
    tmp_path: Path, name: str, content: object, reason: str
) -> None:
    rest = {other: report for other, report in WHOLE.items() if other != name}
    put(tmp_path, **rest, **({} if content is None else {name: content}))
    found = judge(*read_whole_metrics(tmp_path), {})
    assert [finding.place.replace(".", "__") for finding in found] == sorted(WHOLE)
    (missing,) = (finding for finding in found if not finding.is_given)
    assert (missing.place.replace(".", "__"), missing.verdict) == (name, "not_measured")
    assert reason in missing.reason
