"""Where does a run go back to when it cannot go on, and what makes the second try another one?

A run is a pure function of what it is and of the steps that it passes over. Going back alone would
therefore end in the same place, so the step that began the trouble is marked: its windows are
consumed and change nothing, in this try and in every later one. The mark stands in the state of the
checkpoint before the second try starts, so that a killed run goes on with it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from canvaslm.checkpoint import go_back_to, latest_complete, restore
from canvaslm.checkpoint_state import Progress, Rollback, read_state
from canvaslm.errors import GateClosedError
from canvaslm.training.guard import damage, is_bad, streak
from canvaslm.training.learner import Learner
from canvaslm.training.plan import PretrainParams
from canvaslm.training.run_state import RunState

_Windows = Callable[[int], tuple[np.ndarray, np.ndarray]]

_log = logging.getLogger(__name__)


def find_trouble(learner: Learner, progress: Progress, *, limit: int) -> str | None:
    """Say why a run cannot go on from where it stands, or return None when it can.

    Args:
        learner: the model and its optimiser.
        progress: where the run stands.
        limit: how many bad steps in a row are too many.
    """
    broken = damage(learner.model, learner.optimizer)
    if broken is not None:
        return broken
    found = streak(progress.skipped, steps_done=progress.step)
    if found.n_bad < limit:
        return None
    latest = progress.skipped[-found.n_bad :]
    causes = sorted({item.cause for item in latest if is_bad(item.cause)})
    return f"{found.n_bad} steps in a row changed nothing ({', '.join(causes)})"


def roll_back(
    learner: Learner,
    state: RunState,
    *,
    progress: Progress,
    cause: str,
    windows_of: _Windows,
    identity: dict[str, object],
    params: PretrainParams,
) -> Progress:
    """Go back to the newest whole checkpoint before the step that began the trouble; mark it.

    Weights, moments, counters and logs become those of the checkpoint.

    Args:
        learner: what is put back.
        state: the run's folder.
        progress: where the run stands.
        cause: what :func:`find_trouble` said.
        windows_of: for a step, its ids (W, T) and their numbers (W,).
        identity: what run this is.
        params: how often a run may go back.

    Raises:
        GateClosedError: it went back too often, or there is no checkpoint to go back to.
    """
    newest = latest_complete(state.checkpoints, identity=identity)
    since = 0 if newest is None else read_state(newest).progress.step
    beginning = _find_beginning(learner, progress, since, windows_of)
    blamed = beginning.blamed
    told = f"pretrain: {cause}; {beginning.in_words(params.windows_per_step)}"
    advice = "lower the learning rates, or look at those windows, and run it again"
    if len(progress.rollbacks) >= params.max_rollbacks:
        raise GateClosedError(f"{told}; the run went back {params.max_rollbacks} times; {advice}")
    target = latest_complete(state.checkpoints, identity=identity, up_to=blamed)
    if target is None:
        raise GateClosedError(f"{told}; there is no checkpoint to go back to; {advice}")
    there = restore(target, model=learner.model, optimizer=learner.optimizer)
    record = Rollback(
        from_step=progress.step,
        to_step=there.step,
        cause=cause,
        bad_steps=sum(s.step >= there.step and is_bad(s.cause) for s in progress.skipped),
        marked=(blamed,),
    )
    there = there.model_copy(update={"rollbacks": (*progress.rollbacks, record)})
    go_back_to(target, there)
    state.roll_back(there.step, log_sha256=there.log_sha256)
    _log.warning("%s; back to step %d, step %d is passed over", told, there.step, blamed)
    return there


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    """Which step is blamed, beside the one that the log of skipped steps names first.

    Attributes:
        blamed: its number.
        first_bad: the first bad step of those that the run stands behind; None without one.
        why: why an update is blamed that was itself finite; empty where it is the first bad step.
    """

    blamed: int
    first_bad: int | None
    why: str = ""

    def in_words(self, windows_per_step: int) -> str:
        """Name both steps with their windows, so that no reader takes one for the other."""

        def named(step: int) -> str:
            first = step * windows_per_step
            return f"step {step} (window numbers {first} to {first + windows_per_step - 1})"

        if self.blamed == self.first_bad:
            return f"first bad {named(self.blamed)}, which is blamed"
        bad = (
            "no bad step before it"
            if self.first_bad is None
            else f"first bad {named(self.first_bad)}"
        )
        return f"{bad}; the update of {named(self.blamed)} is blamed, because {self.why}"


def _find_beginning(
    learner: Learner, progress: Progress, since: int, windows_of: _Windows
) -> _Beginning:
    """The step to blame: the first bad one, or the update before it where that broke the model.

    Which of the two it was, its own windows tell: the update was made from them when they gave a
    finite loss and gradient, so a model that no longer does on the same windows was broken by it.
    A weight or moment that is not finite became so after the latest checkpoint, at ``since``.
    """
    found = streak(progress.skipped, steps_done=progress.step)
    first_bad, update = found.first_bad, found.last_update
    why = ""
    if update is not None and damage(learner.model, learner.optimizer) is not None:
        why = "it is the latest before that was found" if update >= since else ""
    elif update is not None:
        broken = learner.find_fault(*windows_of(update))
        if broken is not None and is_bad(broken):
            why = f"its own windows, finite then, no longer are: {broken}"
    if update is not None and why:
        return _Beginning(blamed=update, first_bad=first_bad, why=why)
    if first_bad is not None:
        return _Beginning(blamed=first_bad, first_bad=first_bad)
    return _Beginning(blamed=progress.step - 1, first_bad=None, why="it is the latest step")
