import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from canvaslm.corpus.documents import CollectParams, collect_documents
from canvaslm.corpus.fetch import FetchParams, fetch_corpus, read_inputs
from canvaslm.corpus.records import read_records
from canvaslm.errors import InputError
from canvaslm.reporting.progress import untracked

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared/cases/documents"
READ = ("txt", "jsonl", "jsonl.gz", "parquet")
# Words of the reference reader's messages for whole files, and the words of ours.
WORDS = {
    "damaged gz": "damaged gzip",
    "suffix says": "as the suffix says",
    "empty file": "an empty file",
    "unreadable": "unreadable",
    "no column": "no column",
    "want string": "has type",
}


def texts(path: Path, field: str = "text") -> list[str | None]:
    kind = path.name.split(".", 1)[1]
    return [r.text for r in read_records(path, name=path.name, kind=kind, text_field=field)]


def refusal(path: Path, field: str = "text") -> str:
    with pytest.raises(InputError) as error:
        texts(path, field)
    return str(error.value)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
        (b"\xef\xbb\xbfword", "word"),
        ("e\u0301 \u00e9 \u2028 \u0085".encode(), "e\u0301 \u00e9 \u2028 \u0085"),
        (b"  kept  \t\n", "  kept  \t\n"),
        (b"", ""),
    ],
)
def test_txt_is_one_document_with_plain_line_ends(
    tmp_path: Path, content: bytes, text: str
) -> None:
    assert texts(write(tmp_path / "a.txt", content)) == [text]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ok \xff", "a.txt: expected UTF-8, got invalid UTF-8 at byte 3"),
        (b"\xff\xfea\0", "invalid UTF-8 at byte 0"),
        (b"a\0b", "a NUL byte"),
        (gzip.compress(b"text", mtime=0), "expected plain text, as the suffix says, got gzip"),
        (b"\x28\xb5\x2f\xfd", "got zstandard"),
    ],
)
def test_txt_that_is_not_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refusal(write(tmp_path / "a.txt", content))


def test_only_a_newline_byte_ends_a_line_of_jsonl(tmp_path: Path) -> None:
    lines = ["a\u2028b", "c\u2029d", "e\u0085f", "g\x0bh\x0ci"]
    content = "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in lines).encode()
    assert texts(write(tmp_path / "a.jsonl", content)) == lines


def test_blank_lines_bom_and_crlf_around_records_are_not_text(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a\\r\\n"}\r\n\r\n   \n{"text": "b"}'
    assert texts(write(tmp_path / "a.jsonl", content)) == ["a\r\n", "b"]


def test_null_is_a_record_without_text_and_the_last_of_two_keys_wins(tmp_path: Path) -> None:
    content = b'{"text": null}\n{"text": "a", "text": "b", "x": NaN}\n'
    assert texts(write(tmp_path / "a.jsonl", content)) == [None, "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a', "malformed JSON"),
        (b'{"text": "a\tb"}', "malformed JSON"),
        (b'{"text": "\0"}', "malformed JSON"),
        (b'{"text": "a"} {"text": "b"}', "malformed JSON"),
        (b"[" * 3000 + b"]" * 3000, "malformed JSON: nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", "malformed JSON"),
        (b'["a"]', "record is not an object but list"),
        (b"null", "record is not an object but NoneType"),
        (b'{"text": 1}', "text is not a string but int"),
        (b'{"text": ["a"]}', "text is not a string but list"),
        (b'{"text": true}', "text is not a string but bool"),
        (b'{"content": "a"}', "no field 'text'; the keys are 'content'"),
        (b'{"text": "\\u0000"}', "a NUL byte"),
        (b'{"text": "\\ud800"}', "a lone surrogate"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "\xc0\xaf"}', "invalid UTF-8"),
        (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8"),
    ],
)
def test_bad_line_is_refused_with_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    message = refusal(write(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b"\n"))
    assert message.startswith("a.jsonl:3: ")
    assert reason in message


def test_surrogate_pair_in_escapes_is_one_letter(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", b'{"text": "\\ud83d\\ude00"}')) == ["\U0001f600"]


def test_literal_key_wins_over_a_path_into_objects(tmp_path: Path) -> None:
    content = b'{"doc.text": "literal", "doc": {"text": "nested"}}\n{"doc": {"text": "nested"}}\n'
    assert texts(write(tmp_path / "a.jsonl", content), "doc.text") == ["literal", "nested"]


@pytest.mark.parametrize("line", [b'{"doc": null}', b'{"doc": "x"}', b"{}", b'{"doc": {}}'])
def test_missing_parent_of_a_nested_field_is_a_bad_record(tmp_path: Path, line: bytes) -> None:
    assert "no field 'doc.text'" in refusal(write(tmp_path / "a.jsonl", line), "doc.text")


def test_gzip_of_several_members_is_read_whole(tmp_path: Path) -> None:
    content = gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"}\n')
    assert texts(write(tmp_path / "a.jsonl.gz", content)) == ["a", "b"]


WHOLE = gzip.compress(b'{"text": "a"}\n' * 50, mtime=0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (WHOLE[:-12], "damaged gzip"),
        (WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:], "damaged gzip: CRC check failed"),
        (WHOLE[:10] + b"\xff" * 8 + WHOLE[18:], "damaged gzip: Error -3"),
        (WHOLE + b"garbage", "damaged gzip"),
        (b'{"text": "a"}\n', "expected gzip, as the suffix says"),
        (b"", "an empty file"),
    ],
)
def test_damaged_gzip_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refusal(write(tmp_path / "a.jsonl.gz", content))


