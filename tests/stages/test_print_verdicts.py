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


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("not_measured", 0), ("fail", 1)])
def test_every_verdict_is_printed_and_only_fail_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    status: int,
) -> None:
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
