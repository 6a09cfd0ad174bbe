"""What does the stage `pretrain` do, from shards to a checkpoint?

It goes on from the run's own state, trains to the end, and copies the result out. A run that has
already ended is only copied out. One that does not learn reports how far it came, and why it ended,
before the gate closes.
"""

import logging
import shutil
from pathlib import Path

from canvaslm.checkpoint import (
    export_checkpoint,
    latest_complete,
    refuse_to_replace,
    restore,
    save_checkpoint,
    set_aside,
)
from canvaslm.checkpoint_state import TENSOR_FILES, Rollback, read_state
from canvaslm.device import pick_device
from canvaslm.errors import GateClosedError, InputError
from canvaslm.model.shape import count_parameters
from canvaslm.reporting.files import remove_directory, whole_directory, write_bytes
from canvaslm.reporting.progress import Track
from canvaslm.training.curve import refuse_unwritable, write_curve, write_metrics
from canvaslm.training.identity import identity_name
from canvaslm.training.job import Job
from canvaslm.training.learner import Learner
from canvaslm.training.lineage import Origin, tell_unfinished
from canvaslm.training.loop import start, train
from canvaslm.training.machine import MACHINE, note_machine
from canvaslm.training.memory import refuse_what_does_not_fit
from canvaslm.training.run_state import TRACE, RunState, open_run
from canvaslm.training.trace import TRACE_FILES
from canvaslm.training.weight_average import begin_average

_log = logging.getLogger(__name__)


def pretrain(
    job: Job, *, work: Path, out: Path, reports: Path, track: Track, origin: Origin | None = None
) -> None:
    """Train a run to its end, or go on with it, and copy out its checkpoint and reports.

    Args:
        job: the run.
        work: where runs live between processes; this one in a folder of its own.
        out: the checkpoint directory that later stages read.
        reports: where ``loss.csv``, ``metrics.json``, ``timing.csv``, ``machine.json`` and the
            trace of the first bad step go.
        track: shows how far the loop is.
        origin: where the run begins, when not with its own state or with its seed.

    Raises:
        InputError: the run does not fit into memory or on the disk, another process trains it,
            ``out`` or ``reports`` would overwrite something else, or it may not begin there.
        GateClosedError: it does not learn: too many steps in a row changed nothing.
    """
    origin = origin or Origin()
    origin.refuse(job.identity, out)
    refuse_to_replace(out)
    refuse_unwritable(reports)
    with open_run(work, identity_name(job.identity)) as state:
        latest = _find_newest(job, state, origin, work)
        if latest is not None and _read_step(latest) >= job.recipe.pretrain.steps:
            _log.info("%s has ended; only its results are copied out", state.directory)
            done = read_state(latest).progress
            state.roll_back(done.step, log_sha256=done.log_sha256)
        else:
            try:
                _train(job, state, latest, origin, reports, track)
            except GateClosedError as closed:
                _report(job, state, reports, model_sha256=None, closed=str(closed))
                if state.trace.is_dir():  # not in the report, which says nothing of places
                    told = f"{closed}; the trace of the first fault is {_trace_at(reports)}"
                    raise GateClosedError(told) from closed
                raise
            latest = latest_complete(state.checkpoints, identity=job.identity)
        assert latest is not None, "the last step writes a checkpoint"
        export_checkpoint(latest, out)
        model = read_state(latest).files[TENSOR_FILES[0]]
        _report(job, state, reports, model_sha256=model, closed=None)


def _find_newest(job: Job, state: RunState, origin: Origin, work: Path) -> Path | None:
    """The newest whole checkpoint of the run, brought over from elsewhere if it is further."""
    latest = latest_complete(state.checkpoints, identity=job.identity)
    if origin.bring_over(state, None if latest is None else _read_step(latest)):
        latest = latest_complete(state.checkpoints, identity=job.identity)
    if latest is None:
        tell_unfinished(work, job.identity)
    set_aside(state.checkpoints, after=None if latest is None else _read_step(latest))
    return latest


def _read_step(checkpoint: Path) -> int:
    return read_state(checkpoint).progress.step