def write_column(path: Path, column: pa.Array, name: str = "text", **options: Any) -> Path:
    pq.write_table(pa.table({"other": pa.nulls(len(column)), name: column}), path, **options)
    return path


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None, "é"]),
        pa.array(["a", None, "é"], pa.large_string()),
        pa.array(["a", None, "é"]).dictionary_encode(),
    ],
)
def test_parquet_column_of_strings_is_read_in_order_over_row_groups(
    tmp_path: Path, column: pa.Array
) -> None:
    assert texts(write_column(tmp_path / "a.parquet", column, row_group_size=1)) == [
        "a",
        None,
        "é",
    ]


def test_parquet_column_of_nulls_has_no_text(tmp_path: Path) -> None:
    assert texts(write_column(tmp_path / "a.parquet", pa.nulls(2))) == [None, None]


def test_parquet_field_inside_objects_is_null_where_its_object_is(tmp_path: Path) -> None:
    column = pa.array([{"text": "a"}, None, {"text": None}])
    path = write_column(tmp_path / "a.parquet", column, "doc")
    assert texts(path, "doc.text") == ["a", None, None]
    assert "no field 'body' in type struct" in refusal(path, "doc.body")


def test_parquet_literal_column_wins_over_a_path(tmp_path: Path) -> None:
    table = pa.table({"doc.text": ["literal"], "doc": [{"text": "nested"}]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", "doc.text") == ["literal"]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1]), "int64"),
        (pa.array([b"a"]), "binary"),
        (pa.array([["a"]]), "list<"),
        (pa.array([{"a": "b"}]), "struct<"),
    ],
)
def test_parquet_column_of_another_type_is_refused_by_its_type(
    tmp_path: Path, column: pa.Array, kind: str
) -> None:
    message = refusal(write_column(tmp_path / "a.parquet", column))
    assert f"column 'text' has type {kind}" in message


def test_parquet_without_the_column_lists_those_there_are(tmp_path: Path) -> None:
    message = refusal(write_column(tmp_path / "a.parquet", pa.array(["a"]), "title"))
    assert "no column 'text'; columns: other, title" in message


def test_parquet_string_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    message = refusal(write_column(tmp_path / "a.parquet", broken, use_dictionary=False))
    assert message.startswith("a.parquet:row 1: expected UTF-8")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"text" * 100])
def test_file_that_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "unreadable" in refusal(write(tmp_path / "a.parquet", content))


def shared_cases() -> dict[str, dict[str, Any]]:
    expected = CASES / "expected.json"
    return json.loads(expected.read_bytes()) if expected.is_file() else {}


