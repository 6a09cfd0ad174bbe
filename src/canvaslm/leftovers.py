"""What has a killed DVC left that stops the next one, or that the next one would believe?

DVC writes ``dvc.lock`` and its table of locks in place, and Git's index under a lock file that only
its writer removes. A kill within these writes leaves an empty or cut ``dvc.lock``, an unreadable
table, or a lock that nobody holds, and the next ``dvc repro`` stops at it. A killed experiment
leaves its whole checkout and, when it had only begun, the user's changes in Git's stash. Each is
put right here, but only while no DVC works in the checkout. Nothing is lost by it: what DVC had
finished comes back from its run cache.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dvc.dvcfile import Lockfile
from dvc.exceptions import DvcException
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from canvaslm.params import read_yaml
from canvaslm.reporting.files import write_bytes

_PROC = Path("/proc")
_TABLES = (".dvc/tmp/rwlock", ".dvc/tmp/exps/rwlock")
_BETWEEN_S = 60  # from DVC's stashing to its leaving the branch; it takes one or two
_LOCKS = ("index.lock", "HEAD.lock", "packed-refs.lock", "refs/**/*.lock")


def mend(root: Path, *, copy: Path) -> list[str]:
    """Put right what a killed DVC has left in a checkout, and say in a line each what was done.

    Where the system does not show its processes, nothing is done: DVC may be at work.

    Args:
        root: the checkout.
        copy: where the last whole ``dvc.lock`` is kept; written when the one in place is whole.
    """
    if not (_PROC / "self").exists():
        return []
    busy = [pid for pid in (*_working_in(root), *_named(root)) if _is_of(pid, "dvc")]
    if busy:
        return [f"process {busy[0]} is a DVC at work here, so nothing is looked at"]
    return [
        *_mend_dvc_lock(root, copy),
        *_drop_tables(root),
        *_drop_git_locks(root),
        *_give_back_changes(root),
        *_drop_checkouts(root),
    ]


def _mend_dvc_lock(root: Path, copy: Path) -> Iterator[str]:
    """Keep a whole dvc.lock; put the last whole one, or the committed one, in a cut one's place."""
    lock = root / "dvc.lock"
    found = _content(lock)
    if found is None:
        return
    committed = _run_git(root, "show", "HEAD:dvc.lock")
    kept = _content(copy)
    if _is_whole(found) and (found == committed or not _lost(found, kept, root)):
        if found != kept:
            write_bytes(copy, found)
        return
    for content, told in ((kept, "the one before the last command"), (committed, "the committed")):
        if content is not None and _is_whole(content):
            write_bytes(lock, content)
            yield f"dvc.lock was cut by a kill: {told} is back, the cache has the rest"
            return
    lock.unlink()
    yield "dvc.lock was cut by a kill and no other is known: removed, the cache has its stages"


def _lost(found: bytes, kept: bytes | None, root: Path) -> set[str]:
    """The stages of the pipeline that the kept dvc.lock has and this one, whole as YAML, has not.

    A stage comes and is replaced, but DVC takes none out that is still in ``dvc.yaml``.
    """
    if kept is None or not _is_whole(kept):
        return set()
    gone = _stages(kept).keys() - _stages(found).keys()
    pipeline = read_yaml(root / "dvc.yaml")["stages"]
    return {name for name in gone if name.partition("@")[0] in pipeline}


def _is_whole(content: bytes) -> bool:
    """Whether DVC would take it for a dvc.lock, and it does not end inside a line."""
    return content.endswith(b"\n") and bool(_stages(content))


def _stages(content: bytes) -> dict[str, Any]:
    """The stages of a dvc.lock; none when DVC would not take it for one."""
    try:
        lock: dict[str, Any] = Lockfile.validate(YAML(typ="safe").load(content))
    except (YAMLError, UnicodeDecodeError, DvcException):
        return {}
    return lock.get("stages", {})


