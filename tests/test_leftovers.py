"""Does DVC go on after what a kill has left, once it is mended, and is nothing else touched?"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from canvaslm.leftovers import mend

PIPELINE = """
stages:
  first: {cmd: echo a > a, outs: [a]}
  second: {cmd: cp a b, deps: [a], outs: [b]}
  third: {cmd: cp b c, deps: [b], outs: [c]}
"""
DVC = [sys.executable, "-m", "dvc"]
COMMITTER = ("-c", "user.name=x", "-c", "user.email=x@x")
OWN = {key: os.environ[key] for key in os.environ if not key.startswith(("DVC_", "GIT_"))}


def call(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=place, env=OWN, text=True, check=False, stdout=-1, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages that have run, with autostage as in this project, and a commit."""
    place = tmp_path_factory.mktemp("pipeline")
    (place / "dvc.yaml").write_text(PIPELINE)
    for words in (
        ("git", "init", "--quiet"),
        (*DVC, "init", "--quiet"),
        (*DVC, "config", "core.autostage", "true"),
        (*DVC, "repro", "--quiet"),
        ("git", "add", "."),
        ("git", *COMMITTER, "commit", "--quiet", "-m", "x"),
    ):
        assert (done := call(place, *words)).returncode == 0, done.stdout
    return place


@pytest.fixture
def checkout(pipeline: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pipeline, tmp_path / "checkout", symlinks=True)


def put_right(checkout: Path) -> list[str]:
    return mend(checkout, copy=checkout / ".work" / "dvc.lock")


def rerun(checkout: Path) -> str:
    """What DVC says, which has the last stage to do again."""
    (checkout / "c").unlink()
    done = call(checkout, *DVC, "repro")
    assert done.returncode == 0, done.stdout
    assert (checkout / "c").read_text() == "a\n"
    return done.stdout


def cut_to(n_lines: int) -> Callable[[bytes], bytes]:
    return lambda content: b"".join(content.splitlines(keepends=True)[:n_lines])


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[: len(content) * 2 // 3], id="in a line"),
        pytest.param(cut_to(8), id="after a stage"),
        pytest.param(lambda content: content[:-9] + b"\n\0\xff\n", id="no text"),
    ],
)
@pytest.mark.parametrize("known", ["kept", "committed"])
def test_a_cut_lock_is_put_back_as_it_was(
    checkout: Path, cut: Callable[[bytes], bytes], known: str
) -> None:
    whole = (checkout / "dvc.lock").read_bytes()
    if known == "kept":
        whole += b"# not what is committed\n"
        (checkout / "dvc.lock").write_bytes(whole)
        assert put_right(checkout) == []
    broken = cut(whole)
    assert broken != whole
    (checkout / "dvc.lock").write_bytes(broken)
    told = put_right(checkout)
    if known == "committed" and broken.endswith(b"\n") and b"\0" not in broken:
        assert told == []  # a lock of fewer stages may be meant, as long as no more were seen
        return
    assert len(told) == 1
    assert "dvc.lock was cut" in told[0]
    assert (checkout / "dvc.lock").read_bytes() == whole
    assert put_right(checkout) == []


def test_dvc_goes_on_from_a_lock_that_nobody_knows(checkout: Path) -> None:
    assert call(checkout, "git", "rm", "--quiet", "--cached", "dvc.lock").returncode == 0
    assert call(checkout, "git", *COMMITTER, "commit", "--quiet", "-m", "x").returncode == 0
    (checkout / "dvc.lock").write_bytes(b"")
    assert call(checkout, *DVC, "repro").returncode != 0, "DVC mends it by itself"
    assert put_right(checkout) == [
        "dvc.lock was cut by a kill and no other is known: removed, the cache has its stages"
    ]
    assert "is cached - skipping run" in rerun(checkout)


def test_a_stage_that_was_taken_out_stays_out(checkout: Path) -> None:
    assert put_right(checkout) == []
    assert call(checkout, *DVC, "remove", "third").returncode == 0
    fewer = (checkout / "dvc.lock").read_bytes()
    assert put_right(checkout) == []
    assert (checkout / "dvc.lock").read_bytes() == fewer


