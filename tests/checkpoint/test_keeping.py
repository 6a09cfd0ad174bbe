"""Which checkpoints stay, and what is never saved?"""

import errno
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import canvaslm.checkpoint as room
from canvaslm.checkpoint import (
    export_checkpoint,
    is_finite,
)
from canvaslm.errors import GateClosedError, InputError
from checkpoints import (
    FILES,
    contents,
    flip_a_byte,
    latest_complete,
    make_pair,
    save,
    tensors_of,
)


def test_checkpoints_are_ordered_by_number(tmp_path, pair):
    """BR-42: 10000 is newer than 9000, also where names are of different lengths."""
    for step in (10_000, 900, 9_000, 100_000_000, 99_999_999, 1_000):
        save(tmp_path, pair, step=step)
    assert latest_complete(tmp_path) == tmp_path / "step_100000000"
    for name in ("step_100000000", "step_99999999"):
        shutil.rmtree(tmp_path / name)
    assert latest_complete(tmp_path) == tmp_path / "step_00010000"


@pytest.mark.parametrize(("keep", "left"), [(2, [9_000, 10_000]), (1, [10_000]), (None, None)])
def test_only_the_last_ones_stay(tmp_path, pair, keep, left):
    """BR-42: 900, 1000, 9000, 10000; null keeps all four."""
    steps = [900, 1_000, 9_000, 10_000]
    for step in steps:
        save(tmp_path, pair, step=step, keep_last=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_{step:08d}" for step in left or steps
    ]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_no_choice(tmp_path, pair, keep):
    """BR-42: the knob refuses it, and so does what it turns; nothing is written or removed."""
    good, _ = save(tmp_path, pair)
    with pytest.raises(AssertionError, match="the newest one always stays"):
        save(tmp_path, pair, step=8, keep_last=keep)
    assert list(tmp_path.iterdir()) == [good]


def test_the_best_ones_stay_besides_the_last(tmp_path, pair):
    """BR-42: never deleted while they are the best, and none of a later step is looked at."""
    save(tmp_path, pair, step=20_000)
    asked = []
    for step, best in ((900, [900]), (1_000, [900]), (9_000, [900, 1_000]), (10_000, [1_000])):

        def best_of(saved, best=best):
            asked.append(list(saved))
            return best

        save(tmp_path, pair, step=step, keep_last=1, best_of=best_of)
    left = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.iterdir())
    assert left == [1_000, 10_000, 20_000]
    assert asked == [[900], [900, 1_000], [900, 1_000, 9_000], [900, 1_000, 9_000, 10_000]]


def test_the_room_that_is_asked_for_is_that_of_the_files(tmp_path, pair, monkeypatch):
    """Never less than they take, and a little more for what is not known before."""
    asked = []

    @contextmanager
    def note(place, sizes, *, what):
        del place, what
        asked.append(sizes)
        yield

    monkeypatch.setattr(room, "room_for", note)
    directory, _ = save(tmp_path, pair)
    export_checkpoint(directory, tmp_path / "out")
    taken = [(directory / name).stat().st_size for name in FILES]
    assert asked[1] == taken
    slack = [due - size for due, size in zip(asked[0], taken, strict=True)]
    assert all(0 <= more <= 128 * len(tensors_of(*pair)) for more in slack)
    assert slack[2] == 0, "the state is known to the byte"


def test_no_checkpoint_yet_is_none(tmp_path):
    assert latest_complete(tmp_path) is None
    assert latest_complete(tmp_path / "absent") is None


@pytest.mark.parametrize("where", ["weight", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_state_that_is_not_finite_is_never_saved(tmp_path, where, value):
    """BR-52: the save is refused and the earlier checkpoint is kept, whichever tensor it is."""
    model, optimizer = make_pair()
    good, _ = save(tmp_path, (model, optimizer), keep_last=1)
    bias = model.get_parameter("blocks.0.attention.key.bias")
    target = bias if where == "weight" else optimizer.state[bias][where]
    with torch.no_grad():
        target.view(-1)[0] = value
    name = "blocks.0.attention.key.bias"
    name = name if where == "weight" else f"{where}/{name}"
    with pytest.raises(GateClosedError, match=rf"pretrain: {re.escape(name)} is not finite"):
        save(tmp_path, (model, optimizer), step=8, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def fill_the_disk(monkeypatch, at):
    """Let the n-th flush to the disk fail, as on a full one."""
    calls = []
    real = os.fsync

    def fsync(handle):
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(room.os, "fsync", fsync)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_checkpoint_alone(tmp_path, pair, monkeypatch, at):
    """BR-41: whichever file the disk has no room for."""
    good, _ = save(tmp_path, pair, keep_last=1)
    before = contents(good)
    fill_the_disk(monkeypatch, at)
    with pytest.raises(InputError, match=r"expected \d+ bytes free for the checkpoint of step 8"):
        save(tmp_path, pair, step=8, keep_last=1)
    assert latest_complete(tmp_path) == good
    assert contents(good) == before
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_what_safetensors_cannot_write_is_an_os_error(tmp_path, pair):
    """A limit on file size stands for a full disk: the system refuses inside safetensors."""
    code = """
import resource, signal, sys
from pathlib import Path
from safetensors.torch import save_file
import torch
from canvaslm.checkpoint import _write_files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    _write_files(Path(sys.argv[1]), {"model.safetensors": {"w": torch.zeros(9999)}}, None, {})
except OSError as error:
    print(error.errno, error.filename)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == [str(errno.EFBIG), str(tmp_path / "model.safetensors")]


def test_a_broken_directory_of_the_same_step_gives_way(tmp_path, pair):
    broken, _ = save(tmp_path, pair)
    flip_a_byte(broken / "model.safetensors")
    save(tmp_path, pair)
    assert latest_complete(tmp_path) == broken


def test_a_broken_checkpoint_of_a_later_step_pushes_no_whole_one_out(tmp_path, pair):
    broken, _ = save(tmp_path, pair, step=12)
    flip_a_byte(broken / "model.safetensors")
    directory, _ = save(tmp_path, pair, step=8, keep_last=1)
    assert latest_complete(tmp_path) == directory


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_value_that_is_not_finite_is_seen_wherever_it_stands(bad, dtype):
    largest = torch.finfo(dtype).max
    for place in (0, 17, 99):
        tensor = torch.full((100,), largest, dtype=dtype)
        tensor[50] = -largest
        assert is_finite(tensor.view(4, 25).T)
        tensor[place] = bad
        assert not is_finite(tensor.view(4, 25).T)
    assert not is_finite(torch.tensor(bad, dtype=dtype))
