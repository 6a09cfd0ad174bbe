"""Does a run that finds no room keep what it has, say how much is missing, and go on later?"""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canvaslm import checkpoint as checkpoint_room
from canvaslm.checkpoint import latest_complete
from canvaslm.errors import InputError
from canvaslm.reporting import disk
from canvaslm.reporting.progress import untracked
from canvaslm.training.run import pretrain
from runs import OUTS, finish, folder, job_of

KIB = 1024
TOLD = re.compile(
    r"checkpoints: expected (\d+) bytes free for the checkpoint of step (\d+), got (\d+) bytes "
    r"free, (\d+) bytes missing"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own whose size can be changed; only root may make one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={200 * KIB}", "canvaslm-test", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no `mount` here; a writer that finds no room stands for the disk below")
    if made.returncode:
        pytest.skip(f"{made.stderr.strip()}; a writer that finds no room stands for it below")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def resize(place: Path, size: int) -> None:
    options = f"remount,size={size}"
    subprocess.run(["mount", "-o", options, str(place)], check=True)


@pytest.fixture
def job(tiny_recipe: Callable[..., object], shards: Path):
    """Eight steps, saved after every second one."""
    recipe = tiny_recipe("autoregressive", steps=8, save_every=2, keep_last=1, log_every=2)
    return job_of(recipe, shards)


def train(job, work: Path, place: Path) -> dict[str, bytes]:
    """As :func:`finish`, with the run's folder on a disk of its own."""
    pretrain(job, work=work, out=place / "out", reports=place / "reports", track=untracked)
    return {name: (place / name).read_bytes() for name in OUTS}


def size_of_a_checkpoint(place: Path) -> int:
    return sum(path.stat().st_size for path in (place / "out").iterdir())


def test_a_run_on_a_full_disk_goes_on_once_there_is_room(job, small_disk, tmp_path):
    """There is room for one checkpoint and a half; the second finds none (a real tmpfs)."""
    straight = finish(job, tmp_path / "straight")
    one = size_of_a_checkpoint(tmp_path / "straight")
    resize(small_disk, one * 3 // 2 + 16 * KIB)
    for _ in range(2):  # and a rerun finds what the first left
        with pytest.raises(InputError) as refused:
            train(job, small_disk, tmp_path)
        told = TOLD.search(str(refused.value))
        assert told, refused.value
        needed, step, free, missing = map(int, told.groups())
        assert (step, missing) == (4, needed - free)
        assert one <= needed <= one + 32 * KIB
        checkpoints = small_disk / folder(job, tmp_path).name / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["step_00000002"]
        assert latest_complete(checkpoints, identity=job.identity) is not None
    resize(small_disk, 4 * one)
    assert train(job, small_disk, tmp_path) == straight


@pytest.mark.parametrize("ahead", ["nothing", "half"])
def test_a_disk_that_runs_full_meanwhile_keeps_the_last_checkpoint(
    job, small_disk, tmp_path, monkeypatch, ahead
):
    """The system itself says so, from inside the writers: at once, and in the middle of a file."""
    straight = finish(job, tmp_path / "straight")
    one = size_of_a_checkpoint(tmp_path / "straight")
    resize(small_disk, one * 3 // 2 + 16 * KIB)
    free_bytes = disk._free_bytes
    asked = []

    def late(place: Path) -> int | None:
        """Say before each write that there is room; the truth only after one has failed."""
        asked.append(place)
        return free_bytes(place) if len(asked) == 3 else 1 << 40

    monkeypatch.setattr(disk, "_free_bytes", late)
    if ahead == "nothing":
        fill_up_before_the_second(monkeypatch, small_disk)
    with pytest.raises(InputError) as refused:
        train(job, small_disk, tmp_path)
    assert TOLD.search(str(refused.value)), refused.value
    assert isinstance(refused.value.__cause__, OSError)
    assert refused.value.__cause__.errno == errno.ENOSPC
    checkpoints = small_disk / folder(job, tmp_path).name / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000002"]
    monkeypatch.undo()
    (small_disk / "ballast").unlink(missing_ok=True)
    resize(small_disk, 4 * one)
    assert train(job, small_disk, tmp_path) == straight


def fill_up_before_the_second(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Take all room that is left when the second checkpoint is begun."""
    save_file, saved = checkpoint_room.save_file, []

    def save(*arguments: Any) -> None:
        saved.append(arguments)
        if len(saved) == 3:
            with (place / "ballast").open("wb") as ballast:
                try:
                    while True:
                        ballast.write(bytes(KIB))
                        ballast.flush()
                except OSError:
                    pass
                os.ftruncate(ballast.fileno(), ballast.tell() // (4 * KIB) * 4 * KIB)
        save_file(*arguments)

    monkeypatch.setattr(checkpoint_room, "save_file", save)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_writer_that_finds_no_room_keeps_the_last_checkpoint(job, tmp_path, monkeypatch, file):
    """The same on any machine: each of the three files is where the disk says no."""
    straight = finish(job, tmp_path / "straight")
    n_writes = []

    def refuse(path: Path) -> None:
        if path.name == file:
            n_writes.append(path)
            if len(n_writes) == 2:
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    save_file, write_text = checkpoint_room.save_file, Path.write_text
    monkeypatch.setattr(
        checkpoint_room, "save_file", lambda tensors, path: (refuse(path), save_file(tensors, path))
    )
    monkeypatch.setattr(
        Path, "write_text", lambda self, *a, **o: (refuse(self), write_text(self, *a, **o))[1]
    )
    with pytest.raises(InputError) as refused:
        finish(job, tmp_path / "torn")
    assert TOLD.search(str(refused.value)), refused.value
    checkpoints = folder(job, tmp_path / "torn") / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000002"]
    assert not (tmp_path / "torn" / "out").exists()
    assert finish(job, tmp_path / "torn") == straight


def test_an_export_without_room_keeps_what_was_exported(job, tmp_path, monkeypatch):
    """The run has ended; its results are copied out by the next command."""
    straight = finish(job, tmp_path)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", refuse)
        with pytest.raises(InputError, match=r"expected \d+ bytes free for a copy of the check"):
            finish(job, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in OUTS} == straight
    assert finish(job, tmp_path) == straight
