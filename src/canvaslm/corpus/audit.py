"""Are the shards what the manifest says, and is the held-out text really held out?

Everything is counted again from the files: hashes and sizes, ids, ends of text, the place and the
bytes of every document, windows and tails. Then the splits are compared, window by window and by
every run of ``ngram_tokens`` tokens. A fault names the shard, the offset in tokens where it is
known, and the reason; what could not be measured after a fault is null, never 0.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from canvaslm.corpus.documents import SPLITS
from canvaslm.corpus.entropy import entropy_nats
from canvaslm.corpus.integrity import Fault, check_agreement, check_shards, read_ids
from canvaslm.corpus.manifest import Manifest, parse_manifest, read_token_bytes
from canvaslm.corpus.ngrams import NgramSet, ngram_hashes
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.corpus.windows import Windows
from canvaslm.layout import Layout
from canvaslm.params import Params
from canvaslm.reporting.progress import Track

_NGRAM_PIECE = 1 << 20


class AuditParams(Params):
    """What the audit compares and how much it tolerates."""

    ngram_tokens: int = Field(ge=1, description="tokens in a run that is looked up in train")
    max_shared_ngram_share: float = Field(
        ge=0, le=1, description="share of val runs that may also occur in train"
    )
    n_samples: int = Field(ge=0, description="windows of each split to show as text")


@dataclass(frozen=True, kw_only=True)
class WindowAudit:
    """The figures, some windows as text, and every fault that was found."""

    metrics: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]
    faults: list[Fault]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What windows at a stride do with each token: read once, again, skipped, or left as tail."""

    n_windows: int
    tail_tokens: int
    overlap_tokens: int
    skipped: np.ndarray  # (n,) offsets of tokens between windows that none of them reads


