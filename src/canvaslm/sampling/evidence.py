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

from canvaslm.diffusion.bound import token_evidence
from canvaslm.diffusion.schedule import position_times
from canvaslm.model.backbone import Backbone


class Evidence(Protocol):
    """One question: what is the noisy token of a position evidence of?"""

    def excess(self, accepted: Tensor, own: Tensor) -> Tensor | None:
        """How much too much a posterior's logit of the noisy token has.

        Args:
            accepted: (B, L) bool, where the noisy token is an accepted one; elsewhere it is a
                fresh draw.
            own: (L,) float64, what a noisy token adds to its own logit at the step.

        Returns:
            (B, L) float64, 0 or more; ``None`` where that is 0 everywhere.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Of the clean token, at every position: the logits as they are."""

    def excess(self, accepted: Tensor, own: Tensor) -> Tensor | None:
        """As :meth:`Evidence.excess`; nothing."""
        return None


@dataclass(frozen=True, kw_only=True)
class Cavity:
    """Of the clean token where it was accepted, and of nothing where it is a fresh draw.

    There the evidence of the token itself is taken out of the posterior, which leaves what the
    rest of the canvas and the context say (``docs/bound.md``). At t = N there is none to take.
    """

    def excess(self, accepted: Tensor, own: Tensor) -> Tensor | None:
        """As :meth:`Evidence.excess`."""
        return (~accepted).double().mul_(own) if bool(own.any()) else None


def excess(
    rule: Evidence, accepted: Tensor, *, t: int, n_times: int, model: Backbone
) -> Tensor | None:
    """What comes off a network's logit of the noisy token, so that the rule holds.

    A network under the likelihood bias gives the cavity: what its logits lack is added first.

    Args:
        rule: what the noisy tokens are evidence of.
        accepted: (B, L) bool.
        t: the time of the step, in 1..N.
        n_times: the number of steps, N.
        model: the network.

    Returns:
        (B, L) float64, negative where evidence is added; ``None`` where there is nothing to do.
    """
    times = step_times(t, n_times=n_times, model=model)
    own = token_evidence(times, n_times, model.layout.vocab_size)[: accepted.shape[1]]
    too_much = rule.excess(accepted, own)
    if not model.params.likelihood_bias or not bool(own.any()):
        return too_much
    found = accepted.new_zeros(accepted.shape, dtype=torch.float64)
    return (found if too_much is None else too_much) - own


def step_times(t: int, *, n_times: int, model: Backbone) -> Tensor:
    """(L,) float64, the time of each position of a canvas at a step, in 0..N."""
    return position_times(
        torch.tensor([t], dtype=torch.float64, device=model.head_weight.device),
        canvas_tokens=model.layout.canvas_tokens,
        n_times=n_times,
        tilt=model.params.tilt,
    )
