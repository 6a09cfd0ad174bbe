"""How do documents lie on disk as ids, so that any reader finds every one of them again?

A shard is nothing but ids, little-endian ``uint16`` or ``uint32`` by the size of the whole
vocabulary; each document is followed by the end-of-text id and none runs over a shard's edge. What
else there is to know stands beside them: where each document lies in ``documents.parquet``, how
many bytes of text each id stands for in ``token_bytes.bin``, and in ``manifest.json`` all sizes and
hashes. The folder is written whole; without a manifest it is incomplete, whatever lies in it.
"""

import hashlib
import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from canvaslm.corpus.documents import SPLITS, read_documents
from canvaslm.corpus.manifest import (
    FORMAT_VERSION,
    ID_TYPES,
    MANIFEST,
    PLACE_COLUMNS,
    PLACES,
    TOKEN_BYTES,
    Manifest,
    Shard,
    read_manifest,
)
from canvaslm.corpus.parquet import schema_of
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.errors import InputError
from canvaslm.params import Params
from canvaslm.reporting.files import whole_directory, write_json
from canvaslm.reporting.progress import Track

_BATCH_DOCUMENTS = 256
_FOLDER_HOLDS = (MANIFEST, PLACES, TOKEN_BYTES, *SPLITS)


class PackParams(Params):
    """How ids are laid into shards."""

    shard_tokens: int = Field(
        ge=1, description="tokens in a shard at most; a longer document gets one of its own"
    )
    n_threads: int = Field(ge=1, description="threads that encode; they change only the time")


def pack_shards(
    documents_dir: Path, tokenizer: Tokenizer, params: PackParams, out_dir: Path, *, track: Track
) -> Manifest:
    """Encode all documents and write the shards, the tables beside them, and the manifest.

    Args:
        documents_dir: holds ``train.parquet`` and ``val.parquet``.
        tokenizer: gives the ids.
        params: the section ``pack_shards``.
        out_dir: ``data/shards``; what an earlier run left there is replaced when all else is done.
        track: shows documents done.

    Raises:
        InputError: a split is missing, empty or damaged, an id does not fit the vocabulary, or
            ``out_dir`` holds files of others.
    """
    with whole_directory(out_dir, holds=_FOLDER_HOLDS) as aside:
        _fill(aside, documents_dir, tokenizer, params, track)
    return read_manifest(out_dir)


def _fill(
    out_dir: Path, documents_dir: Path, tokenizer: Tokenizer, params: PackParams, track: Track
) -> None:
    id_type = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    splits: dict[str, list[Shard]] = {}
    places: list[dict[str, Any]] = []
    for split in SPLITS:
        (out_dir / split).mkdir()
        writer = _SplitWriter(out_dir, split, ID_TYPES[id_type], params.shard_tokens)
        for row, ids in _encode(documents_dir / f"{split}.parquet", tokenizer, params, track):
            writer.add(row, _with_end(ids, tokenizer, row["source"]))
        splits[split], split_places = writer.finish()
        places += split_places
    sizes = _text_bytes_by_id(tokenizer)
    write_json(
        out_dir / MANIFEST,
        {
            "format_version": FORMAT_VERSION,
            "dtype": id_type,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
            "tokenizer_sha256": tokenizer.sha256,
            "documents_sha256": _write_hashed(out_dir / PLACES, _to_parquet(places)),
            "token_bytes_sha256": _write_hashed(out_dir / TOKEN_BYTES, sizes.tobytes()),
            "splits": {s: [shard.model_dump() for shard in shards] for s, shards in splits.items()},
        },
    )


def _encode(
    path: Path, tokenizer: Tokenizer, params: PackParams, track: Track
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Each document's row and ids, in the order of the file."""
    rows = read_documents(path, track=track)
    while batch := list(islice(rows, _BATCH_DOCUMENTS)):
        ids = tokenizer.encode_many([row["text"] for row in batch], n_threads=params.n_threads)
        yield from zip(batch, ids, strict=True)


def _with_end(ids: np.ndarray, tokenizer: Tokenizer, source: str) -> np.ndarray:
    """A document's ids and the end of text, all within the vocabulary, before any cast."""
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if wrong.size:
        raise InputError(
            source,
            expected=f"ids 0..{tokenizer.vocab_size - 1}",
            got=f"id {wrong[0]}",
            fix="run stages/train_tokenizer.py again",
        )
    return np.append(ids, tokenizer.eot_id)


class _SplitWriter:
    """Lays documents into shards one after the other and notes where each lies."""

    def __init__(self, out_dir: Path, split: str, id_type: np.dtype, shard_tokens: int) -> None:
        self._out_dir, self._split = out_dir, split
        self._id_type, self._shard_tokens = id_type, shard_tokens
        self._shards: list[Shard] = []
        self._places: list[dict[str, Any]] = []
        self._open: list[np.ndarray] = []
        self._tokens = self._text_bytes = 0

    def add(self, row: dict[str, Any], ids: np.ndarray) -> None:
        """Append a document to the open shard, or to a new one where it does not fit."""
        if self._open and self._tokens + ids.size > self._shard_tokens:
            self._close_shard()
        self._places.append(
            {
                "doc_id": row["doc_id"],
                "split": self._split,
                "shard": len(self._shards),
                "first_token": self._tokens,
                "n_tokens": ids.size,
                "n_bytes": row["n_bytes"],
            }
        )
        self._open.append(ids.astype(self._id_type))
        self._tokens += ids.size
        self._text_bytes += row["n_bytes"]

    def finish(self) -> tuple[list[Shard], list[dict[str, Any]]]:
        self._close_shard()
        return self._shards, self._places

    def _close_shard(self) -> None:
        name = f"{self._split}/shard_{len(self._shards):05d}.bin"
        content = np.concatenate(self._open).tobytes()
        shard = Shard(
            file=name,
            tokens=self._tokens,
            documents=len(self._open),
            text_bytes=self._text_bytes,
            sha256=_write_hashed(self._out_dir / name, content),
        )
        self._shards.append(shard)
        self._open, self._tokens, self._text_bytes = [], 0, 0


def _text_bytes_by_id(tokenizer: Tokenizer) -> np.ndarray:
    sizes = np.array([len(token) for token in tokenizer.token_bytes], dtype="<u4")
    sizes[tokenizer.eot_id] = 0
    return sizes


def _to_parquet(places: list[dict[str, Any]]) -> bytes:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    buffer = io.BytesIO()
    table = Table.from_pylist(places, schema=schema_of(PLACE_COLUMNS))
    write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _write_hashed(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()
