"""Who reads the windows of the coming steps while this one is trained?

Threads, if any, that know nothing of the run but step numbers. Which windows a step sees follows
from its number, so what has been read ahead is no part of where the run stands: nothing of the
reader is saved, and the trainer may ask for any step, also for an earlier one after it went back.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from canvaslm.corpus.batches import window_indices
from canvaslm.corpus.windows import Windows
from canvaslm.training.plan import PretrainParams

_STEPS_PER_THREAD = 2  # read ahead: one ready, one on the way


class Reader:
    """The windows of any step, read ahead by threads; made by :func:`open_reader`."""

    def __init__(
        self, windows: Windows, params: PretrainParams, pool: ThreadPoolExecutor | None
    ) -> None:
        self._windows = windows
        self._params = params
        self._pool = pool
        self._ahead: dict[int, Future[np.ndarray]] = {}

    def read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The windows of a step, and their numbers in the run.

        What a thread could not read is raised here, on the step that needs it.

        Args:
            step: its number, from 0; usually the one after the step that was read last.

        Returns:
            (W, T) int64 ids and (W,) int64 numbers.
        """
        if self._pool is None:
            return self._gather(step), self._numbers(step)
        due = range(step, min(step + 1 + self._depth, self._params.steps))
        for stale in self._ahead.keys() - set(due):  # the trainer has jumped
            self._ahead.pop(stale).cancel()
        for number in due:
            if number not in self._ahead:
                self._ahead[number] = self._pool.submit(self._gather, number)
        return self._ahead.pop(step).result(), self._numbers(step)

    @property
    def _depth(self) -> int:
        return _STEPS_PER_THREAD * self._params.loader_workers

    def _numbers(self, step: int) -> np.ndarray:
        return window_numbers(step, self._params.windows_per_step)

    def _gather(self, step: int) -> np.ndarray:
        return gather(self._windows, self._numbers(step), self._params.seed)


@contextmanager
def open_reader(windows: Windows, params: PretrainParams) -> Iterator[Reader]:
    """Read the windows of a run with ``loader_workers`` threads, none of which outlives the block.

    Args:
        windows: the training split.
        params: seed, length, batch and the number of threads; with 0 the trainer reads itself.
    """
    if params.loader_workers == 0:
        yield Reader(windows, params, None)
        return
    pool = ThreadPoolExecutor(params.loader_workers, thread_name_prefix="read windows")
    try:
        yield Reader(windows, params, pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def window_numbers(step: int, windows_per_step: int) -> np.ndarray:
    """The run's window numbers of optimiser step ``step``: (W,) int64."""
    return np.arange(step * windows_per_step, (step + 1) * windows_per_step, dtype=np.int64)


def gather(windows: Windows, numbers: np.ndarray, seed: int) -> np.ndarray:
    """The ids (W, T) of the windows with these run numbers."""
    indices = window_indices(int(numbers[0]), len(numbers), seed=seed, n_windows=len(windows))
    return windows.gather(indices)
