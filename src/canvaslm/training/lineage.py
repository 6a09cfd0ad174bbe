"""From where may a run begin: from nothing, from its own state elsewhere, or from other weights?

A place is no identity: a run whose folder was copied to another machine is the same run, and goes
on there once its state has been brought over. Weights of another run are something else: with them
a new run begins, which says so in its identity and therefore has a folder of its own.
"""

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from canvaslm.checkpoint import (
    export_checkpoint,
    latest_complete,
    load_weights,
    refuse_damaged,
)
from canvaslm.checkpoint_state import (
    STATE,
    TENSOR_FILES,
    Progress,
    State,
    number_of,
    read_state,
    refuse_other_run,
)
from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone
from canvaslm.reporting.differences import as_table, differences
from canvaslm.reporting.files import whole_directory, write_bytes
from canvaslm.training.identity import identity_name
from canvaslm.training.machine import MACHINE
from canvaslm.training.run_state import RunState

_STEPS, _SECONDS = "steps.csv", "seconds.csv"

_log = logging.getLogger(__name__)


class Origin:
    """The beginning that the seed gives; :func:`open_origin` makes those that lie elsewhere.

    Attributes:
        parent: what the run's identity says of its first weights.
    """

    parent: dict[str, Any] | None = None

    def refuse(self, identity: dict[str, Any], out: Path) -> None:
        """Raise when a run of this identity may not begin here; nothing is loaded or touched yet.

        Args:
            identity: the run, as plain JSON values.
            out: where its final checkpoint goes.

        Raises:
            InputError: it may not.
        """

    def bring_over(self, state: RunState, own_step: int | None) -> bool:
        """Put into the run's folder what lies elsewhere and is further; say whether it did.

        Args:
            state: the folder.
            own_step: how far the newest checkpoint in it is; None without one.

        Raises:
            InputError: what lies elsewhere is not whole, or a process trains it.
        """
        return False

    def begin(self, model: Backbone) -> bool:
        """Give a model at step 0 its weights; False where they are those of the seed.

        Raises:
            InputError: they are of another model.
        """
        return False


def open_origin(*, resume: Path | None, fork: Path | None) -> Origin:
    """Look at where a run is to begin.

    Args:
        resume: the folder of a run, or a checkpoint in it, to go on from.
        fork: a checkpoint whose weights begin a new run.

    Raises:
        InputError: both are given, or one is not what it should be.
    """
    if resume and fork:
        raise InputError(
            "--resume and --fork",
            expected="one of them",
            got="both",
            fix="use --resume to go on with a run, --fork to start one from its weights",
        )
    if resume:
        return _Elsewhere(resume)
    return _OtherWeights(fork) if fork else Origin()


def tell_unfinished(work: Path, identity: dict[str, Any]) -> None:
    """Say that another run of the objective stands there unfinished, for one that starts anew.

    It may be the one that was meant. Of several, the one that differs least is told. Nothing is
    refused, since a sweep leaves many.

    Args:
        work: where runs live.
        identity: the run that starts, as plain JSON values.
    """
    found = []
    for folder in sorted(path for path in work.glob("*/checkpoints") if path.is_dir()):
        state = _newest_state(folder)
        stored = _plain(state) if state else {}
        if not state or stored["objective"] != identity["objective"]:
            continue
        if state.progress.step < stored["pretrain"].get("steps", 0):
            unlike = differences(stored, identity)
            found.append((len(unlike), str(folder.parent), state.progress.step, unlike))
    if found and min(found)[0]:
        _, place, step, unlike = min(found, key=lambda item: item[:2])
        told = "another run starts; %s stands at step %d, unfinished, and differs in\n%s"
        _log.info(told, place, step, as_table(unlike))


