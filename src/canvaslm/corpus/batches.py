"""In which order does a run read the windows?

A run has one counter, windows consumed. Epoch, place in the epoch and window follow from it and
from the seed, so that a run that stops and goes on, with other micro-batches or other workers,
reads exactly what it would have read.
"""

import functools

import numpy as np

from canvaslm.randomness import stream


def training_order(seed: int, epoch: int, n_windows: int) -> np.ndarray:
    """The order of all windows in one epoch, (n_windows,) int64: a permutation."""
    return stream(seed, "order", epoch).permutation(n_windows)


def window_indices(start: int, count: int, *, seed: int, n_windows: int) -> np.ndarray:
    """Which windows the run reads as its numbers ``start .. start+count-1``.

    Args:
        start: windows consumed so far.
        count: how many come next; they may run over the end of one or more epochs.
        seed: the run's seed.
        n_windows: windows in the split.

    Returns:
        (count,) int64.
    """
    numbers = np.arange(start, start + count)
    indices = np.empty(count, dtype=np.int64)
    for epoch in np.unique(numbers // n_windows):
        here = numbers // n_windows == epoch
        indices[here] = _kept_order(seed, int(epoch), n_windows)[numbers[here] % n_windows]
    return indices


@functools.lru_cache(maxsize=2)  # a step may run over the end of an epoch
def _kept_order(seed: int, epoch: int, n_windows: int) -> np.ndarray:
    """Drawn once for all steps of an epoch; for millions of windows a step could wait for it."""
    order = training_order(seed, epoch, n_windows)
    order.setflags(write=False)
    return order
