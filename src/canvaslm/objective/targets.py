"""What does a batch of windows cost, as a sum that can be added up and divided once?"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """Nats summed over the targets of some windows.

    Sums of several micro-batches are added and divided by their targets together, so that the
    result does not depend on how a batch was cut.

    Attributes:
        nats: scalar tensor, with gradient.
        n_targets: how many positions carried loss.
    """

    nats: Tensor
    n_targets: int
