"""Which texts are in the corpus, and which of them are held out?

Every record of every file is counted once: null, blank, a copy of an earlier text, or a document of
one split. A document is held out when the hash of its text, read as a fraction of 1, is below
``val_share``: a property of the text alone, so that two copies never stand on both sides and a new
document never moves an old one.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from canvaslm.corpus.fetch import InputFile, Inputs, hash_file
from canvaslm.corpus.parquet import open_parquet, schema_of
from canvaslm.corpus.records import Record, read_records
from canvaslm.errors import InputError
from canvaslm.params import Params
from canvaslm.reporting.progress import Track

SPLITS = ("train", "val")
_COLUMNS = {
    "doc_id": "int64",
    "source": "string",
    "text": "string",
    "n_bytes": "int64",
    "sha256": "string",
}
_ROW_GROUP_BYTES = 16 << 20
_READ_ROWS = 256
# Characters with no width that str.strip does not take away.
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


class CollectParams(Params):
    """How documents are read and split."""

    on_bad_record: Literal["stop"] = Field(description="stop at the first record that is not good")
    val_share: float = Field(gt=0, lt=1, description="share of documents to hold out")
    max_documents: int | None = Field(ge=1, description="keep at most so many; null keeps all")


@dataclass(kw_only=True)
class DocumentCounts:
    """What became of every record: read = nulls + blank + duplicates + kept in each split."""

    read: int = 0
    null: int = 0
    blank: int = 0
    duplicates: int = 0
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


def collect_documents(
    inputs: Inputs, params: CollectParams, out_dir: Path, *, track: Track
) -> DocumentCounts:
    """Read all files in order and write ``train.parquet`` and ``val.parquet``.

    A document's ``doc_id`` is its record's number over all files in their order, blank ones and
    duplicates included; the first of several equal texts is the one that stays.

    Args:
        inputs: the recorded files; a file that has changed since is refused.
        params: the section ``collect_documents``.
        out_dir: ``data/documents``.
        track: shows files done.

    Raises:
        InputError: a file changed or cannot be read, a record is bad, no document is usable, or
            one of the two splits comes out empty.
    """
    counts = DocumentCounts()
    out_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_Writer(out_dir, split)) for split in SPLITS}
        records = _read_inputs(inputs, track)
        for row in _keep(records, counts, params.max_documents):
            split = _split_of(row["sha256"], params.val_share)
            counts.documents[split] += 1
            counts.text_bytes[split] += row["n_bytes"]
            writers[split].add(row)
        _refuse_empty(inputs, counts, params)
        for writer in writers.values():
            writer.finish()
    return counts


def read_texts(path: Path, *, track: Track) -> Iterator[str]:
    """The texts of one split's documents, in their order.

    Raises:
        InputError: the split cannot be read.
    """
    fix = "run stages/collect_documents.py"
    with open_parquet(path, str(path), "a split's documents", fix) as file:
        batches = file.iter_batches(batch_size=_READ_ROWS, columns=["text"])
        texts = (value.as_py() for batch in batches for value in batch.column("text"))
        yield from track(texts, total=file.metadata.num_rows, label="documents")


def _read_inputs(inputs: Inputs, track: Track) -> Iterator[Record]:
    """All records of all files, each file checked against its recorded hash first."""
    for file in track(inputs.files, total=len(inputs.files), label="files"):
        path = inputs.root / file.path
        _check_unchanged(path, file)
        yield from read_records(
            path, name=file.path, kind=file.format, text_field=inputs.text_field
        )


def _check_unchanged(path: Path, file: InputFile) -> None:
    got = hash_file(path) if path.is_file() else "no such file"
    if got != file.sha256:
        raise InputError(
            path,
            expected=f"the recorded content (sha256 {file.sha256[:12]})",
            got=got[:12],
            fix="run stages/fetch_corpus.py again",
        )


def _keep(
    records: Iterator[Record], counts: DocumentCounts, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Rows of the usable documents; everything else is counted."""
    seen: set[bytes] = set()
    for doc_id, record in enumerate(records):
        counts.read += 1
        if record.text is None:
            counts.null += 1
            continue
        if not record.text.translate(_INVISIBLE).strip():
            counts.blank += 1
            continue
        content = record.text.encode()
        digest = hashlib.sha256(content)
        if digest.digest() in seen:
            counts.duplicates += 1
            continue
        seen.add(digest.digest())
        yield {
            "doc_id": doc_id,
            "source": record.place,
            "text": record.text,
            "n_bytes": len(content),
            "sha256": digest.hexdigest(),
        }
        if len(seen) == limit:
            return


def _split_of(sha256: str, val_share: float) -> str:
    """Val when the hash, as a fraction of 1, is below the share."""
    return "val" if int(sha256[:16], 16) / 2.0**64 < val_share else "train"


def _refuse_empty(inputs: Inputs, counts: DocumentCounts, params: CollectParams) -> None:
    """Both splits need at least one document."""
    kept = sum(counts.documents.values())
    if kept == 0:
        raise InputError(
            inputs.root,
            expected="at least one document",
            got=f"no usable documents among {counts.read} records ({counts.null} null, "
            f"{counts.blank} blank)",
            fix="check fetch_corpus.path, pattern and text_field",
        )
    for split, number in counts.documents.items():
        if number == 0:
            raise InputError(
                inputs.root,
                expected=f"documents in both splits at val_share {params.val_share}",
                got=f"none of {kept} in {split}",
                fix="add documents (a .txt file is one document, a line of .jsonl is one), or "
                "change collect_documents.val_share",
            )


class _Writer:
    """One split's Parquet file: rows go aside and the file takes its name when it is whole."""

    def __init__(self, out_dir: Path, split: str) -> None:
        self._path = out_dir / f"{split}.parquet"
        self._aside = out_dir / f".{split}.parquet.partial"
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def __enter__(self) -> "_Writer":
        from pyarrow.parquet import ParquetWriter

        self._schema = schema_of(_COLUMNS)
        self._file = ParquetWriter(self._aside, self._schema, compression="zstd")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file.is_open:
            self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._bytes += row["n_bytes"]
        if self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._file.close()
        self._aside.replace(self._path)

    def _flush(self) -> None:
        from pyarrow import Table

        if self._rows:
            self._file.write_table(Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0
