"""Which average of its weights does a run leave to be evaluated?

An exponential moving average follows the weights after every update. It is a moment of each
parameter, in the state of the optimiser, so that it is saved, restored, and taken back with the
others.
"""

import torch
from torch import Tensor

AVERAGE = "ema"
_SPAN = 10.0  # before the decay's own memory is shorter, a tenth of the updates so far counts


def begin_average(optimizer: torch.optim.Optimizer) -> None:
    """Let the averages that are kept be the weights as they stand."""
    for parameter, state in optimizer.state.items():
        if AVERAGE in state:
            state[AVERAGE].copy_(parameter.detach())


@torch.no_grad()
def follow_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Take the averages one step towards the weights, after an update.

    After update t the memory is ``min(decay, (t - 1) / (t + 9))``. Its second part is the
    polynomial decay of Shamir and Zhang (2013, arXiv 1212.1824, with eta = 9): the first update
    leaves nothing of the initial draw, and until the decay's own memory is the shorter one, the
    average reaches back over a tenth of the updates so far.

    Args:
        optimizer: with state for every parameter, after its step.
        decay: the longest memory; nothing is kept, and nothing done, at 0.
    """
    if not decay:
        return
    share = _share(_updates(optimizer), decay)
    for parameter, state in optimizer.state.items():
        state[AVERAGE].lerp_(parameter, share)


def _share(updates: Tensor, decay: float) -> Tensor:
    """What the new weights count, as a tensor, so that no device is waited for."""
    return (_SPAN / (updates + (_SPAN - 1))).clamp(min=1 - decay)


def _updates(optimizer: torch.optim.Optimizer) -> Tensor:
    """How many updates there were, by the counter of any parameter that has one."""
    return next(state["step"] for state in optimizer.state.values() if "step" in state)