def _train(
    job: Job, state: RunState, latest: Path | None, origin: Origin, reports: Path, track: Track
) -> None:
    """Build the learner, put it where the latest checkpoint says, and train to the end."""
    device = pick_device(job.recipe.pretrain.device)
    _log.info("estimated peak memory: %s", refuse_what_does_not_fit(job.recipe, device))
    learner = Learner(job.recipe, job.objective, device)
    progress = start()
    if latest is not None:
        progress = restore(latest, model=learner.model, optimizer=learner.optimizer)
    n_again = state.roll_back(progress.step, log_sha256=progress.log_sha256)
    _tell_beginning(progress.step, latest, n_again)
    if latest is None and origin.begin(learner.model):
        begin_average(learner.optimizer)
        _save_first(job, state, learner)
    params = job.recipe.pretrain
    note_machine(state.directory, device=device, params=params, from_step=progress.step)
    if state.trace.is_dir():  # of an earlier process; what is said of it names the copy
        _copy_trace_now(state, reports)
    train(
        learner,
        job.windows,
        state,
        progress=progress,
        params=params,
        layout=job.recipe.layout,
        identity=job.identity,
        flops_of_first=job.flops_of_first,
        on_trace=lambda: _copy_trace_now(state, reports),
        trace_at=_trace_at(reports),
        track=track,
    )


def _tell_beginning(step: int, latest: Path | None, n_again: int) -> None:
    """Say where the run starts, and in the same line what that means for its log of steps."""
    again = f"; steps.csv is cut back to it, later rows to be trained again: {n_again}"
    told = f"resumed at step {step} from {latest}" if latest else "starts at step 0"
    _log.info("%s%s", told, again if n_again else "")


def _trace_at(reports: Path) -> Path:
    """Where the trace of the first bad step is read."""
    return reports / TRACE / TRACE_FILES[0]


def _save_first(job: Job, state: RunState, learner: Learner) -> None:
    """Save what a fork begins with, so that it can go on when its parent is gone."""
    save_checkpoint(
        state.checkpoints,
        model=learner.model,
        optimizer=learner.optimizer,
        progress=start(),
        identity=job.identity,
        keep_last=None,
    )


def _report(
    job: Job, state: RunState, reports: Path, *, model_sha256: str | None, closed: str | None
) -> None:
    """Write what the run's record of steps comes to, and why the gate closed if it did."""
    params, records = job.recipe.pretrain, state.steps()
    last = write_curve(
        reports,
        records,
        state.seconds(),
        log_every=params.log_every,
        windows_per_step=params.windows_per_step,
        window_tokens=job.recipe.layout.window_tokens,
        flops_of_first=job.flops_of_first,
    )
    write_metrics(
        reports,
        records,
        last,
        n_windows=len(job.windows),
        n_parameters=count_parameters(job.recipe.model, job.recipe.layout),
        vocab_size=job.recipe.layout.vocab_size,
        rollbacks=_read_rollbacks(job, state),
        parent=job.identity["parent"],
        model_sha256=model_sha256,
        closed=closed,
    )
    _copy_notes(state, reports)


def _copy_trace_now(state: RunState, reports: Path) -> None:
    """Copy the trace while the run goes on, which a full disk elsewhere must not end."""
    try:
        _copy_notes(state, reports)
    except (OSError, InputError) as error:
        _log.warning("%s is not copied to %s yet: %s", state.trace, reports, error)


def _copy_notes(state: RunState, reports: Path) -> None:
    """Copy what no other stage reads: the machines, and the trace of the first bad step."""
    if (state.directory / MACHINE).is_file():
        write_bytes(reports / MACHINE, (state.directory / MACHINE).read_bytes())
    if state.trace.is_dir():
        with whole_directory(reports / state.trace.name, holds=TRACE_FILES) as aside:
            for name in TRACE_FILES:
                if (state.trace / name).is_file():
                    shutil.copyfile(state.trace / name, aside / name)
    elif (reports / state.trace.name).is_dir():  # of an earlier run
        remove_directory(reports / state.trace.name)


def _read_rollbacks(job: Job, state: RunState) -> tuple[Rollback, ...]:
    """Every time that the run went back, as its newest checkpoint has it."""
    latest = latest_complete(state.checkpoints, identity=job.identity)
    return () if latest is None else read_state(latest).progress.rollbacks
