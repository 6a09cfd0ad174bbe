import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "# Page\n\nTrain:\n\n```bash\npython stages/pretrain.py --objective diffusion {flag}\n```\n"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The sources of this project under one small page of their own."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "stages", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("Makefile", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    params = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(params)
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text("# Head\n")
    return tmp_path


def gate(house: Path) -> tuple[int, str, list[dict[str, object]]]:
    """Run the stage; its status, its last line, and the faults other than symbols to be cited."""
    ran = subprocess.run(
        [sys.executable, "stages/docs_gate.py"],
        cwd=house,
        capture_output=True,
        text=True,
        check=False,
    )
    faults = json.loads((house / "reports" / "docs_gate" / "faults.json").read_text())["faults"]
    return ran.returncode, ran.stderr, [x for x in faults if x["kind"] != "uncited_symbol"]


def test_one_wrong_flag_closes_the_gate_and_is_named_with_file_and_line(house: Path) -> None:
    (house / "docs" / "page.md").write_text(PAGE.format(flag="--dryrun"))
    status, told, faults = gate(house)
    assert status == 1
    assert [(fault["file"], fault["line"]) for fault in faults] == [("docs/page.md", 6)]
    assert "docs/page.md:6: command: stages/pretrain.py has no option --dryrun" in told
    metrics = json.loads((house / "reports" / "docs_gate" / "metrics.json").read_text())
    assert metrics["verdict"] == "fail"
    assert metrics["n_faults_by_kind"]["command"] == 1


def test_the_right_flag_is_no_fault(house: Path) -> None:
    (house / "docs" / "page.md").write_text(PAGE.format(flag="--dry-run"))
    assert gate(house)[2] == []
