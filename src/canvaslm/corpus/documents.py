"""Which texts are in the corpus, and which of them are held out?

Every record of every file is counted once: null, blank, a copy of an earlier text, or a document of
one split. A document is held out when the hash of its text, read as a fraction of 1, is below
``val_share``: a property of the text alone, so that two copies never stand on both sides and a new
document never moves an old one.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from canvaslm.corpus.fetch import InputFile, Inputs, hash_file
from canvaslm.corpus.parquet import checked_batches, open_table, schema_of
from canvaslm.corpus.records import Record, read_records
from canvaslm.errors import InputError
from canvaslm.params import Params
from canvaslm.reporting.files import whole_directory
from canvaslm.reporting.progress import Track

SPLITS = ("train", "val")
_COLUMNS = {
    "doc_id": "int64",
    "source": "string",
    "text": "string",
    "n_bytes": "int64",
    "sha256": "string",
}
_FOLDER_HOLDS = tuple(f"{split}.parquet" for split in SPLITS)
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
        out_dir: ``data/documents``; replaced when both files are whole.
        track: shows files done.

    Raises:
        InputError: a file changed or cannot be read, a record is bad, no document is usable, one
            of the two splits comes out empty, a drawn document was dropped, or ``out_dir`` holds
            files of others.
    """
    counts = DocumentCounts()
    with whole_directory(out_dir, holds=_FOLDER_HOLDS) as aside, ExitStack() as stack:
        writers = {split: stack.enter_context(_Writer(aside, split)) for split in SPLITS}
        records = _read_inputs(inputs, track)
        for row in _keep(records, counts, params.max_documents):
            split = _split_of(row["sha256"], params.val_share)
            counts.documents[split] += 1
            counts.text_bytes[split] += row["n_bytes"]
            writers[split].add(row)
        if inputs.source == "markov":
            _refuse_lost(inputs, counts)
        _refuse_empty(inputs, counts, params)
        for writer in writers.values():
            writer.finish()
    return counts


def read_documents(path: Path, *, track: Track) -> Iterator[dict[str, Any]]:
    """The documents of one split in their order.

    Yields:
        Rows with ``doc_id``, ``source``, ``text``, ``n_bytes`` and ``sha256``.

    Raises:
        InputError: the split cannot be read, has no documents, or a text is not the one that was
            collected.
    """
    fix = "run stages/collect_documents.py again"
    with open_table(path, _COLUMNS, "a split's documents", fix) as file:
        if file.metadata.num_rows == 0:
            raise InputError(
                path,
                expected="documents in the split",
                got="none",
                fix="change collect_documents.val_share or add documents",
            )
        batches = checked_batches(file, tuple(_COLUMNS), _READ_ROWS)
        rows = (row for batch in batches for row in batch.to_pylist())
        for row in track(rows, total=file.metadata.num_rows, label=f"{path.stem} documents"):
            _check_document(row, path, fix)
            yield row


def read_texts(path: Path, *, track: Track) -> Iterator[str]:
    """The texts of one split's documents, in their order.

    Raises:
        InputError: as :func:`read_documents`.
    """
    for row in read_documents(path, track=track):
        yield row["text"]


def _check_document(row: dict[str, Any], path: Path, fix: str) -> None:
    content = row["text"].encode()
    got = hashlib.sha256(content).hexdigest()
    if (got, len(content)) != (row["sha256"], row["n_bytes"]):
        raise InputError(
            f"{path}:document {row['doc_id']}",
            expected=f"the text that was collected (sha256 {row['sha256'][:12]})",
            got=got[:12],
            fix=fix,
        )


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
    only = inputs.files[0].path if len(inputs.files) == 1 else ""
    where = inputs.root / only
    kept = sum(counts.documents.values())
    if kept == 0:
        raise InputError(
            where,
            expected="at least one document",
            got=f"no usable documents among {counts.read} records ({counts.null} null, "
            f"{counts.blank} blank)",
            fix="check fetch_corpus.path, pattern and text_field",
        )
    for split, number in counts.documents.items():
        if number == 0:
            raise InputError(
                where,
                expected=f"documents in both splits at val_share {params.val_share}",
                got=f"none of {kept} in {split}",
                fix="add documents (a .txt file is one document, a line of .jsonl is one), or "
                "change collect_documents.val_share",
            )


def _refuse_lost(inputs: Inputs, counts: DocumentCounts) -> None:
    """Documents of a known law follow it only as long as none is dropped for what it says.

    Copies cannot be kept instead: they would stand on both sides of the split, or the split would
    no longer be a property of the text.
    """
    if counts.duplicates or counts.blank or counts.null:
        raise InputError(
            inputs.root / inputs.files[0].path,
            expected="drawn documents that all differ, since without the others they have no "
            "known law",
            got=f"{counts.duplicates} copies and {counts.blank + counts.null} blank ones among "
            f"{counts.read}",
            fix="raise symbols_per_document in the recipe and run stages/fetch_corpus.py again",
        )


class _Writer:
    """One split's Parquet file; rows are gathered into groups of some size."""

    def __init__(self, out_dir: Path, split: str) -> None:
        self._path = out_dir / f"{split}.parquet"
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def __enter__(self) -> "_Writer":
        from pyarrow.parquet import ParquetWriter

        self._schema = schema_of(_COLUMNS)
        self._file = ParquetWriter(self._path, self._schema, compression="zstd")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file.is_open:
            with suppress(OSError):  # what the writing has raised says more
                self._file.close()

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._bytes += row["n_bytes"]
        if self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        from pyarrow import Table

        if self._rows:
            self._file.write_table(Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0
