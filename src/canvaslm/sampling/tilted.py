"""Which positions may not choose, since a tilt has cleared them already, or not begun to?

Under a tilt each position has a time of its own (``docs/process.md``). One whose time after a step
is 0 has its token from then on, and no later step draws it anew: the network was told in training
that nothing there is noise any more, and learned nothing there. One whose time is still N keeps
none: there the network takes every token for noise. Between the two an acceptance rule chooses as
ever, and it is shown the others as positions that may not be accepted. After the last step every
time is 0, so that no rule is asked.
"""

import dataclasses
import math

import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.sampling.acceptance import Acceptance
from canvaslm.sampling.evidence import step_times
from canvaslm.sampling.prediction import Prediction


def accept(
    rule: Acceptance,
    now: Prediction,
    before: Prediction | None,
    accepted: Tensor,
    *,
    model: Backbone,
) -> Tensor:
    """Ask a rule about the positions of which a choice is left.

    Args:
        rule: which positions keep their token.
        now: this step.
        before: the step before, ``None`` on the first.
        accepted: (B, L) bool, what the step before had accepted.
        model: its tilt says what is left; without one the rule is asked about all.

    Returns:
        (B, L) bool.
    """
    if model.params.tilt == 0:
        return rule.accept(now, before, accepted)
    times = step_times(now.n_steps - now.step - 1, n_times=now.n_steps, model=model)
    waits, is_cleared = times == now.n_steps, times == 0
    has_no_choice = waits | is_cleared
    shown = dataclasses.replace(
        now,
        confidence=now.confidence.masked_fill(has_no_choice, -math.inf),
        entropy=now.entropy.masked_fill(has_no_choice, math.inf),
    )
    return rule.accept(shown, before, accepted) & ~waits | is_cleared


def keep(
    rule: Acceptance, now: Prediction, held: Tensor, accepted: Tensor, *, model: Backbone
) -> Tensor:
    """Tell where the token of an earlier step stays, whatever this step has drawn there.

    Args:
        rule: one that takes nothing back keeps what it has accepted.
        now: this step.
        held: (B, L) bool, what the step before had accepted.
        accepted: (B, L) bool, what this one accepts.
        model: its tilt says what was clean before the step, and stays under any rule.

    Returns:
        (B, L) bool.
    """
    if rule.is_monotone:
        return held & accepted
    if model.params.tilt == 0:
        return torch.zeros_like(held)
    return held & (step_times(now.n_steps - now.step, n_times=now.n_steps, model=model) == 0)
