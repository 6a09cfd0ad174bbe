"""What is the noisy token of a position evidence of?

Of the clean token, says the network: it was trained on canvases in which a noisy token is the
clean one with the probability ᾱ_t, and its softmax is the posterior under that belief. In a
sampler this holds where a token was accepted. Everywhere else the token was drawn uniformly just
before the step, whatever the text is; it is evidence of nothing, and an answer that gives it
weight leans towards noise, more so the lower the time is.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from canvaslm.diffusion.bound import cavity_logits


class Evidence(Protocol):
    """One question: what is the noisy token of a position evidence of?"""

    def weigh(
        self, logits: Tensor, noisy: Tensor, accepted: Tensor, *, t: int, n_times: int
    ) -> Tensor:
        """Turn the network's logits into those that are sampled from.

        Args:
            logits: (B, L, V), of the posterior under the corruption process.
            noisy: (B, L) int64, what the network read.
            accepted: (B, L) bool, where that is an accepted token; elsewhere it is a fresh draw.
            t: the time of the step, in 1..N.
            n_times: the number of steps, N.

        Returns:
            (B, L, V), any float dtype.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Of the clean token, at every position: the logits as they are."""

    def weigh(
        self, logits: Tensor, noisy: Tensor, accepted: Tensor, *, t: int, n_times: int
    ) -> Tensor:
        """As :meth:`Evidence.weigh`; only ``logits`` matters."""
        return logits


@dataclass(frozen=True, kw_only=True)
class Cavity:
    """Of the clean token where it was accepted, and of nothing where it is a fresh draw.

    There the evidence of the token itself is taken out of the posterior, which leaves what the
    rest of the canvas and the context say (``docs/bound.md``). At t = N there is none to take.
    """

    def weigh(
        self, logits: Tensor, noisy: Tensor, accepted: Tensor, *, t: int, n_times: int
    ) -> Tensor:
        """As :meth:`Evidence.weigh`; float64."""
        cavity = cavity_logits(logits, noisy, t=t, n_times=n_times)
        return torch.where(accepted[..., None], logits.double(), cavity)
