"""Do the files hold what the manifest and the tables say?

Sizes and hashes, ids, ends of text, and the place and the bytes of every document are counted again
from the files. A fault names the shard, the offset in tokens where it is known, and the reason.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvaslm.corpus.documents import SPLITS
from canvaslm.corpus.fetch import hash_file
from canvaslm.corpus.manifest import Manifest, Shard, read_places, read_token_bytes
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.layout import Layout
from canvaslm.reporting.progress import Track


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, and where: ``offset`` in tokens within the shard, None where unknown."""

    shard: str
    offset: int | None
    reason: str

    def __str__(self) -> str:
        place = self.shard if self.offset is None else f"{self.shard} at token {self.offset}"
        return f"{place}: {self.reason}"


def check_agreement(
    shards_dir: Path, manifest: Manifest, tokenizer: Tokenizer, layout: Layout
) -> list[Fault]:
    """Manifest, tokenizer, layout and the two tables must speak of the same thing."""
    pairs = [
        ("tokenizer sha256", manifest.tokenizer_sha256, tokenizer.sha256),
        ("end-of-text id", manifest.eot_id, tokenizer.eot_id),
        ("vocabulary size of the tokenizer", manifest.vocab_size, tokenizer.vocab_size),
        ("layout.vocab_size", manifest.vocab_size, layout.vocab_size),
    ]
    tables = {
        "documents.parquet": manifest.documents_sha256,
        "token_bytes.bin": manifest.token_bytes_sha256,
    }
    for name, expected in tables.items():
        path = shards_dir / name
        pairs.append((name, expected, hash_file(path) if path.is_file() else "no such file"))
    return [
        Fault(shard="manifest.json", offset=None, reason=f"{what}: {said} there, but {found} here")
        for what, said, found in pairs
        if said != found
    ]


def check_shards(shards_dir: Path, manifest: Manifest, track: Track) -> list[Fault]:
    """Every shard against its entry and against the table of documents."""
    token_bytes = read_token_bytes(shards_dir)
    faults: list[Fault] = []
    shards = [(s, n, shard) for s in SPLITS for n, shard in enumerate(manifest.splits[s])]
    places = {split: read_places(shards_dir, split) for split in SPLITS}
    for split, number, shard in track(shards, total=len(shards), label="shards"):
        fault = _check_file(shards_dir / shard.file, shard, manifest)
        if fault is None:
            mine = places[split]["shard"] == number
            here = {name: column[mine] for name, column in places[split].items()}
            ids = read_ids(shards_dir, shard, manifest)
            fault = _check_ids(ids, shard, manifest, here, token_bytes)
        if fault is not None:
            faults.append(fault)
    return faults


def _check_file(path: Path, shard: Shard, manifest: Manifest) -> Fault | None:
    """Size first, since a cut file says more than a hash that differs."""
    expected = shard.tokens * manifest.id_type.itemsize
    got = path.stat().st_size if path.is_file() else None
    if got is None:
        return Fault(shard=shard.file, offset=None, reason="no such file")
    if got != expected:
        offset = min(got, expected) // manifest.id_type.itemsize
        return Fault(
            shard=shard.file, offset=offset, reason=f"expected {expected} bytes, got {got}"
        )
    found = hash_file(path)
    if found != shard.sha256:
        return Fault(
            shard=shard.file,
            offset=None,
            reason=f"expected sha256 {shard.sha256}, got {found}",
        )
    return None


def _check_ids(
    ids: np.ndarray,
    shard: Shard,
    manifest: Manifest,
    places: dict[str, np.ndarray],
    token_bytes: np.ndarray,
) -> Fault | None:
    """The first id, end of text or document that is not where it should be."""

    def fault(offset: Any, reason: str) -> Fault:
        return Fault(shard=shard.file, offset=int(offset), reason=reason)

    wrong = np.flatnonzero(ids >= manifest.vocab_size)
    if wrong.size:
        return fault(wrong[0], f"id {ids[wrong[0]]} is not below {manifest.vocab_size}")
    first, n_tokens = places["first_token"], places["n_tokens"]
    if len(first) != shard.documents or int(n_tokens.sum()) != shard.tokens:
        return fault(0, f"the table has {len(first)} documents, the manifest {shard.documents}")
    if n_tokens.min() < 1 or not np.array_equal(first, np.cumsum(n_tokens) - n_tokens):
        return fault(0, "documents of the table do not follow each other")
    ends, expected = np.flatnonzero(ids == manifest.eot_id), first + n_tokens - 1
    if not np.array_equal(ends, expected):
        odd = np.setxor1d(ends, expected)
        count = f"{len(ends)} ends of text for {shard.documents} documents"
        moved = "an end of text where the table has none, or none where it has one"
        return fault(odd[0], moved if len(ends) == shard.documents else count)
    found = np.add.reduceat(token_bytes[ids], first)
    differing = np.flatnonzero(found != places["n_bytes"])
    if differing.size:
        number = differing[0]
        said = places["n_bytes"][number]
        return fault(first[number], f"document of {said} bytes has tokens of {found[number]}")
    if int(found.sum()) != shard.text_bytes:
        return fault(0, f"{shard.text_bytes} bytes of text in the manifest, {found.sum()} here")
    return None


def read_ids(shards_dir: Path, shard: Shard, manifest: Manifest) -> np.ndarray:
    """The ids of a shard, (tokens,), through a read-only memory map."""
    return np.memmap(shards_dir / shard.file, dtype=manifest.id_type, mode="r")
