"""Which windows has the run consumed, and is a held-out one among them?

They are gathered as the run gathers them and known by the hash of their ids; the held-out ones are
read from the files, past the reader that the run has.
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
    held_out, unused = _held_out_digests(subject), {skip.step for skip in progress.skipped}
    lowest, highest = math.inf, -math.inf
    found: dict[bool, list[int]] = {False: [], True: []}
    steps = subject.track(range(progress.step), total=progress.step, label="audit_run: windows")
    with open_reader(subject.train, params) as reader:
        for step in steps:
            windows, numbers = reader.read(step)
            lowest, highest = min(lowest, windows.min()), max(highest, windows.max())
            is_hit = [_digest(ids) in held_out for ids in windows]
            found[step in unused] += numbers[is_hit].tolist()
    return Consumed(
        n_windows=progress.step * params.windows_per_step,
        n_unused=len(unused) * params.windows_per_step,
        lowest=int(lowest),
        highest=int(highest),
        held_out=found[False],
        held_out_unused=found[True],
    )


def _held_out_digests(subject: Subject) -> set[bytes]:
    """A hash of each held-out window, read from the files and not through the run's reader."""
    manifest = json.loads((subject.shards / "manifest.json").read_text(encoding="utf-8"))
    T, digests = subject.recipe.layout.window_tokens, set()
    for shard in manifest["splits"]["val"]:
        ids = np.fromfile(subject.shards / shard["file"], dtype=_ID_TYPES[manifest["dtype"]])
        whole = ids[: len(ids) // T * T].reshape(-1, T).astype(np.int64)
        digests |= {_digest(window) for window in whole}
    return digests


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
