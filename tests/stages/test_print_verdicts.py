import sys
from pathlib import Path

import pytest

import door
from canvaslm.reporting.files import write_json
from print_verdicts import print_verdicts


def run(reports: Path, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["stages/print_verdicts.py", "--reports", str(reports)])
    with pytest.raises(SystemExit) as left:
        door.main(print_verdicts)
    return left.value.code


def whole(folder: Path) -> Path:
    """Passing reports of every stage that owes one."""
    names = ["audit_windows", "docs_gate", "eval_loss_parity", "eval_speedup"]
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
    assert "no verdict: pretrain.diffusion" in shown.err
    assert any(line.split()[:2] == ["pretrain.diffusion", "not_measured"]
               for line in shown.out.splitlines())  # fmt: skip
