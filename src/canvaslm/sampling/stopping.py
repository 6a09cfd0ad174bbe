"""When is a row's canvas done before its last step?

A rule is asked once a step and answers for each row on its own; a row that is done is frozen there
while the others go on. A rule remembers one number for a row, its streak: for how many steps in a
row the thing that the rule waits for has held. Entropy that is not finite is never low.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from canvaslm.sampling.prediction import Prediction


class Stopping(Protocol):
    """One question: is this row's canvas done?

    Attributes:
        reads_every_position: whether the answer rests on the numbers of accepted positions, which
            then must be made anew at each step.
    """

    reads_every_position: ClassVar[bool]

    def extend(self, streak: Tensor, now: Prediction, before: Prediction | None) -> Tensor:
        """Carry the streak of each row, (B,) int64, over one more step; it starts at 0."""
        ...

    def is_done(self, streak: Tensor, now: Prediction) -> Tensor:
        """Say which rows are done, (B,) bool, given the streak that includes this step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Never:
    """The fixed schedule: a canvas takes all its steps, whatever the entropy."""

    reads_every_position: ClassVar[bool] = False

    def extend(self, streak: Tensor, now: Prediction, before: Prediction | None) -> Tensor:
        """As :meth:`Stopping.extend`; there is nothing to count."""
        return streak

    def is_done(self, streak: Tensor, now: Prediction) -> Tensor:
        """As :meth:`Stopping.is_done`: no row ever is."""
        return torch.zeros_like(streak, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class MeanEntropy:
    """Done when the canvas's mean entropy was below a threshold on ``patience`` steps running.

    Args:
        threshold: nats.
        patience: steps, at least 1; 1 stops at the first step below the threshold.
    """

    reads_every_position: ClassVar[bool] = True

    threshold: float
    patience: int

    def extend(self, streak: Tensor, now: Prediction, before: Prediction | None) -> Tensor:
        """As :meth:`Stopping.extend`."""
        return torch.where(now.entropy.mean(-1) < self.threshold, streak + 1, 0)

    def is_done(self, streak: Tensor, now: Prediction) -> Tensor:
        """As :meth:`Stopping.is_done`."""
        return streak >= self.patience


@dataclass(frozen=True, kw_only=True)
class StableAndConfident:
    """Done when the argmax canvas has repeated itself ``patience`` times and the model is sure.

    ``patience`` counts *extra* repeats, so k means k + 1 equal argmax canvases running: with
    canvases A, B, B, B and low entropy, 0 stops at the first step, 1 at the third, 2 at the
    fourth. The entropy is asked for at the step that stops.

    Args:
        threshold: mean entropy of the canvas, nats.
        patience: extra repeats, 0 or more.
    """

    reads_every_position: ClassVar[bool] = True

    threshold: float
    patience: int

    def extend(self, streak: Tensor, now: Prediction, before: Prediction | None) -> Tensor:
        """As :meth:`Stopping.extend`."""
        if before is None:
            return torch.zeros_like(streak)
        repeats = (now.argmax == before.argmax).all(-1)
        return torch.where(repeats, streak + 1, 0)

    def is_done(self, streak: Tensor, now: Prediction) -> Tensor:
        """As :meth:`Stopping.is_done`."""
        return (streak >= self.patience) & (now.entropy.mean(-1) < self.threshold)
