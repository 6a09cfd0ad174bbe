"""May this step change the model?

Loss and gradient norm are looked at before anything is touched: clipping an infinite norm turns one
infinite gradient into NaN and all others into 0, and the step would then run. A step that may not
is skipped whole, recorded with its windows and its cause, and too many of them in a row end the
run, because a retry that changes nothing would fail in the same way for ever.
"""

import math
from collections.abc import Sequence

from canvaslm.checkpoint_state import SkippedStep
from canvaslm.errors import GateClosedError

NO_TARGETS = "no targets"


def fault(*, nats: float, n_targets: int, gradient_norm: float) -> str | None:
    """Name what is wrong with a step, or return None when it may run.

    Args:
        nats: the step's loss, summed over its targets.
        n_targets: how many targets the step scores; 0 is a defined case and not a NaN.
        gradient_norm: norm of the whole gradient before clipping.
    """
    if n_targets == 0:
        return NO_TARGETS
    if not math.isfinite(nats):
        return f"loss is {nats}"
    if not math.isfinite(gradient_norm):
        return f"gradient norm is {gradient_norm}"
    return None


def stop_after_too_many(skipped: Sequence[SkippedStep], *, steps_done: int, limit: int) -> None:
    """End the run when it no longer learns.

    Raises:
        GateClosedError: the latest ``limit`` steps were all skipped.
    """
    in_a_row = _in_a_row(skipped, steps_done=steps_done)
    if in_a_row < limit:
        return
    causes = ", ".join(sorted({item.cause for item in skipped[-in_a_row:]}))
    first, last = skipped[-in_a_row].first_window, skipped[-1].last_window
    raise GateClosedError(
        f"pretrain: {in_a_row} steps in a row changed nothing ({causes}), window numbers "
        f"{first} to {last}; lower learning_rate, or look at those windows, and run it again"
    )


def _in_a_row(skipped: Sequence[SkippedStep], *, steps_done: int) -> int:
    """How many of the latest steps were skipped without a good one between them."""
    last = steps_done - 1
    count = 0
    while count < len(skipped) and skipped[-1 - count].step == last - count:
        count += 1
    return count
