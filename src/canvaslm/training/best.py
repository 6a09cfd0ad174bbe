"""Which checkpoints of a run are its best, by what training itself saw?

The loss of a checkpoint is the mean nats per target of the ``save_every`` steps up to it: those
since the save before it, or as many where that save was not on its beat. It is worked out from the
record of steps, so that a run that was killed and resumed keeps the same ones.
"""

import math
from collections.abc import Iterable, Sequence

from canvaslm.training.run_state import StepRecord


def best_checkpoints(
    records: Sequence[StepRecord], saved: Iterable[int], *, save_every: int, keep: int
) -> list[int]:
    """The ``keep`` checkpoints with the lowest loss, best first.

    Of two with the same loss the later one is better. One whose steps all changed nothing, or whose
    loss is not finite, has no loss and is never among them.

    Args:
        records: every step so far, in order.
        saved: steps done at each checkpoint, none beyond the records.
        save_every: steps between two saves.
        keep: how many are asked for.
    """
    losses = {step: _loss(records, step, save_every) for step in saved}
    known = [step for step, loss in losses.items() if math.isfinite(loss)]
    return sorted(known, key=lambda step: (losses[step], -step))[:keep]


def _loss(records: Sequence[StepRecord], step: int, n_steps: int) -> float:
    """Mean nats per target of the ``n_steps`` steps up to one; NaN where none of them ran."""
    span = records[max(step - n_steps, 0) : step]
    ran = [record for record in span if record.nats is not None]
    targets = sum(record.targets for record in ran)
    return sum(record.nats or 0.0 for record in ran) / targets if targets else math.nan
