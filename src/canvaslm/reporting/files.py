"""How does a result reach the disk so that nothing half-written is ever taken for whole?

A file is written aside in the same directory, flushed, and renamed over its name; so is a directory
with all that is in it. A run that fails or is killed leaves what was there before, or, when it is
killed between the two renames of a directory, no directory: never half of one. JSON is strict:
keys sorted, no NaN or infinity. A figure that is not finite is written as null with a
``<key>_reason`` beside it, so that every parser can read the file and no gate mistakes it for a
number.
"""

import csv
import errno
import io
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from canvaslm.errors import InputError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: aside, flushed, renamed. On failure the old file stays as it was."""
    write_files({path: content})


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: none takes its name before all are on the disk.

    On failure the old files stay as they were. A link is replaced and what it leads to is not.

    Raises:
        InputError: a path is a device, a pipe or a socket, which a rename would destroy.
    """
    asides: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if path.exists() and not path.is_file():
                raise InputError(
                    path, expected="a file, or none yet", got="a device, a pipe or a socket",
                    fix="name a file; to see a result, write it to one and print that",
                )  # fmt: skip
            path.parent.mkdir(parents=True, exist_ok=True)
            asides[path] = path.with_name(f".{path.name}.{os.getpid()}.partial")
            asides[path].write_bytes(content)
            flush(asides[path])
        for path, aside in asides.items():
            aside.replace(path)
            flush(path.parent)
    except BaseException:
        for aside in asides.values():
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def whole_directory(path: Path, *, holds: Collection[str]) -> Iterator[Path]:
    """Give an empty directory to fill; when the block ends well, it replaces ``path``.

    It lies beside ``path`` under a name of this process and is flushed with all that is in it. When
    the block fails, it is removed and ``path`` stays as it was. Of two processes that write one
    ``path`` at once, each replaces it whole, and the later one's stays.

    Args:
        path: the directory to write; a link to one is followed.
        holds: patterns of the names that may stand in ``path`` now, and are replaced.

    Raises:
        InputError: ``path`` is a file, or holds something else, which would be lost.
    """
    refuse_what_would_be_lost(path, holds)
    path = Path(os.path.realpath(path))
    aside = _beside(path, "partial")
    shutil.rmtree(aside, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    try:
        aside.mkdir()
        yield aside
        for folder, _, files in os.walk(aside):
            for name in files:
                flush(Path(folder) / name)
            flush(Path(folder))
        _swap(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def refuse_read_only(folder: Path) -> None:
    """Raise unless something can be written into a folder, before hours go into what cannot.

    Raises:
        InputError: its rights or its file system forbid it.
    """
    if not os.access(folder, os.W_OK):
        raise InputError(
            folder,
            expected="a folder that can be written to",
            got="a read-only one",
            fix="change its rights, or name another place",
        )


def refuse_what_would_be_lost(path: Path, holds: Collection[str]) -> None:
    """Raise unless a folder may be replaced: one of the user's, named by mistake, must not vanish.

    Args:
        path: the folder; it need not exist.
        holds: patterns of the names that may stand in it.

    Raises:
        InputError: it is a file, or holds something else.
    """
    try:
        found = sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise InputError(
            path, expected="a folder", got="a file", fix="name another folder"
        ) from None
    known = (*holds, ".*.partial")  # the latter of a write_bytes that was killed
    foreign = [name for name in found if not any(fnmatch(name, pattern) for pattern in known)]
    if foreign:
        raise InputError(
            path,
            expected=f"a folder with nothing but {', '.join(holds)}, which are replaced",
            got=repr(foreign[0]),
            fix="move that away, or name another folder",
        )


def remove_directory(path: Path) -> None:
    """Remove a directory, under another name first so that a killed removal leaves none half."""
    if _set_aside(path):
        shutil.rmtree(_beside(path, "removed"))


def flush(path: Path) -> None:
    """Return when a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Write strict JSON with sorted keys; non-finite numbers become null with a reason."""
    write_bytes(path, to_json(payload).encode())


def to_json(payload: Mapping[str, Any]) -> str:
    """Render strict JSON with sorted keys, indented, with a final newline."""
    return json.dumps(_finite(payload), sort_keys=True, indent=2, allow_nan=False) + "\n"


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows under a header, one line each, with ``\\n`` line ends."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def _finite(value: Any) -> Any:
    """Replace what strict JSON cannot hold."""
    if isinstance(value, Mapping):
        clean: dict[str, Any] = {}
        for key, item in value.items():
            clean[key] = _finite(item)
            if isinstance(item, float) and not math.isfinite(item):
                clean[f"{key}_reason"] = f"not finite: {item}"
        return clean
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _swap(aside: Path, path: Path) -> None:
    """Let a finished directory take its name; what stood there gives way at the last moment."""
    while True:
        stood = _set_aside(path)
        try:
            aside.rename(path)
            break
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue  # another process has put its own there in between
            if stood:
                _beside(path, "removed").rename(path)
            raise
    flush(path.parent)
    shutil.rmtree(_beside(path, "removed"), ignore_errors=True)


def _set_aside(path: Path) -> bool:
    """Take a directory's name away, if it stands there."""
    doomed = _beside(path, "removed")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return False
    return True


def _beside(path: Path, fate: str) -> Path:
    """A name for this process alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.{fate}")


def _clear_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they wrote ``path`` have left beside it."""
    name = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.(partial|removed)")
    for entry in path.parent.iterdir():
        found = name.fullmatch(entry.name)
        if found and not _lives(int(found[1])):
            shutil.rmtree(entry, ignore_errors=True)


def _lives(process: int) -> bool:
    """Whether a process of this number runs."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True
