import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting import files
from canvaslm.reporting.files import (
    refuse_read_only,
    remove_directory,
    to_json,
    whole_directory,
    write_bytes,
    write_csv,
    write_files,
    write_json,
)


def strictly(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, math.exp(700) * 1e10])
def test_a_number_that_is_not_finite_is_null_with_a_reason(value: float) -> None:
    read = strictly(to_json({"row": {"loss": value}, "rows": [value, 1.5]}))
    if math.isfinite(value):
        assert read["row"] == {"loss": value}
    else:
        assert read["row"] == {"loss": None, "loss_reason": f"not finite: {value}"}
        assert read["rows"] == [None, 1.5]


def test_keys_are_sorted_and_the_bytes_depend_on_nothing_else() -> None:
    assert to_json({"b": 1, "a": {"d": 2, "c": 3}}) == to_json({"a": {"c": 3, "d": 2}, "b": 1})
    assert to_json({"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}\n'


def test_floats_come_back_to_the_bit(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    write_json(tmp_path / "x.json", {"value": value})
    assert strictly((tmp_path / "x.json").read_text())["value"] == value


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "deep" / "metrics.json"
    write_bytes(target, b"old")

    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_room)
    with pytest.raises(OSError, match="No space"):
        write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert [file.name for file in target.parent.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize("is_behind_a_link", [False, True])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, is_behind_a_link: bool) -> None:
    """A rename over /dev/null would take it from the whole machine; a pipe stands for it here."""
    target = pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if is_behind_a_link:
        target = tmp_path / "link"
        target.symlink_to(pipe)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="a device, a pipe or a socket"):
        write_files({tmp_path / "new.json": b"{}", target: b"{}"})
    assert pipe.is_fifo()
    assert target.is_symlink() == is_behind_a_link
    assert sorted(tmp_path.iterdir()) == before


def test_csv_has_a_header_and_unix_line_ends(tmp_path: Path) -> None:
    write_csv(tmp_path / "loss.csv", ("step", "loss"), [(1, 0.5), (2, "")])
    assert (tmp_path / "loss.csv").read_bytes() == b"step,loss\n1,0.5\n2,\n"


def full_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the n-th flush to the disk fail, as on a full one."""
    real, calls = files.os.fsync, []

    def flush(handle: int) -> None:
        calls.append(handle)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", flush)


def below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("at", [1, 2])
def test_of_files_that_belong_together_none_is_new_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    paths = [tmp_path / "metrics.json", tmp_path / "faults.json"]
    write_files(dict.fromkeys(paths, b"old"))
    full_at(monkeypatch, at)
    with pytest.raises(OSError, match="No space"):
        write_files(dict.fromkeys(paths, b"new"))
    assert below(tmp_path) == {"metrics.json": b"old", "faults.json": b"old"}


def write(folder: Path, content: bytes) -> None:
    with whole_directory(folder, holds=["in", "a*"]) as aside:
        (aside / "in").mkdir()
        (aside / "in/b").write_bytes(content)
        (aside / "a1").write_bytes(content)


def test_directory_replaces_all_that_stood_there(tmp_path: Path) -> None:
    write(tmp_path / "out", b"old")
    for name in ("a2", ".a1.77.partial"):
        (tmp_path / "out" / name).write_bytes(b"older")
    for leftover in (".out.999999999.partial", ".out.999999999.removed"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "a3").write_bytes(b"of a killed run")
    write(tmp_path / "out", b"new")
    assert below(tmp_path) == {"out/in/b": b"new", "out/a1": b"new"}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_directory_that_cannot_be_flushed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write(tmp_path / "out", b"old")
    full_at(monkeypatch, at)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "out", b"new")
    assert below(tmp_path) == {"out/in/b": b"old", "out/a1": b"old"}


def test_directory_that_cannot_take_its_name_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", b"old")
    real = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(16, "Device or resource busy")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="busy"):
        write(tmp_path / "out", b"new")
    assert below(tmp_path) == {"out/in/b": b"old", "out/a1": b"old"}


def test_directory_that_another_process_puts_there_at_the_last_moment_gives_way_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", b"old")
    write(tmp_path / "other", b"others")
    real = Path.rename

    def late(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial") and (tmp_path / "other").exists():
            real(tmp_path / "other", tmp_path / "out")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", late)
    write(tmp_path / "out", b"new")
    assert below(tmp_path) == {"out/in/b": b"new", "out/a1": b"new"}


def test_directory_that_another_process_writes_meanwhile_stays_whole(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from canvaslm.reporting.files import whole_directory
with whole_directory(Path(sys.argv[1]), holds=["a", "b"]) as aside:
    (aside / "a").write_bytes(b"others")
"""
    out = tmp_path / "out"
    with whole_directory(out, holds=["a", "b"]) as aside:
        (aside / "a").write_bytes(b"ours")
        subprocess.run([sys.executable, "-c", code, str(out)], check=True)
        assert (out / "a").read_bytes() == b"others"
        (aside / "b").write_bytes(b"ours")
    assert below(tmp_path) == {"out/a": b"ours", "out/b": b"ours"}


def test_failure_in_the_block_leaves_no_directory(tmp_path: Path) -> None:
    def stop() -> None:
        with whole_directory(tmp_path / "out", holds=[]) as aside:
            (aside / "a").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert list(tmp_path.iterdir()) == []


def test_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"nothing but in, a\*, .* got 'mine'; move that away"):
        write(tmp_path, b"new")
    with pytest.raises(InputError, match="expected a folder, got a file"):
        write(tmp_path / "mine", b"new")
    assert below(tmp_path) == {"mine": b"mine"}


def test_directory_behind_a_link_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    write(tmp_path / "out", b"new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/a1").read_bytes() == b"new"


def test_removed_directory_is_gone_and_an_absent_one_is_no_fault(tmp_path: Path) -> None:
    write(tmp_path / "out", b"old")
    remove_directory(tmp_path / "out")
    remove_directory(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    refuse_read_only(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, way: False)  # rights do not stop root
    with pytest.raises(InputError, match="expected a folder that can be written to"):
        refuse_read_only(tmp_path)
