"""What the stages of the corpus leave behind and say when something is wrong outside them."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest_plugins = ["corpus_stages"]

STAGES = ["fetch_corpus", "collect_documents", "train_tokenizer", "pack_shards", "audit_windows"]


@pytest.fixture
def _outputs(
    run_stage: Callable[..., int], corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All outputs of one corpus, and another corpus, so that no stage would write the same."""
    for stage in STAGES:
        assert run_stage(stage) == 0
    with (corpus / "texts/all.jsonl").open("a") as file:
        file.write('{"text": "One document more, which changes every output."}\n')
    capfd.readouterr()


def contents(corpus: Path) -> dict[Path, bytes]:
    """Everything that the stages have written, hidden files and folders too."""
    files = (p for top in ("data", "reports") for p in (corpus / top).rglob("*") if p.is_file())
    return {path: path.read_bytes() for path in files}


def told_in_one_line(capfd: pytest.CaptureFixture[str]) -> str:
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def run_up_to(stage: str, run_stage: Callable[..., int]) -> None:
    for earlier in STAGES[: STAGES.index(stage)]:
        assert run_stage(earlier) == 0


@pytest.mark.usefixtures("_outputs")
@pytest.mark.parametrize(
    ("stage", "at"),
    [
        ("fetch_corpus", 1),
        ("fetch_corpus", 4),
        ("collect_documents", 1),
        ("collect_documents", 3),
        ("train_tokenizer", 1),
        ("pack_shards", 1),
        ("pack_shards", 9),
        ("audit_windows", 1),
        ("audit_windows", 3),
    ],
)
def test_full_disk_is_one_line_and_exit_2_and_changes_nothing(
    corpus: Path,
    run_stage: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stage: str,
    at: int,
) -> None:
    run_up_to(stage, run_stage)
    before, real, calls = contents(corpus), os.fsync, []

    def flush(handle: int) -> None:
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", flush)
    assert run_stage(stage) == 2
    assert "no space left; free some and run it again" in told_in_one_line(capfd)
    assert contents(corpus) == before


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let the system itself refuse longer files, in whatever library they are written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("_outputs")
@pytest.mark.parametrize("stage", STAGES)
def test_file_that_the_system_refuses_is_one_line_and_exit_2_and_changes_nothing(
    corpus: Path,
    run_stage: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    run_up_to(stage, run_stage)
    before = contents(corpus)
    with files_of_at_most(200):
        assert run_stage(stage) == 2
    assert "File too large" in told_in_one_line(capfd)
    assert contents(corpus) == before


@pytest.mark.usefixtures("_outputs")
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("data/raw/inputs.json", "collect_documents"),
        ("data/documents/train.parquet", "train_tokenizer"),
        ("data/documents/val.parquet", "pack_shards"),
        ("data/tokenizer/tokenizer.json", "pack_shards"),
        ("data/tokenizer/tokenizer.json", "audit_windows"),
        ("data/shards/manifest.json", "audit_windows"),
    ],
)
@pytest.mark.parametrize("damage", ["empty", "a brace", "cut", "folder", "parent"])
def test_damaged_input_is_one_line_and_exit_2_and_changes_nothing(
    corpus: Path,
    run_stage: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    name: str,
    stage: str,
    damage: str,
) -> None:
    path = corpus / name
    content = path.read_bytes()
    if damage == "parent":
        path.parent.rename(corpus / "away")
        path.parent.write_bytes(b"a file where a folder was")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            path.write_bytes({"empty": b"", "a brace": b"{", "cut": content[:-9]}[damage])
    before = contents(corpus)
    assert run_stage(stage) == 2
    assert told_in_one_line(capfd).startswith(str(Path(name).parent))
    assert contents(corpus) == before


@pytest.mark.usefixtures("_outputs")
@pytest.mark.parametrize(
    ("stage", "option"),
    [
        ("fetch_corpus", "--raw"),
        ("collect_documents", "--documents"),
        ("collect_documents", "--reports"),
        ("pack_shards", "--shards"),
        ("audit_windows", "--reports"),
    ],
)
def test_file_in_the_place_of_an_output_folder_is_one_line_and_exit_2_and_stays(
    corpus: Path,
    run_stage: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    stage: str,
    option: str,
) -> None:
    run_up_to(stage, run_stage)
    (corpus / "file").write_text("mine")
    assert run_stage(stage, option, "file") == 2
    assert "file" in told_in_one_line(capfd)
    assert (corpus / "file").read_text() == "mine"


@pytest.mark.usefixtures("_outputs")
def test_folder_in_the_place_of_the_tokenizer_is_one_line_and_exit_2(
    run_stage: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_stage("train_tokenizer", "--tokenizer", "texts") == 2
    assert told_in_one_line(capfd).startswith("texts: expected access, got Is a directory")


@pytest.mark.usefixtures("_outputs")
def test_damage_leaves_a_report_that_can_be_read(
    corpus: Path, run_stage: Callable[..., int]
) -> None:
    (corpus / "data/shards/train/shard_00000.bin").unlink()
    assert run_stage("audit_windows") == 1
    samples = json.loads((corpus / "reports/audit_windows/samples.json").read_text())
    assert samples == {"train": [], "val": []}


def test_own_file_that_cannot_be_read_is_one_line_and_exit_2(
    corpus: Path,
    run_stage: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    real = Path.open

    def refuse(path: Path, *arguments: str, **options: str) -> object:
        if path.suffix == ".jsonl":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    assert run_stage("fetch_corpus") == 2
    line = told_in_one_line(capfd)
    assert line.startswith("texts/all.jsonl: expected access, got Permission denied")
    assert not (corpus / "data/raw").exists()
