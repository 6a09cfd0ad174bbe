"""How does a run go from where it stands to its last step?

The run has one counter, the windows that it has consumed. Which windows a step sees, their noise
and its learning rate all follow from the step's number, so there is nothing else to put back.
"""

import logging
import time

import numpy as np

from canvaslm.checkpoint import save_checkpoint
from canvaslm.checkpoint_state import Progress, SkippedStep
from canvaslm.corpus.batches import window_indices
from canvaslm.corpus.windows import Windows
from canvaslm.layout import Layout
from canvaslm.reporting.progress import Track
from canvaslm.training.guard import stop_after_too_many
from canvaslm.training.learner import Learner
from canvaslm.training.plan import PretrainParams
from canvaslm.training.run_state import RunState, StepRecord

_log = logging.getLogger(__name__)


def train(
    learner: Learner,
    windows: Windows,
    state: RunState,
    *,
    progress: Progress,
    params: PretrainParams,
    layout: Layout,
    identity: dict[str, object],
    flops_per_window: float,
    track: Track,
) -> Progress:
    """Train from ``progress`` to the last step, with a checkpoint every so often and at the end.

    Args:
        learner: the model where ``progress`` says.
        windows: the training split.
        state: the run's folder, its logs rolled back to ``progress``.
        progress: where the run stands.
        params: length, batch and cadence.
        layout: the shape of a window.
        identity: what run this is; written into each checkpoint.
        flops_per_window: forward and backward operations for one window.
        track: shows how far the loop is.

    Raises:
        GateClosedError: too many steps in a row changed nothing, or a weight is not finite.
    """
    todo = range(progress.step, params.steps)
    for step in track(todo, total=len(todo), label=f"pretrain {identity['objective']}"):
        started_at = time.perf_counter()
        numbers = window_numbers(step, params.windows_per_step)
        record = learner.take_step(step, gather(windows, numbers, params.seed), numbers)
        state.record(record, seconds=time.perf_counter() - started_at)
        progress = advance(progress, record, numbers, layout, flops_per_window)
        _tell(record, progress, params)
        stop_after_too_many(
            progress.skipped, steps_done=progress.step, limit=params.max_consecutive_bad_steps
        )
        if progress.step % params.save_every == 0 or progress.step == params.steps:
            state.flush()
            save_checkpoint(
                state.checkpoints,
                model=learner.model,
                optimizer=learner.optimizer,
                progress=progress,
                identity=identity,
                keep_last=params.keep_last,
            )
    return progress


def window_numbers(step: int, windows_per_step: int) -> np.ndarray:
    """The run's window numbers of optimiser step ``step``: (W,) int64."""
    return np.arange(step * windows_per_step, (step + 1) * windows_per_step, dtype=np.int64)


def gather(windows: Windows, numbers: np.ndarray, seed: int) -> np.ndarray:
    """The ids (W, T) of the windows with these run numbers."""
    indices = window_indices(int(numbers[0]), len(numbers), seed=seed, n_windows=len(windows))
    return windows.gather(indices)


def start() -> Progress:
    """Where every run begins."""
    return Progress(step=0, windows_consumed=0, tokens=0, flops=0.0, skipped=(), rollbacks=())


def advance(
    progress: Progress,
    record: StepRecord,
    numbers: np.ndarray,
    layout: Layout,
    flops_per_window: float,
) -> Progress:
    """Count one step; a skipped one consumes its windows too, since its retry would be the same."""
    skipped = progress.skipped
    if record.cause:
        skipped += (
            SkippedStep(
                step=record.step,
                first_window=int(numbers[0]),
                last_window=int(numbers[-1]),
                cause=record.cause,
            ),
        )
    consumed = progress.windows_consumed + len(numbers)
    return Progress(
        step=record.step + 1,
        windows_consumed=consumed,
        tokens=consumed * layout.window_tokens,
        flops=consumed * flops_per_window,
        skipped=skipped,
        rollbacks=progress.rollbacks,
    )


def _tell(record: StepRecord, progress: Progress, params: PretrainParams) -> None:
    """Log a skipped step always, and a step that ran at the cadence of the loss log."""
    if record.cause:
        first, last = progress.skipped[-1].first_window, progress.skipped[-1].last_window
        _log.warning(
            "step %d skipped, nothing changed: %s (window numbers %d to %d)",
            record.step,
            record.cause,
            first,
            last,
        )
    elif progress.step % params.log_every == 0:
        assert record.nats is not None
        mean = record.nats / record.targets
        _log.info("step %d/%d: %.4f nats per target", progress.step, params.steps, mean)
