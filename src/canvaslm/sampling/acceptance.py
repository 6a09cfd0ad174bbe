"""Which positions of a canvas keep their token after a step?

A rule is asked once a step and answers for each position of each row. Whatever it does not accept
is drawn anew, uniformly. A monotone rule never takes a position back, and the sampler never
changes the token there; another rule decides afresh, and an accepted position holds the candidate
of this very step. A position whose numbers are not finite is never accepted.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.sampling.prediction import Prediction


class Acceptance(Protocol):
    """One question: which positions keep their token?"""

    is_monotone: ClassVar[bool]

    def accept(self, now: Prediction, before: Prediction | None, accepted: Tensor) -> Tensor:
        """Choose positions.

        Args:
            now: this step.
            before: the step before, ``None`` on the first.
            accepted: (B, L) bool, what the step before had accepted.

        Returns:
            (B, L) bool.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class UnchangedOrStronger:
    """Accept where the argmax is that of the step before, or the confidence is no lower.

    Nothing is accepted on the first step, since there is nothing to compare with.
    """

    is_monotone: ClassVar[bool] = True

    def accept(self, now: Prediction, before: Prediction | None, accepted: Tensor) -> Tensor:
        """As :meth:`Acceptance.accept`."""
        if before is None:
            return accepted
        unchanged = now.argmax == before.argmax
        stronger = now.confidence >= before.confidence
        return accepted | ((unchanged | stronger) & now.confidence.isfinite())


@dataclass(frozen=True, kw_only=True)
class EntropyBound:
    """Accept the surest positions as long as their joint uncertainty stays small.

    By ascending entropy h, the longest prefix with ``cumsum(h) − h ≤ bound``: the sum over all
    accepted positions but the least sure one bounds how far the independent draws are from a
    joint draw (Ben-Hamu et al. 2025, arXiv 2505.24857). At least one position is accepted.

    Args:
        bound: nats.
    """

    bound: float
    is_monotone: ClassVar[bool] = False

    def accept(self, now: Prediction, before: Prediction | None, accepted: Tensor) -> Tensor:
        """As :meth:`Acceptance.accept`; only ``now`` matters."""
        entropy = torch.where(now.entropy.isfinite(), now.entropy, math.inf)
        ordered, order = torch.sort(entropy, dim=-1, stable=True)
        spent_before = functional.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
        fits = (spent_before <= self.bound) & ordered.isfinite()
        return torch.zeros_like(accepted).scatter(-1, order, fits)


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Accept on a timetable: ``⌈(k+1)·L/steps⌉`` positions after step k, surest first.

    Positions accepted earlier count towards the number. Every position whose confidence lies
    above the threshold is accepted as well, whatever the timetable says.

    Args:
        threshold: probability; 1 leaves the timetable alone.
    """

    threshold: float
    is_monotone: ClassVar[bool] = True

    def accept(self, now: Prediction, before: Prediction | None, accepted: Tensor) -> Tensor:
        """As :meth:`Acceptance.accept`; ``before`` does not matter."""
        canvas_tokens = accepted.shape[-1]
        due = -(-(now.step + 1) * canvas_tokens // now.n_steps)
        finite = now.confidence.isfinite()
        confidence = torch.where(finite, now.confidence, -math.inf)
        first = torch.where(accepted, math.inf, confidence)
        rank = torch.argsort(first, dim=-1, descending=True, stable=True)
        on_time = torch.zeros_like(accepted)
        on_time.scatter_(-1, rank[..., :due], True)
        return accepted | ((on_time | (confidence > self.threshold)) & finite)
