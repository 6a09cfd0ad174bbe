import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
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
    raw = out.with_name(f"{out.name}-raw")
    fetch_corpus(fetch, raw)
    params = CollectParams(on_bad_record="stop", val_share=val_share, max_documents=max_documents)
    return collect_documents(read_inputs(raw), params, out, track=untracked)


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
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["train.parquet", "val.parquet"]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out-raw"]


def test_corpus_without_a_usable_document_is_refused(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": ["", "  "]})
    with pytest.raises(InputError, match="no usable documents among 2 records"):
        collect(folder, tmp_path / "out")


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_bad_record_leaves_the_documents_that_were_there(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    collect(folder, tmp_path / "out")
    before = contents(tmp_path / "out")
    (folder / "b.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"^b\.jsonl:1: "):
        collect(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out-raw"]


def test_folder_that_holds_something_else_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"got 'thesis\.txt'; move that away"):
        collect(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == {"thesis.txt": b"mine"}


KILLED = """
import os, signal, sys
from pathlib import Path
import pyarrow.parquet as pq
from canvaslm.corpus.documents import CollectParams, collect_documents
from canvaslm.corpus.fetch import read_inputs
from canvaslm.reporting.progress import untracked
place, at = sys.argv[1], int(sys.argv[2])
calls = 0
def die_at(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
os.fsync, os.rename = die_at(os.fsync), die_at(os.rename)
pq.ParquetWriter.close = die_at(pq.ParquetWriter.close)
params = CollectParams(on_bad_record="stop", val_share=0.3, max_documents=None)
collect_documents(read_inputs(Path(place + "-raw")), params, Path(place), track=untracked)
"""


@pytest.mark.parametrize("at", [2, 5, 6, 7, 8])
def test_killed_run_leaves_the_old_documents_or_none_and_a_rerun_gives_the_clean_bytes(
    tmp_path: Path, at: int
) -> None:
    # BR-10; 2 closes, 3 flushes, the rename of the old folder and of the new one, and a flush
    out = tmp_path / "out"
    collect(lay(tmp_path / "in", {"a.jsonl": HUNDRED[:50]}), out)
    old = contents(out)
    collect(lay(tmp_path / "in", {"a.jsonl": HUNDRED}), tmp_path / "clean")
    new = contents(tmp_path / "clean")
    (tmp_path / "out-raw").rename(tmp_path / "unused")
    (tmp_path / "clean-raw").rename(tmp_path / "out-raw")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", KILLED, str(out), str(at)]
    killed = subprocess.run(command, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    if at < 7:
        assert contents(out) == old
    elif at == 7:
        with pytest.raises(InputError, match="run stages/collect_documents"):
            list(read_texts(out / "train.parquet", track=untracked))
    else:
        assert contents(out) == new
    subprocess.run([*command[:-1], "0"], env=environment, check=True)
    assert contents(out) == new
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_texts_come_back_in_order(tmp_path: Path) -> None:
    folder = lay(tmp_path / "in", {"a.jsonl": HUNDRED})
    collect(folder, tmp_path / "out")
    texts = list(read_texts(tmp_path / "out/train.parquet", track=untracked))
    assert texts == [row["text"] for row in rows(tmp_path / "out", "train")]
    assert texts == sorted(texts, key=HUNDRED.index)
    with pytest.raises(InputError, match="run stages/collect_documents"):
        list(read_texts(tmp_path / "none.parquet", track=untracked))


def another_text(table: pa.Table) -> pa.Table:
    texts = pa.array(["changed", *table["text"].to_pylist()[1:]])
    return table.set_column(2, "text", texts)


def a_null(table: pa.Table) -> pa.Table:
    return table.set_column(1, "source", pa.array([None, *table["source"].to_pylist()[1:]]))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (another_text, r"document \d+: expected the text that was collected"),
        (a_null, "a null in column 'source'"),
        (lambda table: table.drop_columns(["n_bytes"]), "got columns doc_id int64, source string"),
        (lambda table: table.set_column(2, "text", table["doc_id"]), "text int64"),
        (lambda table: table.slice(0, 0), "documents in the split, got none"),
    ],
)
def test_documents_that_are_not_those_collected_are_refused(
    tmp_path: Path, damage: Callable[[pa.Table], pa.Table], told: str
) -> None:
    collect(lay(tmp_path / "in", {"a.jsonl": HUNDRED}), tmp_path / "out")
    path = tmp_path / "out/train.parquet"
    pq.write_table(damage(pq.read_table(path)), path)
    with pytest.raises(InputError, match=told):
        list(read_texts(path, track=untracked))


def test_no_flipped_byte_gives_another_text(tmp_path: Path) -> None:
    collect(lay(tmp_path / "in", {"a.jsonl": HUNDRED}), tmp_path / "out")
    path = tmp_path / "out/train.parquet"
    whole, good = path.read_bytes(), list(read_texts(path, track=untracked))
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(InputError):
            assert list(read_texts(path, track=untracked)) == good