def _drop_tables(root: Path) -> Iterator[str]:
    """Forget who read and wrote what: a number of a dead process may be another's by now."""
    for name in _TABLES:
        content = _content(root / name)
        if content is not None and not (content.endswith(b"}") and b'"pid"' not in content):
            (root / name).unlink()
            yield f"{name} was cut by a kill, or names a killed DVC: removed"


def _drop_git_locks(root: Path) -> Iterator[str]:
    """Remove lock files of Git that no process holds."""
    place = _run_git(root, "rev-parse", "--absolute-git-dir")
    if place is None or any(_is_of(pid, "git") for pid in _working_in(root)):
        return
    git = Path(os.fsdecode(place.strip()))
    for lock in sorted(path for name in _LOCKS for path in git.glob(name)):
        if not _is_open(lock):
            lock.unlink()
            yield f"{lock} was a killed DVC's: removed"


def _give_back_changes(root: Path) -> Iterator[str]:
    """Undo what an experiment does first: it stashes changes and takes HEAD off its branch."""
    told = _run_git(root, "log", "-g", "-1", "--date=unix", "--format=%gd %gs", "HEAD") or b""
    left = re.fullmatch(rb"HEAD@\{(\d+)\} checkout: moving from (\S+) to [0-9a-f]{40}\n", told)
    if left is None or _run_git(root, "symbolic-ref", "--quiet", "HEAD") is not None:
        return
    branch = os.fsdecode(left[2])
    head = _run_git(root, "rev-parse", "HEAD")
    if head is None or head != _run_git(root, "rev-parse", f"refs/heads/{branch}"):
        return
    _run_git(root, "symbolic-ref", "HEAD", f"refs/heads/{branch}")
    _run_git(root, "rm", "--quiet", "--cached", "--ignore-unmatch", ".dvc/tmp/repro.dat")
    yield f"HEAD was off {branch}, as a killed experiment leaves it: put back"
    stash = (_run_git(root, "log", "-1", "--format=%ct %P", "refs/stash") or b"0").split()
    if stash[1:2] != [head.strip()] or not 0 <= int(left[1]) - int(stash[0]) <= _BETWEEN_S:
        return
    untouched = _run_git(root, "diff", "--quiet", "HEAD") is not None
    given_back = _run_git(root, "diff", "--quiet", "refs/stash") is not None  # DVC did it already
    how = ("drop",) if given_back else ("pop", "--index")
    if (untouched or given_back) and _run_git(root, "stash", *how, "--quiet") is not None:
        yield "your uncommitted changes were in Git's stash: given back"
    else:
        yield "your uncommitted changes are in Git's stash: see `git stash show -p`"


def _drop_checkouts(root: Path) -> Iterator[str]:
    """Remove the temporary checkouts of experiments; the states of their runs lie elsewhere."""
    for place in sorted((root / ".dvc/tmp/exps/standalone").glob("tmp*")):
        shutil.rmtree(place)
        yield f"{place} was the checkout of a killed experiment: removed"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _run_git(root: Path, *arguments: str) -> bytes | None:
    """What git says; None when it refuses, or is not there."""
    try:
        ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return ran.stdout if ran.returncode == 0 else None


def _working_in(root: Path) -> Iterator[int]:
    """Processes whose working directory is in a checkout."""
    for entry in _PROC.glob("[0-9]*"):
        try:
            place = (entry / "cwd").readlink()
        except OSError:  # gone, or of another user
            continue
        if place.is_relative_to(root.resolve()):
            yield int(entry.name)


def _named(root: Path) -> Iterator[int]:
    """Processes that DVC's tables of locks name; most of them have ended long ago."""
    for name in _TABLES:
        for number in re.findall(rb'"pid": (\d+)', _content(root / name) or b""):
            yield int(number)


def _is_of(pid: int, command: str) -> bool:
    """Whether a process runs a command, by itself or in an interpreter."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return command in [os.fsdecode(word).rpartition("/")[2] for word in words[:3]]


def _is_open(path: Path) -> bool:
    """Whether a process has a file open."""
    wanted = path.stat()
    for handle in _PROC.glob("[0-9]*/fd/*"):
        try:
            found = handle.stat()
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
