"""Does an export replace a checkpoint whole, and nothing else?"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import canvaslm.checkpoint as room
from canvaslm.checkpoint import (
    export_checkpoint,
    load_model,
    refuse_to_replace,
)
from canvaslm.errors import InputError
from checkpoints import FILES, contents, make_pair, save


def test_an_export_is_the_checkpoint_and_replaces_what_stood_there(tmp_path, pair, saved):
    out = tmp_path / "checkpoints" / "diffusion"
    old, _ = save(tmp_path / "old", make_pair(seed=2))
    export_checkpoint(old, out)
    export_checkpoint(saved, out)
    assert contents(out) == contents(saved)
    assert [path.name for path in out.parent.iterdir()] == ["diffusion"]
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    load_model(out)


def lay_files(*names):
    def lay(out):
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("mine")

    return lay


IN_THE_WAY = {
    "the user's files": lay_files("notes.txt"),
    "a folder of checkpoints": lay_files("diffusion/state.json"),
    "a part of a checkpoint": lay_files("state.json"),
    "a checkpoint and more": lay_files(*FILES, "notes.txt"),
    "folders of a checkpoint's names": lay_files(*(f"{name}/x" for name in FILES)),
    "a file": lambda out: out.write_text("mine"),
    "a link": lambda out: out.symlink_to(out.with_name("elsewhere"), target_is_directory=True),
}


@pytest.mark.parametrize("way", IN_THE_WAY)
def test_an_export_destroys_nothing_but_a_checkpoint(tmp_path, saved, way):
    out = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    IN_THE_WAY[way](out)
    before = sorted(tmp_path.rglob("*"))
    for refused in (refuse_to_replace, lambda out: export_checkpoint(saved, out)):
        with pytest.raises(InputError, match=f"^{out}: expected"):
            refused(out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("out", ["", ".", "..", "/", "a/.."])
def test_an_out_without_a_name_is_refused(out):
    with pytest.raises(InputError, match="expected a name for a directory, got none"):
        refuse_to_replace(Path(out))


def test_an_out_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="expected a directory, got a file; remove it"):
        refuse_to_replace(tmp_path / "file" / "a" / "out")


def test_an_out_that_is_free_or_holds_a_checkpoint_is_accepted(tmp_path, saved):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "absent" / "deep", tmp_path / "empty", saved):
        refuse_to_replace(out)


def test_a_checkpoint_that_is_replaced_under_our_eyes_is_still_one(tmp_path, saved, monkeypatch):
    out, gone = tmp_path / "out", tmp_path / "gone"
    shutil.copytree(saved, out)
    look = os.scandir

    def look_too_late(path):
        if path == out and not gone.exists():
            out.rename(gone)
            (gone / "state.json").unlink()
            shutil.copytree(saved, out)
            return look(gone)
        return look(path)

    monkeypatch.setattr(room.os, "scandir", look_too_late)
    refuse_to_replace(out)
    assert gone.exists(), "nobody looked"


def test_exports_to_one_place_at_once_leave_one_of_them_whole(tmp_path, saved):
    code = """
import sys
from pathlib import Path
from canvaslm.checkpoint import export_checkpoint
for _ in range(20):
    export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    other, _ = save(tmp_path / "other", make_pair(seed=2))
    out = tmp_path / "outs" / "diffusion"
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.Popen([*command, str(place), str(out)], stderr=subprocess.PIPE, text=True)
        for place in (saved, other)
    ]
    for run in runs:
        told = run.communicate(timeout=100)[1]
        assert run.returncode == 0, told
    assert contents(out) in (contents(saved), contents(other))
    assert [path.name for path in out.parent.iterdir()] == ["diffusion"]
