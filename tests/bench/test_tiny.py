"""Does each bench run, and write what a bench writes?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from canvaslm.reporting.benches import read_bench

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("cut_cross_entropy", "liger_kernel", "transformers")
BENCHES = sorted(
    file.stem
    for file in (ROOT / "bench").glob("*.py")
    if re.search(r"^(import|from) harness\b.*$", file.read_text(), re.MULTILINE)
    and re.search(r"^\s*(harness\.)?finish\(", file.read_text(), re.MULTILINE)
)


@pytest.mark.slow
@pytest.mark.timeout(300)  # on two busy cores
@pytest.mark.parametrize("name", BENCHES)
def test_the_tiny_form_of_a_bench_writes_what_a_bench_writes(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.json"
    ran = subprocess.run(
        [sys.executable, f"bench/{name}.py", "--tiny", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    written = read_bench(out)
    assert (written.bench, written.tiny) == (name, True)
    has_no_compiler = list(written.not_measured) == ["compiled"]
    assert written.rows or has_no_compiler, "a bench that measured nothing"
    assert any(ratio is not None for ratio in written.ratios.values()) or written.not_measured
    assert f"{name} (tiny: figures mean nothing)" in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["decode", "loss", "step"])
def test_a_bench_runs_without_its_peers_and_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for peer in PEERS:
        (tmp_path / f"{peer}.py").write_text("raise ImportError('it is not there')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "found.json"
    words = [sys.executable, f"bench/{name}.py", "--tiny", "--out", str(out)]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    written = read_bench(out)
    assert any("it is not there" in why for why in written.not_measured.values())
    assert set(written.versions) == {"torch"}
    assert "it is not there" in ran.stdout
