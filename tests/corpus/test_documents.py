import hashlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from canvaslm.corpus.documents import (
    CollectParams,
    DocumentCounts,
    collect_documents,
    read_texts,
)
from canvaslm.corpus.fetch import FetchParams, fetch_corpus, read_inputs
from canvaslm.errors import InputError
from canvaslm.reporting.progress import untracked


def collect(
    folder: Path, out: Path, *, val_share: float = 0.3, max_documents: int | None = None
) -> DocumentCounts:
    fetch = FetchParams(source="files", path=str(folder), pattern="*", text_field="text")
    fetch_corpus(fetch, out / "raw")
    params = CollectParams(on_bad_record="stop", val_share=val_share, max_documents=max_documents)
    return collect_documents(read_inputs(out / "raw"), params, out, track=untracked)


def rows(out: Path, split: str) -> list[dict[str, object]]:
    return pq.read_table(out / f"{split}.parquet").to_pylist()


def lay(folder: Path, files: dict[str, list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in files.items():
        lines = (f'{{"text": "{text}"}}\n' for text in texts)
        (folder / name).write_text("".join(lines))
    return folder


HUNDRED = [f"document {number}" for number in range(100)]


def test_every_record_is_counted_once_and_keeps_its_number(tmp_path: Path) -> None:
    # BR-05
    folder = lay(tmp_path / "in", {"a.jsonl": ["a", "", "   ", "b", "\u200b\u2060", "a", "c"]})
    (folder / "b.jsonl").write_text('{"text": null}\n{"text": "d"}\n')
    counts = collect(folder, tmp_path / "out", val_share=0.5)
    assert (counts.read, counts.null, counts.blank, counts.duplicates) == (9, 1, 3, 1)
    kept = sorted(
        (row["doc_id"], row["text"], row["source"])
        for split in ("train", "val")
        for row in rows(tmp_path / "out", split)
    )
    assert kept == [
        (0, "a", "a.jsonl:1"),
        (3, "b", "a.jsonl:4"),
        (6, "c", "a.jsonl:7"),
        (8, "d", "b.jsonl:2"),
    ]
    assert counts.read == counts.null + counts.blank + counts.duplicates + sum(
        counts.documents.values()
    )


def test_splits_are_a_partition_by_content_whatever_the_order(tmp_path: Path) -> None:
    # BR-07
    one = lay(tmp_path / "one", {"a.jsonl": HUNDRED})
    other = lay(tmp_path / "other", {"z.jsonl": HUNDRED[:50][::-1], "a.jsonl": HUNDRED[50:]})
    for name, folder in (("x", one), ("y", other)):
        collect(folder, tmp_path / name, val_share=0.1)
    for split in ("train", "val"):
        texts = [{row["text"] for row in rows(tmp_path / name, split)} for name in "xy"]
        assert texts[0] == texts[1]
    train, val = ({row["text"] for row in rows(tmp_path / "x", s)} for s in ("train", "val"))
    assert train & val == set()
    assert train | val == set(HUNDRED)


def test_a_document_is_held_out_when_its_hash_is_below_the_share(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    counts = collect(folder, tmp_path / "out", val_share=0.2)
    for split, held in (("train", False), ("val", True)):
        for row in rows(tmp_path / "out", split):
            sha256 = hashlib.sha256(str(row["text"]).encode()).hexdigest()
            assert row["sha256"] == sha256
            assert (int(sha256, 16) / 2**256 < 0.2) == held
            assert row["n_bytes"] == len(str(row["text"]))
    assert counts.documents == {s: len(rows(tmp_path / "out", s)) for s in ("train", "val")}


def test_copies_over_several_files_are_dropped_and_the_first_stays(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"b.jsonl": HUNDRED, "a.jsonl": ["x", *HUNDRED[:10]]})
    counts = collect(folder, tmp_path / "out")
    assert counts.duplicates == 10
    sources = [str(r["source"]) for s in ("train", "val") for r in rows(tmp_path / "out", s)]
    assert sum(source.startswith("a.jsonl") for source in sources) == 11


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    contents = []
    for name in ("x", "y"):
        collect(folder, tmp_path / name)
        contents.append([(tmp_path / name / f"{s}.parquet").read_bytes() for s in ("train", "val")])
    assert contents[0] == contents[1]
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == [
        "raw",
        "train.parquet",
        "val.parquet",
    ]


def test_limit_keeps_the_first_usable_documents(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": ["", *HUNDRED]})
    counts = collect(folder, tmp_path / "out", max_documents=20)
    texts = {row["text"] for split in ("train", "val") for row in rows(tmp_path / "out", split)}
    assert texts == set(HUNDRED[:20])
    assert counts.read == 21


def test_file_that_changed_since_it_was_recorded_is_refused(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    fetch = FetchParams(source="files", path=str(folder), pattern="*", text_field="text")
    fetch_corpus(fetch, tmp_path / "raw")
    params = CollectParams(on_bad_record="stop", val_share=0.3, max_documents=None)
    lay(folder, {"a.jsonl": [*HUNDRED[:-1], "document 9x"]})
    with pytest.raises(InputError, match="run stages/fetch_corpus") as refused:
        collect_documents(read_inputs(tmp_path / "raw"), params, tmp_path / "out", track=untracked)
    assert "a.jsonl" in str(refused.value)
    (folder / "a.jsonl").unlink()
    with pytest.raises(InputError, match="got no such fi"):
        collect_documents(read_inputs(tmp_path / "raw"), params, tmp_path / "out", track=untracked)


def test_split_that_comes_out_empty_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/book.txt").write_text("One long text.")
    with pytest.raises(InputError, match=r"none of 1 in val; add documents \(a .txt file is one"):
        collect(tmp_path / "in", tmp_path / "out", val_share=0.01)
    assert not list((tmp_path / "out").glob("*.parquet*"))
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_corpus_without_a_usable_document_is_refused(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": ["", "  "]})
    with pytest.raises(InputError, match="no usable documents among 2 records"):
        collect(folder, tmp_path / "out")


def test_bad_record_stops_before_anything_is_written(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    (folder / "b.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"^b\.jsonl:1: "):
        collect(folder, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_texts_come_back_in_order(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    collect(folder, tmp_path / "out")
    texts = list(read_texts(tmp_path / "out/train.parquet", track=untracked))
    assert texts == [row["text"] for row in rows(tmp_path / "out", "train")]
    assert texts == sorted(texts, key=HUNDRED.index)
    with pytest.raises(InputError, match="run stages/collect_documents"):
        list(read_texts(tmp_path / "none.parquet", track=untracked))
