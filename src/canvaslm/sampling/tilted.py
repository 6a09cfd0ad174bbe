"""Which positions may not choose, since a tilt has cleared them already, or not begun to?

Under a tilt each position has a time of its own (``docs/process.md``). One whose time after a step
is 0 keeps its token: the network was told in training that nothing there is noise any more. One
whose time is still N keeps none: there the network takes every token for noise. Between the two an
acceptance rule chooses as ever, and it is shown the others as positions that may not be accepted.
"""

import dataclasses
import math

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
    after = now.n_steps - now.step - 1
    if model.params.tilt == 0 or after == 0:
        return rule.accept(now, before, accepted)
    times = step_times(after, n_times=now.n_steps, model=model)
    waits, is_cleared = times == now.n_steps, times == 0
    shown = dataclasses.replace(
        now,
        confidence=now.confidence.masked_fill(waits, -math.inf),
        entropy=now.entropy.masked_fill(waits, math.inf),
    )
    return rule.accept(shown, before, accepted) & ~waits | is_cleared
