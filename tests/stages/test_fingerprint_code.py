import json
import shutil
from pathlib import Path

import pytest

from canvaslm.code_fingerprint import fingerprint
from canvaslm.params import read_yaml
from fingerprint_code import fingerprint_code

ROOT = Path(__file__).resolve().parents[2]


def test_every_stage_of_the_pipeline_gets_its_fingerprint(tmp_path: Path) -> None:
    fingerprint_code(root=ROOT, out=tmp_path / "code", sources=tmp_path / "sources.json")
    stages = set(read_yaml(ROOT / "dvc.yaml")["stages"])
    assert {file.stem for file in (tmp_path / "code").iterdir()} == stages
    for name in ("fetch_corpus", "report"):
        written = json.loads((tmp_path / "code" / f"{name}.json").read_text())
        assert written == fingerprint(ROOT / "stages" / f"{name}.py", ROOT)
    assert "stages/report.py" in json.loads((tmp_path / "sources.json").read_text())


def test_a_second_run_writes_the_same_bytes_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint_code(root=ROOT, out=tmp_path / "first", sources=tmp_path / "first/sources.json")
    monkeypatch.chdir(ROOT)
    fingerprint_code(root=Path(), out=tmp_path / "second", sources=tmp_path / "second/sources.json")
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def test_a_comment_leaves_all_fingerprints_as_they_were(tmp_path: Path) -> None:
    for name in ("src", "stages"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("constraints.txt", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    fingerprint_code(
        root=tmp_path, out=tmp_path / "before", sources=tmp_path / "before/sources.json"
    )
    for file in (tmp_path / "src").rglob("*.py"):
        file.write_text(f"{file.read_text()}\n# a comment\n")
    fingerprint_code(root=tmp_path, out=tmp_path / "after", sources=tmp_path / "after/sources.json")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()
