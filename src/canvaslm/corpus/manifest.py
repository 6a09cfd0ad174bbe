"""What is in a folder of shards, by its own account?

``manifest.json`` is written last, by rename: without it the folder is incomplete, whatever lies in
it. It holds sizes and hashes of all the other files: the shards, the table of where each document
lies, and the bytes of text that each id stands for.
"""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from canvaslm.corpus.documents import SPLITS
from canvaslm.corpus.parquet import checked_batches, open_table, schema_of
from canvaslm.corpus.written import parse_written, read_written
from canvaslm.errors import InputError
from canvaslm.params import Params

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PLACES = "documents.parquet"
TOKEN_BYTES = "token_bytes.bin"
ID_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PLACE_COLUMNS = {
    "doc_id": "int64",
    "split": "string",
    "shard": "int64",
    "first_token": "int64",
    "n_tokens": "int64",
    "n_bytes": "int64",
}
_AGAIN = "run stages/pack_shards.py again"
_READ_ROWS = 1 << 16


class Shard(Params):
    """One file of ids: its name below the folder, what is in it, and the hash of its bytes."""

    file: str = Field(pattern=r"^[a-z]+/shard_[0-9]{5,}\.bin$")
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    text_bytes: int = Field(ge=0)
    sha256: str


class _ManifestFile(Params):
    """What ``manifest.json`` holds."""

    format_version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    eot_id: int = Field(ge=0)
    tokenizer_sha256: str
    documents_sha256: str
    token_bytes_sha256: str
    splits: dict[str, tuple[Shard, ...]]

    @field_validator("splits")
    @classmethod
    def _have_shards(cls, splits: dict[str, tuple[Shard, ...]]) -> dict[str, tuple[Shard, ...]]:
        if set(splits) != set(SPLITS) or not all(splits.values()):
            raise ValueError(f"should be {' and '.join(SPLITS)} with at least one shard each")
        return splits


class Manifest(_ManifestFile):
    """All that a reader must know about a folder of shards; ``sha256`` is of the file itself."""

    sha256: str

    @property
    def id_type(self) -> np.dtype:
        """The type of an id on disk."""
        return ID_TYPES[self.dtype]

    def tokens_in(self, split: str) -> int:
        """Tokens in all shards of a split, ends of text included."""
        return sum(shard.tokens for shard in self.splits[split])


def read_manifest(shards_dir: Path) -> Manifest:
    """Read the manifest of a complete folder whose files have the sizes that it states.

    Raises:
        InputError: the folder is incomplete, of another format, or a file's size disagrees.
    """
    manifest = parse_manifest(shards_dir)
    sizes = {
        shards_dir / shard.file: shard.tokens * manifest.id_type.itemsize
        for shards in manifest.splits.values()
        for shard in shards
    }
    sizes[shards_dir / TOKEN_BYTES] = manifest.vocab_size * 4
    for path, expected in sizes.items():
        got = path.stat().st_size if path.is_file() else None
        if got != expected:
            raise InputError(
                path,
                expected=f"{expected} bytes",
                got="no such file" if got is None else f"{got} bytes",
                fix=_AGAIN,
            )
    return manifest


def parse_manifest(shards_dir: Path) -> Manifest:
    """Read the manifest without looking at the files that it speaks of.

    Raises:
        InputError: there is no whole manifest, or it is of another format.
    """
    path, expected = shards_dir / MANIFEST, "the manifest of a complete dataset"
    content = read_written(
        path, expected=expected, missing="an incomplete dataset (no manifest)", fix=_AGAIN
    )
    fields = parse_written(
        content,
        path,
        _ManifestFile,
        expected=expected,
        broken="that of an incomplete dataset, or of another format",
        fix=_AGAIN,
    )
    return Manifest(**dict(fields), sha256=hashlib.sha256(content).hexdigest())


def read_places(shards_dir: Path, split: str) -> dict[str, np.ndarray]:
    """Where the documents of a split lie, in their order.

    Returns:
        ``doc_id``, ``shard``, ``first_token``, ``n_tokens`` (the end of text included) and
        ``n_bytes``, each (documents,) int64.

    Raises:
        InputError: the table cannot be read, or is not the one that the manifest speaks of.
    """
    import pyarrow as pa

    path = shards_dir / PLACES
    _read_table(path, parse_manifest(shards_dir).documents_sha256)
    with open_table(path, PLACE_COLUMNS, "the table of documents", _AGAIN) as file:
        batches = checked_batches(file, tuple(PLACE_COLUMNS), _READ_ROWS)
        table = pa.Table.from_batches(batches, schema_of(PLACE_COLUMNS))
    here = np.array(table["split"]) == split
    return {name: np.array(table[name])[here] for name in PLACE_COLUMNS if name != "split"}


def read_token_bytes(shards_dir: Path) -> np.ndarray:
    """Bytes of text that each id stands for, (V,) int64; 0 for the end of text.

    Raises:
        InputError: the table cannot be read, or is not the one that the manifest speaks of.
    """
    manifest = parse_manifest(shards_dir)
    content = _read_table(shards_dir / TOKEN_BYTES, manifest.token_bytes_sha256)
    return np.frombuffer(content, dtype="<u4").astype(np.int64)


def _read_table(path: Path, sha256: str) -> bytes:
    """The bytes of a table beside the shards, which must be those that were written."""
    expected = f"the table with sha256 {sha256}"
    content = read_written(path, expected=expected, missing="no such file", fix=_AGAIN)
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        raise InputError(path, expected=expected, got=f"sha256 {got}", fix=_AGAIN)
    return content
