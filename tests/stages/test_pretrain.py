"""Does the stage train from the command line, survive kill -9, and say what is wrong?"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.params import read_yaml

ROOT = Path(__file__).parents[2]
PRETRAIN = {
    "steps": 4,
    "windows_per_step": 4,
    "micro_batch_windows": 2,
    "warmup_steps": 1,
    "decay_steps": 1,
    "device": "cpu",
    "vocab_chunk": 280,
    "log_every": 2,
    "save_every": 2,
}
OUTS = (
    "checkpoints/OBJECTIVE/model.safetensors",
    "checkpoints/OBJECTIVE/optimizer.safetensors",
    "checkpoints/OBJECTIVE/state.json",
    "reports/pretrain/OBJECTIVE/loss.csv",
    "reports/pretrain/OBJECTIVE/metrics.json",
)


def _lay(place: Path, decodable: dict[str, Path], **changes: Any) -> Path:
    """A working directory with shards where the stage's defaults look for them."""
    place.mkdir()
    (place / "data").mkdir()
    (place / "data" / "shards").symlink_to(decodable["shards"])
    values = read_yaml(decodable["params"])
    values["pretrain"] |= PRETRAIN | changes
    with (place / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    return place


def _start(place: Path, objective: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "stages" / "pretrain.py"),
            f"--objective={objective}",
            *options,
        ],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DVC_ROOT": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_ctrl_c,
    )


def _heed_ctrl_c() -> None:
    """Undo what a job in the background inherits: it ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_a_checkpoint(process: subprocess.Popen[str], place: Path) -> None:
    """Return when the run has written one; a folder that vanishes meanwhile is not looked into."""
    until = time.monotonic() + 100
    while not list((place / ".work/pretrain").glob("*/checkpoints/step_*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "no checkpoint in time"
        time.sleep(0.01)


def _run(place: Path, objective: str, *options: str) -> tuple[int, str, str]:
    process = _start(place, objective, *options)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def _outs(place: Path, objective: str) -> dict[str, bytes]:
    names = [name.replace("OBJECTIVE", objective) for name in OUTS]
    return {name: (place / name).read_bytes() for name in names}


def test_a_stage_writes_its_outs_and_a_rerun_only_copies_them(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    place = _lay(tmp_path / "run", decodable)
    status, out, err = _run(place, "autoregressive")
    assert (status, out) == (0, ""), err
    first = _outs(place, "autoregressive")
    assert (place / "reports/pretrain/autoregressive/timing.csv").is_file()
    status, _, err = _run(place, "autoregressive")
    assert status == 0, err
    assert "only its results are copied out" in err
    assert _outs(place, "autoregressive") == first


def test_a_dry_run_says_what_it_did_and_leaves_nothing(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    place = _lay(tmp_path / "run", decodable)
    status, out, err = _run(place, "diffusion", "--dry-run")
    assert status == 0, err
    assert "2 steps trained, saved and loaded" in out
    assert sorted(path.name for path in place.iterdir()) == ["data", "params.yaml"]


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"micro_batch_windows": 8}, 2, "micro_batch_windows (8) at most windows_per_step (4)"),
        ({"learning_rate": 1e30, "max_consecutive_bad_steps": 2}, 1, "changed nothing"),
    ],
)
def test_what_cannot_go_on_ends_in_one_line(
    decodable: dict[str, Path], tmp_path: Path, changes: dict[str, Any], status: int, told: str
) -> None:
    place = _lay(tmp_path / "run", decodable, steps=9, save_every=9, **changes)
    found, _, err = _run(place, "autoregressive")
    assert found == status, err
    assert told in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert not (place / "checkpoints").exists()
    reports = place / "reports/pretrain/autoregressive"
    assert (reports / "metrics.json").exists() == (reports / "loss.csv").exists() == (status == 1)


def test_an_out_that_holds_something_else_is_refused_before_any_work(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    place = _lay(tmp_path / "run", decodable)
    (place / "checkpoints" / "autoregressive").mkdir(parents=True)
    for out in ("checkpoints", "data/shards", ""):
        status, _, err = _run(place, "diffusion", f"--out={out}")
        assert status == 2
        assert len(err.strip().splitlines()) == 1
        assert "move that away, or name another directory" in err or "remove it" in err
    assert (place / "checkpoints" / "autoregressive").is_dir()
    assert (place / "data/shards/manifest.json").is_file()
    assert not (place / ".work").exists()


def test_ctrl_c_ends_a_run_in_one_line(decodable: dict[str, Path], tmp_path: Path) -> None:
    place = _lay(tmp_path / "run", decodable, steps=100_000, save_every=2)
    process = _start(place, "diffusion")
    _wait_for_a_checkpoint(process, place)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in err
    assert not (place / "checkpoints").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bytes_of_a_straight_one(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    """kill -9 right after the first checkpoint, wherever the loop then is (BR-41, 47, 75)."""
    plan = {"steps": 120, "save_every": 20}
    straight = _lay(tmp_path / "straight", decodable, **plan)
    assert _run(straight, "diffusion")[0] == 0
    torn = _lay(tmp_path / "torn", decodable, **plan)
    process = _start(torn, "diffusion")
    _wait_for_a_checkpoint(process, torn)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (torn / "checkpoints").exists(), "killed too late to prove anything"
    status, _, err = _run(torn, "diffusion")
    assert status == 0, err
    assert "resumed at step" in err
    assert _outs(torn, "diffusion") == _outs(straight, "diffusion")


@pytest.mark.slow
def test_a_second_trainer_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    """Three real processes; the second names the first by process id and start time."""
    place = _lay(tmp_path / "run", decodable, steps=20_000, save_every=2)
    first = _start(place, "autoregressive")
    third = None
    try:
        _wait_for_a_checkpoint(first, place)
        status, _, err = _run(place, "autoregressive")
        assert status == 2
        told = err.strip().splitlines()[-1]
        assert f"expected to be the only trainer of this run, got process {first.pid} star" in told
        first.kill()
        first.communicate()
        third = _start(place, "autoregressive")
        assert third.stderr is not None
        heard = []
        for line in third.stderr:
            heard.append(line)
            if "resumed at step" in line:
                break
        assert "resumed at step" in heard[-1], heard
    finally:
        for process in filter(None, (first, third)):
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_run_of_other_settings_is_refused_and_forked_on_purpose(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    """One line, exit 2, the table above it; the fork names its parent and has its own folder."""
    place = _lay(tmp_path / "run", decodable)
    assert _run(place, "autoregressive")[0] == 0
    (run,) = (place / ".work/pretrain").iterdir()
    other = _lay(tmp_path / "other", decodable, learning_rate=0.5)
    status, _, err = _run(other, "autoregressive", f"--resume={run}")
    *table, told = err.strip().splitlines()
    assert status == 2
    assert "pretrain.learning_rate: " in told
    assert f"--fork {run}/checkpoints/step_00000004" in told
    assert any(line.split()[:1] == ["pretrain.learning_rate"] for line in table)
    assert not (other / ".work").exists()
    parent = place / "checkpoints" / "autoregressive"
    status, _, err = _run(other, "autoregressive", f"--fork={parent}")
    assert status == 0, err
    metrics = json.loads((other / "reports/pretrain/autoregressive/metrics.json").read_text())
    assert (metrics["parent"]["identity"], metrics["parent"]["step"]) == (run.name, 4)
    moved = _lay(tmp_path / "moved", decodable)
    status, _, err = _run(moved, "autoregressive", f"--resume={run}")
    assert status == 0, err
    assert _outs(moved, "autoregressive") == _outs(place, "autoregressive")
