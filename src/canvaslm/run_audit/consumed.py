"""Which windows has the run consumed, and is a held-out one among them?

They are gathered as the run gathers them and known by the hash of their ids; the held-out ones are
read from the files, past the reader that the run has. A short window may stand in both splits by
nature, so one that the training files hold too is no sign of a leak.
"""

import hashlib
import json
import math
from dataclasses import dataclass

import numpy as np

from canvaslm.run_audit.subject import Subject
from canvaslm.training.loader import open_reader

_ID_TYPES = {"uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True, kw_only=True)
class Consumed:
    """What all the windows of the run come to.

    Attributes:
        n_windows: how many it read, those of skipped steps among them.
        n_unused: how many of them belong to steps that changed nothing.
        lowest: the smallest id.
        highest: the largest.
        held_out: numbers of those that are held-out windows, and were learned from.
        held_out_unused: numbers of those that are, in steps that changed nothing.
    """

    n_windows: int
    n_unused: int
    lowest: int
    highest: int
    held_out: list[int]
    held_out_unused: list[int]


def read_all(subject: Subject) -> Consumed:
    """Read every window of the run again, as the run did."""
    params, progress = subject.recipe.pretrain, subject.state.progress
    held_out, unused = _digests(subject, "val"), {skip.step for skip in progress.skipped}
    lowest, highest = math.inf, -math.inf
    hits: dict[int, bytes] = {}
    steps = subject.track(range(progress.step), total=progress.step, label="audit_run: windows")
    with open_reader(subject.train, params) as reader:
        for step in steps:
            windows, numbers = reader.read(step)
            lowest, highest = min(lowest, windows.min()), max(highest, windows.max())
            digests = zip(numbers.tolist(), map(_digest, windows), strict=True)
            hits |= {number: digest for number, digest in digests if digest in held_out}
    if hits:
        by_nature = _digests(subject, "train")
        hits = {number: digest for number, digest in hits.items() if digest not in by_nature}
    is_unused = {number: number // params.windows_per_step in unused for number in hits}
    return Consumed(
        n_windows=progress.step * params.windows_per_step,
        n_unused=len(unused) * params.windows_per_step,
        lowest=int(lowest),
        highest=int(highest),
        held_out=[number for number in hits if not is_unused[number]],
        held_out_unused=[number for number in hits if is_unused[number]],
    )


def _digests(subject: Subject, split: str) -> set[bytes]:
    """A hash of each window of a split, read from the files and not through the run's reader."""
    manifest = json.loads((subject.shards / "manifest.json").read_text(encoding="utf-8"))
    T, digests = subject.recipe.layout.window_tokens, set()
    for shard in manifest["splits"][split]:
        ids = np.fromfile(subject.shards / shard["file"], dtype=_ID_TYPES[manifest["dtype"]])
        whole = ids[: len(ids) // T * T].reshape(-1, T).astype(np.int64)
        digests |= {_digest(window) for window in whole}
    return digests


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