class _Elsewhere(Origin):
    """The same run, in another place."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._checkpoint = _checkpoint_in(place)
        self._state = read_state(self._checkpoint)
        # What a fork began with is a fact of the past that no setting could state again.
        self.parent = _plain(self._state)["parent"]

    def refuse(self, identity: dict[str, Any], out: Path) -> None:
        """Compare what the checkpoint is of with what is wanted."""
        del out
        fix = f"restore those settings, or start a new run with --fork {self._checkpoint}"
        refuse_other_run(self._checkpoint, self._state, identity, fix=fix)
        refuse_damaged(self._checkpoint)

    def bring_over(self, state: RunState, own_step: int | None) -> bool:
        """Copy logs, then the checkpoint, so that a kill in between leaves a sound folder."""
        step = self._state.progress.step
        if own_step is not None and own_step >= step:
            _log.info("%s is no further than %s", self._checkpoint, state.directory)
            return False
        run = self._checkpoint.parent.parent
        if number_of(self._checkpoint) is None or not (run / _STEPS).is_file():
            raise InputError(
                self._checkpoint,
                expected=f"a checkpoint in the folder of its run, beside {_STEPS}",
                got="one that stands alone, so that the loss of its steps is not known",
                fix=f"give that folder, or start a new run with --fork {self._checkpoint}",
            )
        with _while_nobody_trains(run):
            n_later = _copy_logs(run, state, self._state.progress)
            state.checkpoints.mkdir(exist_ok=True)
            export_checkpoint(self._checkpoint, state.checkpoints / self._checkpoint.name)
        cut = f"; later rows of its steps.csv left behind: {n_later}" if n_later else ""
        _log.info("brought over step %d from %s%s", step, run, cut)
        return True


class _OtherWeights(Origin):
    """The weights of a checkpoint, for a run of its own."""

    def __init__(self, checkpoint: Path) -> None:
        if not (checkpoint / STATE).is_file():
            inside = _newest_inside(checkpoint)
            raise InputError(
                checkpoint,
                expected="a checkpoint to take the weights of",
                got="none" if inside is None else "a folder with checkpoints in it",
                fix="name another; a fork that has begun needs none and goes on with --resume and "
                "its own folder under .work/pretrain"
                if inside is None
                else f"give --fork {inside}",
            )
        self._checkpoint = checkpoint
        self._state = read_state(checkpoint)
        self.parent = {
            "identity": identity_name(_plain(self._state)),
            "step": self._state.progress.step,
            "model_sha256": self._state.files[TENSOR_FILES[0]],
        }

    def refuse(self, identity: dict[str, Any], out: Path) -> None:
        """Keep the parent: a child in its place would be forked when the command is run again."""
        if out.resolve() == self._checkpoint.resolve():
            raise InputError(
                out,
                expected="another place than that of the parent",
                got="the parent, which the new checkpoint would replace",
                fix="give --out, and --reports",
            )
        found = differences(_plain(self._state), identity)
        _log.info("forked from %s; what differs:\n%s", self._checkpoint, as_table(found))

    def begin(self, model: Backbone) -> bool:
        """Load strictly, by name and shape; optimiser, schedule and step stay fresh."""
        load_weights(self._checkpoint, model=model)
        return True


def _checkpoint_in(place: Path) -> Path:
    """The checkpoint that a path names, or the newest whole one of the run whose folder it is."""
    if (place / STATE).is_file():
        return place
    found = latest_complete(place / "checkpoints", identity=None)
    if found is None:
        inside = _newest_inside(place)
        raise InputError(
            place,
            expected="the folder of a run with a whole checkpoint, or a checkpoint",
            got="none" if inside is None else "a folder of checkpoints",
            fix="name another place; a run without a checkpoint starts without --resume"
            if inside is None
            else f"give --resume {inside}",
        )
    return found


def _newest_inside(place: Path) -> Path | None:
    """The newest whole checkpoint in the folder of a run, or in a folder of checkpoints."""
    found = latest_complete(place / "checkpoints", identity=None)
    return found or latest_complete(place, identity=None)


def _copy_logs(run: Path, state: RunState, progress: Progress) -> int:
    """Replace the logs of a run's folder by those of another; return how many rows were cut off."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in (_STEPS, _SECONDS):
            if (run / name).is_file():
                shutil.copyfile(run / name, Path(scratch) / name)
        logs = RunState(Path(scratch))
        try:
            n_later = logs.roll_back(progress.step, log_sha256=progress.log_sha256)
        except InputError as error:
            fix = "bring that file over whole, or start a new run with --fork"
            raise InputError(
                run / _STEPS, expected=error.expected, got=error.got, fix=fix
            ) from None
        finally:
            logs.close()
        for name in (_STEPS, _SECONDS):
            write_bytes(state.directory / name, (Path(scratch) / name).read_bytes())
    if (run / MACHINE).is_file():
        write_bytes(state.directory / MACHINE, (run / MACHINE).read_bytes())
    if (run / state.trace.name).is_dir():
        with whole_directory(state.trace, holds=["*"]) as aside:
            shutil.copytree(run / state.trace.name, aside, dirs_exist_ok=True)
    return n_later


@contextmanager
def _while_nobody_trains(run: Path) -> Iterator[None]:
    """Keep trainers out of a run's folder, which may be one that cannot be written to."""
    if not (run / "lock").is_file():
        yield
        return
    with (run / "lock").open(encoding="utf-8", errors="replace") as lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                run,
                expected="a run that no process trains",
                got=lock.read().strip() or "another process",
                fix="wait for it or end it",
            ) from None
        yield


def _newest_state(checkpoints: Path) -> State | None:
    """What the newest checkpoint says that can be read; its tensors are not looked at."""
    places = [path for path in checkpoints.iterdir() if number_of(path) is not None]
    for place in sorted(places, key=lambda path: number_of(path) or 0, reverse=True):
        try:
            return read_state(place)
        except InputError:
            continue
    return None


def _plain(state: State) -> dict[str, Any]:
    return state.identity.model_dump(mode="json")
