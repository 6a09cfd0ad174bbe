"""Do imports keep to their direction, and do light stages stay light?"""

import subprocess
import sys
from pathlib import Path

import pytest

from canvaslm.code_fingerprint import fingerprint

ROOT = Path(__file__).resolve().parents[2]
STAGES = sorted(file.stem for file in (ROOT / "stages").glob("*.py") if file.stem != "door")
WITHOUT_TORCH = (
    "audit_windows",
    "check_floor",
    "collect_documents",
    "compose_profile",
    "docs_gate",
    "fetch_corpus",
    "fingerprint_code",
    "list_knobs",
    "mend",
    "pack_shards",
    "print_verdicts",
    "report",
    "take_snapshot",
    "train_tokenizer",
    "write_performance",
)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_light_stage_cannot_reach_torch(name: str) -> None:
    reached = fingerprint(ROOT / "stages" / f"{name}.py", ROOT)
    assert "torch" not in reached["packages"]
    assert not {"src/canvaslm/device.py", "src/canvaslm/loss.py"} & set(reached["files"])


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_reaches_no_other_stage(name: str) -> None:
    reached = fingerprint(ROOT / "stages" / f"{name}.py", ROOT)["files"]
    stages = {file for file in reached if file.startswith("stages/")}
    assert stages == {"stages/door.py", f"stages/{name}.py"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_a_door_of_fewer_than_sixty_lines(name: str) -> None:
    assert len((ROOT / "stages" / f"{name}.py").read_text().splitlines()) < 60


def test_checking_the_whole_params_file_does_not_load_torch() -> None:
    check = (
        "import sys; sys.path.insert(0, 'stages'); import door; from pathlib import Path;"
        "door.validate_params(Path('params.yaml'));"
        "heavy = {'torch', 'matplotlib', 'dvc', 'pyarrow'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_library_of_the_checkout_is_the_one_that_a_stage_imports(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "src" / "canvaslm").mkdir(parents=True)
    (tmp_path / "stages" / "door.py").write_text((ROOT / "stages" / "door.py").read_text())
    (tmp_path / "src" / "canvaslm" / "__init__.py").write_text("PLACE = 'this checkout'\n")
    (tmp_path / "stages" / "probe.py").write_text("import door, canvaslm\nprint(canvaslm.PLACE)\n")
    ran = subprocess.run(
        [sys.executable, "stages/probe.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "this checkout\n"