def window_coverage(n_tokens: int, *, window_tokens: int, stride: int) -> Coverage:
    """Account for every token of a shard under windows that begin every ``stride`` tokens.

    ``n_windows * window_tokens - overlap_tokens + len(skipped) + tail_tokens == n_tokens``.
    """
    n_windows = max(0, (n_tokens - window_tokens) // stride + 1)
    reads = np.zeros(n_tokens + 1, dtype=np.int64)
    starts = np.arange(n_windows) * stride
    np.add.at(reads, starts, 1)
    np.add.at(reads, starts + window_tokens, -1)
    reads = np.cumsum(reads[:-1])
    last_end = int(starts[-1]) + window_tokens if n_windows else 0
    tail_start = min(n_tokens, max(n_windows * stride, last_end))
    return Coverage(
        n_windows=n_windows,
        tail_tokens=n_tokens - tail_start,
        overlap_tokens=int(np.maximum(reads - 1, 0).sum()),
        skipped=np.flatnonzero(reads[:tail_start] == 0),
    )


def audit_windows(
    shards_dir: Path, tokenizer: Tokenizer, params: AuditParams, layout: Layout, *, track: Track
) -> WindowAudit:
    """Count everything again and compare the splits.

    Args:
        shards_dir: ``data/shards``.
        tokenizer: the one that the shards should have been made with.
        params: the section ``audit_windows``.
        layout: gives T and V.
        track: shows shards done.

    Raises:
        InputError: the folder has no manifest at all, or no window fits into a split.
    """
    manifest = parse_manifest(shards_dir)
    faults = check_agreement(shards_dir, manifest, tokenizer, layout)
    if not faults:
        faults = check_shards(shards_dir, manifest, track)
    metrics: dict[str, Any] = {
        "manifest_sha256": manifest.sha256,
        "ln_vocab_nats": math.log(manifest.vocab_size),
        "vocab_size": manifest.vocab_size,
        "window_tokens": layout.window_tokens,
        "ngram_tokens": params.ngram_tokens,
        "shared_windows": None,
        "shared_ngram_share": None,
    }
    samples: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    if not faults:
        both = {split: Windows(shards_dir, split, layout.window_tokens) for split in SPLITS}
        for split, windows in both.items():
            metrics[split] = _measure(shards_dir, windows)
            samples[split] = _sample(windows, tokenizer, params.n_samples)
            faults += _check_coverage(shards_dir, windows)
        shared = _shared_windows(both)
        share = _shared_ngram_share(shards_dir, manifest, params.ngram_tokens, track)
        metrics |= {"shared_windows": len(shared), "shared_ngram_share": share}
        faults += shared + _judge_share(share, params)
    metrics |= {"faults": len(faults), "verdict": "fail" if faults else "pass"}
    return WindowAudit(metrics=metrics, samples=samples, faults=faults)


def _measure(shards_dir: Path, windows: Windows) -> dict[str, Any]:
    """The figures of one split."""
    manifest, shards = windows.manifest, windows.manifest.splits[windows.split]
    counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    for shard in shards:
        ids = read_ids(shards_dir, shard, manifest)
        counts += np.bincount(ids, minlength=manifest.vocab_size)
    tokens = int(counts.sum())
    text_bytes = int(counts @ read_token_bytes(shards_dir))
    return {
        "documents": int(counts[manifest.eot_id]),
        "shards": len(shards),
        "tail_tokens": windows.tail_tokens,
        "text_bytes": text_bytes,
        "tokens": tokens,
        "tokens_per_byte": tokens / text_bytes,
        "unigram_entropy_nats": entropy_nats(counts),
        "vocab_used": int((counts > 0).sum()),
        "windows": len(windows),
    }


def _sample(windows: Windows, tokenizer: Tokenizer, n_samples: int) -> list[dict[str, Any]]:
    """Some windows, evenly spread, as text."""
    indices = np.unique(np.linspace(0, len(windows) - 1, n_samples, dtype=np.int64))
    return [
        {"window": int(index), "text": tokenizer.decode(ids)}
        for index, ids in zip(indices, windows.gather(indices), strict=True)
    ]


def _check_coverage(shards_dir: Path, windows: Windows) -> list[Fault]:
    """Windows and tail must add up to the tokens of each shard, and lie where they should."""
    T, faults, number = windows.window_tokens, [], 0
    for shard in windows.manifest.splits[windows.split]:
        coverage = window_coverage(shard.tokens, window_tokens=T, stride=T)
        ids = read_ids(shards_dir, shard, windows.manifest)
        if coverage.n_windows * T + coverage.tail_tokens != shard.tokens:
            faults.append(Fault(shard=shard.file, offset=0, reason="tokens are not conserved"))
        for window in {0, coverage.n_windows - 1} if coverage.n_windows else ():
            read = windows.gather(np.array([number + window]))[0]
            if not np.array_equal(read, ids[window * T : (window + 1) * T]):
                reason = f"window {number + window} is not what lies there"
                faults.append(Fault(shard=shard.file, offset=window * T, reason=reason))
        number += coverage.n_windows
    if number != len(windows):
        reason = f"{len(windows)} windows are read, {number} fit"
        faults.append(Fault(shard=windows.split, offset=None, reason=reason))
    return faults


def _shared_windows(both: dict[str, Windows]) -> list[Fault]:
    """Windows of val that are also windows of train, token for token."""
    train = {_window_hash(both["train"], index) for index in range(len(both["train"]))}
    val, faults = both["val"], []
    for index in range(len(val)):
        if _window_hash(val, index) in train:
            shard, offset = val.place_of(index)
            name = val.manifest.splits["val"][shard].file
            reason = f"window {index} is also a window of train"
            faults.append(Fault(shard=name, offset=offset, reason=reason))
    return faults


def _window_hash(windows: Windows, index: int) -> bytes:
    ids = windows.gather(np.array([index]))
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _shared_ngram_share(shards_dir: Path, manifest: Manifest, n: int, track: Track) -> float | None:
    """Share of val's runs of n tokens that also occur in train; None when val has no such run."""
    val = [read_ids(shards_dir, shard, manifest) for shard in manifest.splits["val"]]
    wanted = NgramSet(np.concatenate([ngram_hashes(ids, n) for ids in val]))
    if wanted.total == 0:
        return None
    shards = manifest.splits["train"]
    for shard in track(shards, total=len(shards), label="shared runs"):
        ids = read_ids(shards_dir, shard, manifest)
        for start in range(0, len(ids), _NGRAM_PIECE):
            wanted.mark(ngram_hashes(ids[start : start + _NGRAM_PIECE + n - 1], n))
    return wanted.marked_share


def _judge_share(share: float | None, params: AuditParams) -> list[Fault]:
    if share is None or share <= params.max_shared_ngram_share:
        return []
    reason = (
        f"{share:.4f} of its runs of {params.ngram_tokens} tokens also occur in train, "
        f"more than {params.max_shared_ngram_share}"
    )
    return [Fault(shard="val", offset=None, reason=reason)]
