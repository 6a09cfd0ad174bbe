"""How does a run go from where it stands to its last step?

The run has one counter, the windows that it has consumed. Which windows a step sees, their noise
and its learning rate all follow from the step's number, so there is nothing else to put back.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from canvaslm.checkpoint import save_checkpoint
from canvaslm.checkpoint_state import Progress, SkippedStep
from canvaslm.corpus.windows import Windows
from canvaslm.layout import Layout
from canvaslm.reporting.progress import Track
from canvaslm.training.best import best_checkpoints
from canvaslm.training.guard import MARKED, is_bad, streak
from canvaslm.training.learner import Learner
from canvaslm.training.loader import Reader, open_reader
from canvaslm.training.plan import PretrainParams, learning_rate
from canvaslm.training.rollback import find_trouble, roll_back
from canvaslm.training.run_state import RunState, StepRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What stays the same from the first step to the last."""

    learner: Learner
    reader: Reader
    state: RunState
    params: PretrainParams
    layout: Layout
    identity: dict[str, object]
    flops_of_first: Callable[[int], float]
    on_trace: Callable[[], None]
    trace_at: Path


def train(
    learner: Learner,
    windows: Windows,
    state: RunState,
    *,
    progress: Progress,
    params: PretrainParams,
    layout: Layout,
    identity: dict[str, object],
    flops_of_first: Callable[[int], float],
    on_trace: Callable[[], None],
    trace_at: Path,
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
        flops_of_first: forward and backward operations of so many windows, from the run's first.
        on_trace: called when the run's first bad step has been explained in the run's folder.
        trace_at: where that explanation is read; told with every bad step.
        track: shows how far the loop is.

    Raises:
        GateClosedError: the run cannot go on and has gone back too often, or has no checkpoint.
    """
    with open_reader(windows, params) as reader:
        run = _Run(
            learner=learner,
            reader=reader,
            state=state,
            params=params,
            layout=layout,
            identity=identity,
            flops_of_first=flops_of_first,
            on_trace=on_trace,
            trace_at=trace_at,
        )
        while progress.step < params.steps:
            progress, trouble = _train_on(run, progress, track)
            if trouble is not None:
                progress = roll_back(
                    learner,
                    state,
                    progress=progress,
                    cause=trouble,
                    windows_of=reader.read,
                    identity=identity,
                    params=params,
                )
    return progress


def _train_on(run: _Run, progress: Progress, track: Track) -> tuple[Progress, str | None]:
    """Train to the last step, or to where the run cannot go on, and say why."""
    params = run.params
    todo = range(progress.step, params.steps)
    to_save = False
    for step in track(todo, total=len(todo), label=f"pretrain {run.identity['objective']}"):
        record = _take_step(run, step, is_marked=step in progress.marked)
        progress = advance(progress, record, params, run.layout, run.flops_of_first)
        _tell(run, record, progress)
        if is_bad(record.cause):
            _explain_first(run, step)
        to_save |= progress.step % params.save_every == 0 or progress.step == params.steps
        # In the middle of bad steps a checkpoint would stand behind what a rollback has to mark.
        n_bad = streak(progress.skipped, steps_done=progress.step).n_bad
        saves_now = to_save and (n_bad == 0 or progress.step == params.steps)
        if saves_now or is_bad(record.cause):
            limit = params.max_consecutive_bad_steps
            trouble = find_trouble(run.learner, progress, limit=limit)
            if trouble is not None:
                _explain_first(run, step)
                return progress, trouble
        if saves_now:
            to_save = False
            _save(run, progress)
    return progress, None


def start() -> Progress:
    """Where every run begins."""
    return Progress(
        step=0, windows_consumed=0, tokens=0, flops=0.0, skipped=(), rollbacks=(), log_sha256=""
    )


def advance(
    progress: Progress,
    record: StepRecord,
    params: PretrainParams,
    layout: Layout,
    flops_of_first: Callable[[int], float],
) -> Progress:
    """Count one step; a skipped one consumes its windows too, since its retry would be the same."""
    consumed = progress.windows_consumed + params.windows_per_step
    skipped = progress.skipped
    if record.cause:
        skipped += (
            SkippedStep(
                step=record.step,
                first_window=progress.windows_consumed,
                last_window=consumed - 1,
                cause=record.cause,
            ),
        )
    return Progress(
        step=record.step + 1,
        windows_consumed=consumed,
        tokens=consumed * layout.window_tokens,
        flops=flops_of_first(consumed),
        skipped=skipped,
        rollbacks=progress.rollbacks,
        log_sha256=progress.log_sha256,
    )


def _take_step(run: _Run, step: int, *, is_marked: bool) -> StepRecord:
    """Train on one step's windows, or pass over a marked one, and record what it came to."""
    started_at = time.perf_counter()
    if is_marked:
        rate = learning_rate(step, run.params)
        record = StepRecord(
            step=step, nats=None, targets=0, gradient_norm=None, learning_rate=rate, cause=MARKED
        )
    else:
        record = run.learner.take_step(step, *run.reader.read(step))
    run.state.record(record, seconds=time.perf_counter() - started_at)
    return record


def _explain_first(run: _Run, step: int) -> None:
    """Say where a step stopped being finite, once in the life of a run."""
    if run.state.trace.is_dir():
        return
    trace = run.learner.explain(step, *run.reader.read(step))
    trace.write(run.state.trace, run=run.state.directory.name)
    run.on_trace()
    _log.warning(
        "step %d, what went wrong first: %s; see %s", step, trace.first_place, run.trace_at
    )


def _save(run: _Run, progress: Progress) -> None:
    """Write a checkpoint, after the logs that it must not be ahead of."""
    run.state.flush()
    save_checkpoint(
        run.state.checkpoints,
        model=run.learner.model,
        optimizer=run.learner.optimizer,
        progress=progress.model_copy(update={"log_sha256": run.state.digest(progress.step)}),
        identity=run.identity,
        keep_last=run.params.keep_last,
        best_of=lambda saved: {*_find_best(run, saved), *_find_way_back(progress, saved)},
    )


def _find_best(run: _Run, saved: Sequence[int]) -> Sequence[int]:
    """The checkpoints that stay for their loss; the log is read only where some are asked for."""
    keep, save_every = run.params.keep_best, run.params.save_every
    if keep == 0:
        return ()
    return best_checkpoints(run.state.steps(), saved, save_every=save_every, keep=keep)


def _find_way_back(progress: Progress, saved: Sequence[int]) -> Sequence[int]:
    """The checkpoint that stays because the latest update may turn out to have broken the model."""
    latest = streak(progress.skipped, steps_done=progress.step).last_update
    before = [step for step in saved if latest is not None and step <= latest]
    return before[-1:]


def _tell(run: _Run, record: StepRecord, progress: Progress) -> None:
    """Log a skipped step always, and a step that ran at the cadence of the loss log."""
    if record.cause:
        knows_more = is_bad(record.cause) and run.state.trace.exists()
        _log.warning(
            "step %d skipped, nothing changed: %s (window numbers %d to %d)%s",
            record.step,
            record.cause,
            progress.skipped[-1].first_window,
            progress.skipped[-1].last_window,
            f"; the trace of the first fault is {run.trace_at}" if knows_more else "",
        )
    elif progress.step % run.params.log_every == 0:
        assert record.nats is not None
        mean = _readable(record.nats / record.targets)
        _log.info("step %d/%d: %s nats per target", progress.step, run.params.steps, mean)


def _readable(mean: float) -> str:
    """Four decimals, and a power of ten for the loss of a run that diverges."""
    return f"{mean:.4f}" if mean < 1e4 else f"{mean:.3e}"
