"""May this step change the model, and has the run come to where it cannot go on?

Loss and gradient norm are looked at before anything is touched: clipping an infinite norm turns one
infinite gradient into NaN and all others into 0, and the step would then run. A step that may not
is skipped whole and recorded with its windows and its cause. One is an accident; several in a row,
or a weight that is itself not finite, are a state that the run has to leave.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from canvaslm.checkpoint import is_finite
from canvaslm.checkpoint_state import SkippedStep

NO_TARGETS = "no targets"
MARKED = "marked after a rollback"


@dataclass(frozen=True, kw_only=True)
class Streak:
    """The bad steps that a run stands behind.

    Attributes:
        first_bad: number of the first of them; None when the latest step that ran was good.
        n_bad: how many there are. Marked steps and steps without targets between them neither
            count nor end it.
        last_update: the latest step that changed the model; None when none has.
    """

    first_bad: int | None
    n_bad: int
    last_update: int | None


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


def is_bad(cause: str) -> bool:
    """Whether a step with this cause was not finite; others are skipped on purpose."""
    return cause not in ("", NO_TARGETS, MARKED)


def streak(skipped: Sequence[SkippedStep], *, steps_done: int) -> Streak:
    """Look back from where a run stands to the latest step that changed the model."""
    first_bad, n_bad, step = None, 0, steps_done - 1
    for item in reversed(skipped):
        if item.step != step:
            break
        if is_bad(item.cause):
            first_bad, n_bad = step, n_bad + 1
        step -= 1
    return Streak(first_bad=first_bad, n_bad=n_bad, last_update=step if step >= 0 else None)


def damage(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Name the first weight or moment that is not finite, or return None when all are."""
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for kind, tensor in (("weight", parameter), *sorted(state.items())):
            if not is_finite(tensor):
                return f"{kind} of {name} is not finite"
    return None