def test_an_unreadable_table_of_locks_and_a_lock_of_the_index_go(checkout: Path) -> None:
    """As a kill leaves them: DVC alone stops at each."""
    table, lock = checkout / ".dvc/tmp/rwlock", checkout / ".git/index.lock"
    table.write_bytes(b"")
    lock.write_bytes(b"DIRC")
    left = checkout / ".dvc/tmp/exps/standalone/tmpabc"
    left.mkdir(parents=True)
    (checkout / "dvc.yaml").write_text(PIPELINE.replace("cp b c", "cp  b c"))
    assert call(checkout, *DVC, "repro").returncode != 0
    assert [line.rpartition(":")[2] for line in put_right(checkout)] == [" removed"] * 3
    assert not any(path.exists() for path in (table, lock, left))
    assert "Running stage 'third'" in rerun(checkout)


def test_a_lock_of_the_index_that_is_held_stays(checkout: Path) -> None:
    lock = checkout / ".git/index.lock"
    with lock.open("w"):
        assert put_right(checkout) == []
        assert lock.exists()
    assert len(put_right(checkout)) == 1


def _begin_an_experiment(checkout: Path) -> None:
    """As DVC begins one and ends here, killed."""
    head = call(checkout, "git", "rev-parse", "HEAD").stdout.strip()
    assert call(checkout, "git", *COMMITTER, "stash", "push", "--quiet").returncode == 0
    assert call(checkout, "git", "checkout", "--quiet", "--detach", head).returncode == 0


@pytest.mark.parametrize("applied", [False, True], ids=["taken", "taken and applied"])
def test_changes_that_a_killed_experiment_took_are_given_back(
    checkout: Path, applied: bool
) -> None:
    """The next command would run with other settings than the user's."""
    branch = call(checkout, "git", "symbolic-ref", "HEAD").stdout
    changed = PIPELINE.replace("echo a", "echo b")
    (checkout / "dvc.yaml").write_text(changed)
    _begin_an_experiment(checkout)
    assert (checkout / "dvc.yaml").read_text() == PIPELINE
    if applied:
        assert call(checkout, "git", "stash", "apply", "--quiet").returncode == 0
    assert put_right(checkout)[-1] == "your uncommitted changes were in Git's stash: given back"
    assert (checkout / "dvc.yaml").read_text() == changed
    assert call(checkout, "git", "symbolic-ref", "HEAD").stdout == branch
    assert call(checkout, "git", "stash", "list").stdout == ""
    assert put_right(checkout) == []


def test_a_stash_stays_where_the_files_have_been_changed_since(checkout: Path) -> None:
    (checkout / "dvc.yaml").write_text(PIPELINE.replace("echo a", "echo b"))
    _begin_an_experiment(checkout)
    newer = PIPELINE.replace("echo a", "echo c")
    (checkout / "dvc.yaml").write_text(newer)
    assert "are in Git's stash" in put_right(checkout)[-1]
    assert (checkout / "dvc.yaml").read_text() == newer
    assert call(checkout, "git", "stash", "list").stdout.count("\n") == 1


def test_a_head_that_the_user_took_elsewhere_stays(checkout: Path) -> None:
    for words in (("commit", "--quiet", "--allow-empty", "-m", "y"), ("checkout", "-q", "HEAD~")):
        assert call(checkout, "git", *COMMITTER, *words).returncode == 0
    assert put_right(checkout) == []
    assert call(checkout, "git", "symbolic-ref", "--quiet", "HEAD").returncode == 1


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_nothing_is_touched_while_dvc_works(checkout: Path, tmp_path: Path, where: str) -> None:
    """It is known by where it works, or by the table that it has written."""
    (tmp_path / "dvc").write_text("input()\n")
    place = checkout / ".dvc" if where == "inside" else tmp_path
    dvc = subprocess.Popen([sys.executable, tmp_path / "dvc"], cwd=place, stdin=subprocess.PIPE)
    try:
        if where == "outside":
            (checkout / ".dvc/tmp/rwlock").write_text(f'{{"write": {{"a": {{"pid": {dvc.pid}}}}}}}')
        (checkout / "dvc.lock").write_bytes(b"")
        assert put_right(checkout) == [
            f"process {dvc.pid} is a DVC at work here, so nothing is looked at"
        ]
        assert (checkout / "dvc.lock").read_bytes() == b""
    finally:
        dvc.communicate(b"\n")
    assert put_right(checkout)
    assert (checkout / "dvc.lock").read_bytes() != b""