@pytest.mark.parametrize(("name", "case"), shared_cases().items())
def test_shared_case_gives_what_the_reference_reader_gave(
    tmp_path: Path, name: str, case: dict[str, Any]
) -> None:
    """Beside two texts of ours, one for each split, so that only the case itself can fail."""
    expected, folder = case["strict"], tmp_path / "in"
    raw = tmp_path / "raw"
    folder.mkdir()
    copy = folder / Path(name).name.lstrip(".")
    copy.write_bytes((CASES / name).read_bytes())
    for text in ("train: 1", "val: 4"):
        (folder / f"~{text[:3]}.txt").write_text(text)
    params = FetchParams(source="files", path=str(folder), pattern="*", text_field=case["field"])
    collect = CollectParams(on_bad_record="stop", val_share=0.5, max_documents=None)
    if not copy.name.lower().endswith(READ):
        with pytest.raises(InputError, match="got suffix"):
            fetch_corpus(params, raw)
        return
    fetch_corpus(params, raw)
    if "error" in expected and "no usable documents" not in expected["error"]:
        with pytest.raises(InputError) as refused:
            collect_documents(read_inputs(raw), collect, tmp_path / "out", track=untracked)
        place, _, reason = expected["error"].removeprefix(f"{Path(name).parent}/").partition(": ")
        known = next((ours for theirs, ours in WORDS.items() if theirs in reason), reason)
        message = str(refused.value)
        assert message.startswith(place.lstrip(".").replace(" row ", ":row ") + ": ")
        assert known in message
        return
    counts = collect_documents(read_inputs(raw), collect, tmp_path / "out", track=untracked)
    skipped = {"null": counts.null, "empty": counts.blank}
    kept = sum(counts.documents.values()) + counts.duplicates - 2
    assert kept == expected.get("docs", 0)
    if "docs" in expected:
        assert {reason: n for reason, n in skipped.items() if n} == expected["skipped"]


def collected(folder: Path, pattern: str, out: Path) -> list[dict[str, Any]]:
    """The documents of a folder of shared cases, both splits in file order."""
    params = FetchParams(source="files", path=str(folder), pattern=pattern, text_field="text")
    fetch_corpus(params, out / "raw")
    collect = CollectParams(on_bad_record="stop", val_share=0.5, max_documents=None)
    collect_documents(read_inputs(out / "raw"), collect, out / "documents", track=untracked)
    tables = (pq.read_table(path) for path in (out / "documents").iterdir())
    return sorted((row for t in tables for row in t.to_pylist()), key=lambda row: row["doc_id"])


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases lie outside the repository")
def test_shared_folders_give_the_documents_that_their_readme_says(tmp_path: Path) -> None:
    """`shared/cases/documents/README.md`: trees, mixed formats, and copies over files."""
    shutil.copytree(CASES / "tree", tmp_path / "tree")
    with pytest.raises(InputError, match=r"^image\.png\.txt: expected UTF-8"):
        collected(tmp_path / "tree", "*.txt", tmp_path)
    (tmp_path / "tree/image.png.txt").unlink()
    tree = collected(tmp_path / "tree", "*.[tT][xX][tT]", tmp_path)
    assert [row["source"] for row in tree] == [
        "UPPER.TXT",
        "a/b/two.txt",
        "a/one.txt",
        "file1.txt",
        "file10.txt",
        "file2.txt",
        "with space é.txt",
    ]
    mixed = collected(CASES / "mixed", "part*", tmp_path)
    assert [row["source"] for row in mixed] == [
        "part1.jsonl:1",
        "part1.jsonl:2",
        "part2.parquet:row 0",
        "part2.parquet:row 1",
        "part3.txt",
    ]
    for name, kept in (("across", 3), ("train_val", 5)):
        assert len(collected(CASES / "dups" / name, "*", tmp_path)) == kept


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases lie outside the repository")
def test_shared_text_is_the_same_from_every_format(tmp_path: Path) -> None:
    names = ["good.jsonl", "good.jsonl.gz", "good.parquet"]
    names += ["large_string.parquet", "dictionary.parquet", "row_groups.parquet"]
    assert len(texts(CASES / "good/good.jsonl")) == 5
    for name in names:
        assert texts(CASES / "good" / name) == texts(CASES / "good/good.jsonl")
    with_bom, without = (
        texts(CASES / "encoding/utf8_bom.jsonl"),
        texts(CASES / "good/good.jsonl"),
    )
    assert with_bom == without
