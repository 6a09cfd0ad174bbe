"""Where does a run go back to when it cannot go on, and what makes the second try another one?

A run is a pure function of what it is and of the steps that it passes over. Going back alone would
therefore end in the same place, so the step that began the trouble is marked: its windows are
consumed and change nothing, in this try and in every later one. The mark stands in the state of the
checkpoint before the second try starts, so that a killed run goes on with it.
"""

import logging
from collections.abc import Callable

import numpy as np

from canvaslm.checkpoint import go_back_to, latest_complete, restore
from canvaslm.checkpoint_state import Progress, Rollback, read_state
from canvaslm.errors import GateClosedError
from canvaslm.training.guard import Streak, damage, is_bad, streak
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
    blamed = _find_beginning(learner, progress, since, windows_of)
    first, last = blamed * params.windows_per_step, (blamed + 1) * params.windows_per_step - 1
    told = f"pretrain: {cause}; it began at step {blamed}, window numbers {first} to {last}"
    advice = "lower learning_rate, or look at those windows, and run it again"
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
    _log.warning("%s; back to step %d, that step is passed over", told, there.step)
    return there


def _find_beginning(learner: Learner, progress: Progress, since: int, windows_of: _Windows) -> int:
    """The step to blame: the first bad one, or the update before it where that broke the model.

    Which of the two it was, its own windows tell: the update was made from them when they gave a
    finite loss and gradient, so a model that no longer does on the same windows was broken by it.
    A weight or moment that is not finite became so after the latest checkpoint, at ``since``.
    """
    found = streak(progress.skipped, steps_done=progress.step)
    candidate = found.last_update
    if candidate is None:
        return _first_bad(found, progress)
    if damage(learner.model, learner.optimizer) is not None:
        return candidate if candidate >= since else _first_bad(found, progress)
    broken = learner.find_fault(*windows_of(candidate))
    return candidate if broken is not None and is_bad(broken) else _first_bad(found, progress)


def _first_bad(found: Streak, progress: Progress) -> int:
    """The beginning of a streak; without one, the latest step."""
    return progress.step - 1 if found.first_bad is None else found.first_bad
