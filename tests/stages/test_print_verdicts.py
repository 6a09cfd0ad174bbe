import hashlib
import re
import sys
from pathlib import Path

import pytest

import door
from canvaslm.errors import GateClosedError
from canvaslm.reporting.files import write_json
from print_verdicts import print_verdicts


def run(reports: Path, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["stages/print_verdicts.py", "--reports", str(reports)])
    with pytest.raises(SystemExit) as left:
        door.main(print_verdicts)
    return left.value.code


def whole(folder: Path) -> Path:
    """Passing reports of every stage that owes one."""
    names = ["audit_windows", "docs_gate", "eval_bound", "eval_loss_parity", "eval_samples",
             "eval_speedup"]  # fmt: skip
    for stage in ("audit_run", "pretrain"):
        names += [f"{stage}/{objective}" for objective in ("autoregressive", "diffusion")]
    for name in names:
        write_json(folder / name / "metrics.json", {"verdict": "pass"})
    return folder


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("not_measured", 0), ("fail", 1)])
def test_every_verdict_is_printed_and_only_fail_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    status: int,
) -> None:
    whole(tmp_path)
    write_json(tmp_path / "audit_run" / "diffusion" / "metrics.json", {"verdict": verdict})
    write_json(
        tmp_path / "docs_gate" / "metrics.json", {"verdict": "pass", "verdict_reason": "no faults"}
    )
    assert run(tmp_path, monkeypatch) == status
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["audit_run.diffusion", verdict] in rows
    assert ["docs_gate", "pass", "no", "faults"] in rows
    assert ("audit_run.diffusion" in shown.err) == (status == 1)


def test_no_reports_are_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch) == 2


@pytest.mark.parametrize("content", [None, "{", '{"n": 1}'])
def test_a_verdict_that_is_owed_and_not_given_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
) -> None:
    assert run(whole(tmp_path), monkeypatch) == 0
    report = tmp_path / "pretrain/diffusion/metrics.json"
    report.unlink()
    if content is not None:
        report.write_text(content)
    assert run(tmp_path, monkeypatch) == 1
    shown = capsys.readouterr()
    assert re.search(r"no verdict: (.*, )?pretrain\.diffusion$", shown.err.strip())
    assert any(line.split()[:2] == ["pretrain.diffusion", "not_measured"]
               for line in shown.out.splitlines())  # fmt: skip


def record(folder: Path) -> Path:
    """A checkout of one run: its reports, params.yaml, and what DVC wrote of a stage of it."""
    reports = whole(folder / "reports")
    model = {"trained_model_sha256": "ab"}
    write_json(
        reports / "pretrain/diffusion/metrics.json", {"verdict": "pass", "model_sha256": "ab"}
    )
    write_json(reports / "audit_run/diffusion/metrics.json", {"verdict": "pass"} | model)
    parity = reports / "eval_loss_parity/metrics.json"
    write_json(parity, {"verdict": "pass", "diffusion": model})
    path = "reports/eval_loss_parity/metrics.json"
    out = {"path": path, "md5": hashlib.md5(parity.read_bytes()).hexdigest()}
    stage = {"outs": [out], "params": {"params.yaml": {"eval_loss_parity": {"seed": 1}}}}
    write_json(folder / "dvc.lock", {"stages": {"eval_loss_parity": stage}})
    write_json(folder / "params.yaml", {"eval_loss_parity": {"seed": 1}})
    return folder


def told(checkout: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], str, bool]:
    """Each verdict with its reason, all that is printed, and whether the gate is closed."""
    paths = [checkout / name for name in ("reports", "dvc.lock", "params.yaml")]
    closed = False
    try:
        print_verdicts(*paths)
    except GateClosedError:
        closed = True
    shown = capsys.readouterr().out
    rows = [line.split(maxsplit=1) for line in shown.splitlines()]
    return {row[0]: row[1].strip() for row in rows if len(row) > 1}, shown, closed


def test_verdicts_of_another_model_or_other_values_are_not_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a run that failed, or an edit of params.yaml, no earlier figure passes."""
    checkout = record(tmp_path)
    rows, shown, closed = told(checkout, capsys)
    assert (rows["eval_loss_parity"], closed) == ("pass", False)
    assert "dvc.lock does not tell" in shown
    write_json(checkout / "params.yaml", {"eval_loss_parity": {"seed": 2}})
    rows, _, closed = told(checkout, capsys)
    assert rows["eval_loss_parity"].startswith("not_measured  made with other values")
    assert closed
    failed = {"verdict": "fail", "verdict_reason": "diverged", "model_sha256": None}
    write_json(checkout / "reports/pretrain/diffusion/metrics.json", failed)
    rows, _, closed = told(checkout, capsys)
    assert rows["pretrain.diffusion"].split() == ["fail", "diverged"]
    for place in ("audit_run.diffusion", "eval_loss_parity"):
        assert rows[place].startswith("not_measured  made from another run: pretrain.diffusion")
    assert closed


@pytest.mark.parametrize("left", [None, "", "stages: [1"])
def test_without_a_record_it_is_said_that_nobody_can_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str | None
) -> None:
    """A record that is missing, or that a killed DVC cut, stops no verdict."""
    checkout = record(tmp_path)
    (checkout / "dvc.lock").unlink()
    if left is not None:
        (checkout / "dvc.lock").write_text(left)
    rows, shown, closed = told(checkout, capsys)
    assert (rows["eval_loss_parity"], closed) == ("pass", False)
    assert "dvc.lock nobody can tell" in shown.replace("\n", " ")


def test_a_report_that_no_stage_of_the_pipeline_writes_is_listed_and_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = record(tmp_path)
    write_json(checkout / "reports/div/metrics.json", {"verdict": "fail"})
    rows, shown, closed = told(checkout, capsys)
    assert "div" not in rows
    assert not closed
    assert "not judged, for no stage of the pipeline writes there: div/metrics.json" in shown
