"""Does a run go on from the last whole checkpoint, whatever has happened to the newest?"""

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from canvaslm import checkpoint as checkpoint_room
from canvaslm.checkpoint import latest_complete
from canvaslm.checkpoint_state import number_of
from canvaslm.training import loop as loop_room
from canvaslm.training.job import Job
from canvaslm.training.plan import Recipe
from runs import StoppedError, finish, folder, job_of, stop_after

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def flip(path: Path) -> None:
    """Change one bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip, ""),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), ""),
    "empty": (lambda path: os.truncate(path, 0), ""),
    "missing": (lambda path: path.unlink(), "expected a checkpoint with FILE, got none"),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are made once, to be copied."""
    return tmp_path_factory.mktemp("template")


@pytest.fixture
def job(tiny_recipe: Callable[..., Recipe], shards: Path) -> Job:
    """Eight steps, saved after every second one."""
    recipe = tiny_recipe("autoregressive", steps=8, save_every=2, keep_last=2, log_every=2)
    return job_of(recipe, shards)


@pytest.fixture
def straight(job: Job, template: Path) -> dict[str, bytes]:
    """What the run writes when nothing happens to it; from the first caller."""
    place = template / "straight"
    if not place.exists():
        finish(job, place)
    return finish(job, place)


@pytest.fixture
def torn(job: Job, template: Path, tmp_path: Path) -> Path:
    """A place with the run stopped after five steps: checkpoints of 2 and 4."""
    if not (template / "torn").exists():
        with pytest.raises(StoppedError):
            finish(job, template / "torn", stop_after(5))
    shutil.copytree(template / "torn", tmp_path / "torn")
    return tmp_path / "torn"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_found_and_the_checkpoint_before_it_used(
    job: Job,
    straight: dict[str, bytes],
    torn: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    file: str,
) -> None:
    """BR-41: to the bytes of a straight run, with a line that says what was passed over and why."""
    caplog.set_level("INFO")
    damage, why = KINDS[kind]
    newest = folder(job, torn) / "checkpoints" / "step_00000004"
    damage(newest / file)
    assert finish(job, torn) == straight
    (told,) = (line for line in caplog.messages if "passed over" in line)
    where = newest if kind == "missing" else newest / file
    assert told.startswith(f"passed over: {where}: expected ")
    assert why.replace("FILE", file) in told
    assert "resumed at step 2 " in caplog.text


def test_a_checkpoint_of_another_run_is_passed_over_with_what_differs(
    job: Job,
    straight: dict[str, bytes],
    torn: Path,
    tmp_path: Path,
    tiny_recipe: Callable[..., Recipe],
    shards: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A whole one, of the same step, that somebody has copied there."""
    caplog.set_level("INFO")
    recipe = tiny_recipe(
        "autoregressive", steps=8, save_every=2, keep_last=2, log_every=2, learning_rate=0.02
    )
    other = job_of(recipe, shards)
    with pytest.raises(StoppedError):
        finish(other, tmp_path / "other", stop_after(5))
    name = "checkpoints/step_00000004"
    shutil.copytree(
        folder(other, tmp_path / "other") / name, folder(job, torn) / name, dirs_exist_ok=True
    )
    assert finish(job, torn) == straight
    assert "pretrain.learning_rate: 0.02 -> 0.01" in caplog.text
    assert "resumed at step 2 " in caplog.text


def test_where_nothing_is_whole_the_run_begins_anew(
    job: Job, straight: dict[str, bytes], torn: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for newest in (folder(job, torn) / "checkpoints").iterdir():
        flip(newest / "model.safetensors")
    assert finish(job, torn) == straight
    assert caplog.text.count("passed over") >= 2


def test_a_kill_at_any_moment_of_a_save_costs_no_more_than_that_save(
    job: Job, straight: dict[str, bytes], torn: Path, tmp_path: Path
) -> None:
    """BR-41: kill -9 at ten moments drawn among all that a save has; the next run needs no hand."""
    n_moments = _train_in_a_child(job, _copy(torn, tmp_path / "whole"), None)
    assert n_moments > 20
    seen = set()
    for moment in random.Random(41).sample(range(1, n_moments + 1), 10):
        place = _copy(torn, tmp_path / str(moment))
        assert _train_in_a_child(job, place, moment) == -signal.SIGKILL, moment
        checkpoints = folder(job, place) / "checkpoints"
        seen.add(frozenset(path.name for path in checkpoints.iterdir()))
        newest = latest_complete(checkpoints, identity=job.identity)
        assert newest is not None
        assert number_of(newest) in (4, 6), "the good one is never touched first"
        assert finish(job, place) == straight, moment
    assert len(seen) > 3, "the moments were all alike"


def _copy(torn: Path, place: Path) -> Path:
    shutil.copytree(torn, place)
    return place


def _train_in_a_child(job: Job, place: Path, moment: int | None) -> int:
    """Train on in a process of its own, which dies at one moment of the save of step 6.

    Returns:
        How many moments there were; or, as a negative number, the signal that it died of.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the threads of the parent are not in here
            moments = _Moments(moment)
            finish(job, place)
            os.write(writer, str(moments.count).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(text)


class _Moments:
    """Counts what this process asks of the file system in one save, and ends it at one of them."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last
        self._is_saving = False
        sys.addaudithook(self._hear)
        self._save, self._save_file, self._fsync = (
            loop_room.save_checkpoint,
            checkpoint_room.save_file,
            os.fsync,
        )
        loop_room.save_checkpoint = self._watch_save
        checkpoint_room.save_file = self._write_in_two_parts
        os.fsync = self._flush

    def _hear(self, event: str, arguments: object) -> None:
        if event.split(".")[0] in ("open", "os", "shutil"):
            self._pass()

    def _pass(self) -> None:
        if self._is_saving:
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)

    def _watch_save(self, *arguments: Any, **options: Any) -> Path:
        self._is_saving = options["progress"].step == 6
        directory = self._save(*arguments, **options)
        self._pass()
        self._is_saving = False
        return directory

    def _write_in_two_parts(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        self._save_file(tensors, path)
        if self._is_saving:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            self._pass()
            path.write_bytes(content)

    def _flush(self, handle: int) -> None:
        self._fsync(handle)
        self._pass()
