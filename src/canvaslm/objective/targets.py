"""What does a batch of windows cost, as a sum that can be added up and divided once?"""

from collections.abc import Sequence
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
        companion: scalar tensor, what a second loss adds to the gradient, already weighed; it is
            divided by the same number and is no part of ``nats``. None: there is none.
    """

    nats: Tensor
    n_targets: int
    companion: Tensor | None = None

    @property
    def pull(self) -> Tensor:
        """What gradients are taken of."""
        return self.nats if self.companion is None else self.nats + self.companion


def add(parts: Sequence[LossSum]) -> LossSum:
    """The sum of several batches, as if they had been one."""
    companions = [part.companion for part in parts if part.companion is not None]
    return LossSum(
        nats=sum((part.nats for part in parts[1:]), start=parts[0].nats),
        n_targets=sum(part.n_targets for part in parts),
        companion=sum(companions[1:], start=companions[0]) if companions else None,
    )
