"""Does DVC take a killed training up again, and only when nothing has changed?"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.params import read_yaml

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0
DVC = [sys.executable, "-m", "dvc"]
PRETRAIN: dict[str, Any] = {
    "steps": 20,
    "windows_per_step": 4,
    "micro_batch_windows": 2,
    "warmup_steps": 1,
    "decay_steps": 1,
    "device": "cpu",
    "vocab_chunk": 280,
    "log_every": 2,
    "save_every": 5,
}
PIPELINE = {
    "cmd": f"{sys.executable} {ROOT}/stages/pretrain.py --objective autoregressive",
    "deps": ["shards"],
    "params": ["pretrain"],
    "outs": ["checkpoints/autoregressive", "reports/pretrain/autoregressive/loss.csv"],
}
OUTS = ("checkpoints/autoregressive/model.safetensors", *PIPELINE["outs"][1:], "dvc.lock")


def _start(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """A command in a process group of its own, as in a terminal."""
    own = {key: os.environ[key] for key in os.environ if not key.startswith(("DVC_", "GIT_"))}
    return subprocess.Popen(
        words,
        cwd=place,
        env=own | {"OMP_NUM_THREADS": "1", "SHELL": "/bin/sh"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _run(place: Path, *words: str) -> str:
    process = _start(place, *words)
    said = process.communicate(timeout=LIMIT_S)[0].decode()
    assert process.returncode == 0, said
    return said


def _lay(place: Path, decodable: dict[str, Path], **changes: Any) -> Path:
    """A repository of one stage, with the stage's shards where it looks for them."""
    place.mkdir()
    shutil.copytree(decodable["shards"], place / "shards")
    (place / "data").mkdir()
    (place / "data/shards").symlink_to("../shards")
    _run(place, "git", "init", "--quiet")
    _run(place, *DVC, "init", "--quiet")
    with (place / "dvc.yaml").open("w") as file:
        YAML().dump({"stages": {"pretrain": PIPELINE}}, file)
    _set(place, read_yaml(decodable["params"]), **changes)
    return place


def _set(place: Path, values: dict[str, Any], **changes: Any) -> None:
    values["pretrain"] |= PRETRAIN | changes
    with (place / "params.yaml").open("w") as file:
        YAML().dump(values, file)


def _kill_dvc_at_step_10(place: Path) -> None:
    """Kill it after that checkpoint, and return when nobody trains any more."""
    process = _start(place, *DVC, "repro")
    until = time.monotonic() + LIMIT_S
    while not list(place.glob(".work/pretrain/*/checkpoints/step_00000010")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)
    process.kill()
    said = process.communicate(timeout=LIMIT_S)[0]  # ends when the trainer has closed its end too
    assert b"step 20/20" not in said, "killed too late to prove anything"


@pytest.mark.slow
def test_repro_goes_on_to_the_bytes_of_a_straight_run_and_other_settings_start_anew(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    """BR-75. Where DVC alone is killed, its stage ends with it and lets go of the run."""
    straight = _lay(tmp_path / "straight", decodable)
    _run(straight, *DVC, "repro")
    torn = _lay(tmp_path / "torn", decodable)
    _kill_dvc_at_step_10(torn)
    assert "resumed at step 1" in _run(torn, *DVC, "repro")
    for name in OUTS:
        assert (torn / name).read_bytes() == (straight / name).read_bytes(), name
    _set(torn, read_yaml(torn / "params.yaml"), learning_rate=0.001)
    said = _run(torn, *DVC, "repro")
    assert "step 2/20" in said
    assert "resumed" not in said
    assert (torn / OUTS[0]).read_bytes() != (straight / OUTS[0]).read_bytes()
