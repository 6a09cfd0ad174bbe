import subprocess
import sys
from pathlib import Path

from canvaslm.reporting.files import write_json

ROOT = Path(__file__).resolve().parents[2]


def run(reports: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ["--reports", str(reports), "--out", str(out)]
    return subprocess.run(
        [sys.executable, "stages/report.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_two_runs_in_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    score = {"nats_per_token": 3.25, "bound_nats_per_token": 3.5, "standard_error_nats": 0.5}
    parity = {"autoregressive": score, "diffusion": score, "verdict": "pass"}
    write_json(tmp_path / "reports" / "eval_loss_parity" / "metrics.json", parity)
    for name in parity.keys() - {"verdict"}:
        write_json(tmp_path / "reports" / "pretrain" / name / "metrics.json", {"verdict": "pass"})
    for name in ("first.html", "second.html"):
        ran = run(tmp_path / "reports", tmp_path / name)
        assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "first.html").read_bytes()
    assert page == (tmp_path / "second.html").read_bytes()
    assert b"<svg" in page
    assert b"3.2500" in page


def test_a_report_that_is_no_json_is_shown_as_not_measured(tmp_path: Path) -> None:
    broken = tmp_path / "reports" / "docs_gate" / "metrics.json"
    broken.parent.mkdir(parents=True)
    broken.write_text('{"n_faults": NaN}')
    ran = run(tmp_path / "reports", tmp_path / "index.html")
    assert ran.returncode == 0, ran.stderr
    assert "expected strict JSON, got NaN is not JSON" in (tmp_path / "index.html").read_text()
