"""Does the bench of starting see what a stage imports?"""

import subprocess
import sys
from pathlib import Path

import pytest

import startup


@pytest.mark.parametrize(
    ("text", "is_seen"),
    [("import torch", True), ("import outer", True), ("import torchlight", False)],
)
def test_an_import_of_torch_is_seen_at_any_depth_and_no_other(
    tmp_path: Path, text: str, is_seen: bool
) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "torchlight.py").touch()
    (tmp_path / "outer.py").write_text("import torch\n")
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = ran.stderr.splitlines(keepends=True)
    assert any(startup._IMPORTED.match(line) for line in said) == is_seen
