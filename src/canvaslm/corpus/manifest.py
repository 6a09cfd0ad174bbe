"""What is in a folder of shards, by its own account?

``manifest.json`` is written last, by rename: without it the folder is incomplete, whatever lies in
it. It holds sizes and hashes of all the other files: the shards, the table of where each document
lies, and the bytes of text that each id stands for.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canvaslm.corpus.documents import SPLITS
from canvaslm.corpus.parquet import open_parquet
from canvaslm.errors import InputError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PLACES = "documents.parquet"
TOKEN_BYTES = "token_bytes.bin"
ID_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of ids: its name below the folder, what is in it, and the hash of its bytes."""

    file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a reader must know about a folder of shards; ``sha256`` is of the file itself."""

    format_version: int
    dtype: str
    vocab_size: int
    eot_id: int
    tokenizer_sha256: str
    documents_sha256: str
    token_bytes_sha256: str
    splits: dict[str, tuple[Shard, ...]]
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
                fix="run stages/pack_shards.py again",
            )
    return manifest


def parse_manifest(shards_dir: Path) -> Manifest:
    """Read the manifest without looking at the files that it speaks of.

    Raises:
        InputError: there is no whole manifest, or it is of another format.
    """
    path = shards_dir / MANIFEST
    try:
        content = path.read_bytes()
        fields = json.loads(content)
        version = fields["format_version"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise InputError(
            path,
            expected="the manifest of a complete dataset",
            got="an incomplete dataset (no whole manifest)",
            fix="run stages/pack_shards.py",
        ) from None
    if version != FORMAT_VERSION:
        raise InputError(
            path,
            expected=f"format_version {FORMAT_VERSION}",
            got=repr(version),
            fix="run stages/pack_shards.py again",
        )
    splits = {s: tuple(Shard(**shard) for shard in fields["splits"][s]) for s in SPLITS}
    return Manifest(**fields | {"splits": splits, "sha256": hashlib.sha256(content).hexdigest()})


def read_places(shards_dir: Path, split: str) -> dict[str, np.ndarray]:
    """Where the documents of a split lie, in their order.

    Returns:
        ``doc_id``, ``shard``, ``first_token``, ``n_tokens`` (the end of text included) and
        ``n_bytes``, each (documents,) int64.

    Raises:
        InputError: the table cannot be read.
    """
    path = shards_dir / PLACES
    fix = "run stages/pack_shards.py again"
    with open_parquet(path, str(path), "the table of documents", fix) as file:
        table = file.read()
    here = np.array(table["split"]) == split
    return {name: np.array(table[name])[here] for name in table.column_names if name != "split"}


def read_token_bytes(shards_dir: Path) -> np.ndarray:
    """Bytes of text that each id stands for, (V,) int64; 0 for the end of text."""
    return np.fromfile(shards_dir / TOKEN_BYTES, dtype="<u4").astype(np.int64)
