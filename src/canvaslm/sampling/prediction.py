"""What does one forward say about a canvas, and which token is drawn from it?

Candidate, confidence and entropy all come from one distribution, softmax(logits/τ) in float64:
what a rule is told is exactly what was sampled from. Tokens are drawn by inverting the cumulated
distribution at one uniform number in a position, which has the same law as the Gumbel-max trick
and needs one random number where that needs V. At τ = 0 the candidate is the argmax, no random
number is used, and the rules read softmax(logits): the limit τ → 0 would tell every rule that it
is certain of everything.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.device import wide


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step's view of each row's canvas; all tensors are (B, L).

    Attributes:
        step: number of the step, from 0.
        n_steps: the most steps that the canvas may take.
        candidates: ids drawn from the shaped distribution, int64.
        argmax: most probable ids, int64.
        confidence: probability of the argmax, float64.
        entropy: of the shaped distribution, nats, float64; not finite where a logit is not.
    """

    step: int
    n_steps: int
    candidates: Tensor
    argmax: Tensor
    confidence: Tensor
    entropy: Tensor

    def rows(self, chosen: Tensor) -> "Prediction":
        """The same for some of the rows, ``chosen`` (B,) bool or (B',) int64."""
        return Prediction(
            step=self.step,
            n_steps=self.n_steps,
            candidates=self.candidates[chosen],
            argmax=self.argmax[chosen],
            confidence=self.confidence[chosen],
            entropy=self.entropy[chosen],
        )


def predict(
    logits: Tensor, *, temperature: float, uniforms: Tensor | None, step: int, n_steps: int
) -> Prediction:
    """Shape the logits, draw a candidate at each position, and measure how sure the model is.

    Args:
        logits: (B, L, V), any float dtype.
        temperature: τ ≥ 0.
        uniforms: (B, L) float64 in [0, 1); ``None`` exactly when τ is 0.
        step: number of the step, from 0.
        n_steps: the most steps that the canvas may take.
    """
    assert (uniforms is None) == (temperature == 0.0)
    probabilities = shaped_probabilities(logits, temperature=temperature)
    argmax = logits.argmax(-1)
    candidates = argmax if uniforms is None else invert(probabilities, uniforms)
    return Prediction(
        step=step,
        n_steps=n_steps,
        candidates=candidates,
        argmax=argmax,
        confidence=probabilities.amax(-1),
        entropy=torch.special.entr(probabilities).sum(-1),
    )


def draw(logits: Tensor, *, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The candidate of each row alone, for a decoder that asks for nothing else.

    Args:
        logits: (B, V), any float dtype; the exponentials have the wide type, their sums float64.
        temperature: τ ≥ 0.
        uniforms: (B,) float64 in [0, 1); not looked at where τ is 0.

    Returns:
        Ids (B,), by the law of :func:`predict`, and whether a row's numbers are finite, (B,) bool.
    """
    logits = logits.to(wide(logits.dtype))
    if temperature == 0.0:
        return logits.argmax(-1), logits.isfinite().all(-1)
    exponents = logits - logits.amax(-1, keepdim=True)
    cumulated = exponents.mul_(1.0 / temperature).exp_().cumsum(-1, dtype=torch.float64)
    return _invert_cumulated(cumulated, uniforms), cumulated[:, -1].isfinite()


def law_of(logits: Tensor, *, temperature: float) -> Tensor:
    """What is drawn from at a temperature: softmax(logits/τ), all on the argmax where τ is 0.

    Args:
        logits: (..., V), any float dtype.
        temperature: τ ≥ 0.

    Returns:
        (..., V) float64; NaN throughout where a logit is not finite.
    """
    if temperature:
        return shaped_probabilities(logits, temperature=temperature)
    certain = torch.zeros_like(logits, dtype=torch.float64)
    certain.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return certain.masked_fill_(~logits.amax(-1, keepdim=True).isfinite(), math.nan)


def shaped_probabilities(logits: Tensor, *, temperature: float) -> Tensor:
    """softmax(logits/τ) over the last dimension in float64; softmax(logits) where τ is 0."""
    return torch.softmax(logits.double() / (temperature or 1.0), -1)


def invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id for each uniform number: the first whose cumulated probability exceeds it.

    An id of probability 0 is never drawn. Where the probabilities are not finite the id means
    nothing; whoever calls looks at the entropy first.

    Args:
        probabilities: (..., V) float64, summing to 1 up to rounding.
        uniforms: (...) float64 in [0, 1), multiples of 2^-53 as NumPy draws them.

    Returns:
        ids (...) int64 in 0..V-1.
    """
    return _invert_cumulated(probabilities.cumsum(-1), uniforms)


def uniform_ids(
    draws: Sequence[np.random.Generator], n_ids: int, vocab_size: int, device: torch.device
) -> Tensor:
    """Fresh noise (B, n_ids) int64: real ids, each row from its own generator."""
    rows = np.stack([generator.integers(vocab_size, size=n_ids) for generator in draws])
    return torch.from_numpy(rows).to(device)


def uniform_numbers(draws: Sequence[np.random.Generator], n: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), (B, n) float64, each row from its own generator."""
    return torch.from_numpy(np.stack([draw.random(n) for draw in draws])).to(device)


def temperature_at(step: int, *, n_steps: int, start: float, end: float) -> float:
    """τ of a step, linear from ``start`` at the first step to ``end`` at the last."""
    if n_steps == 1:
        return start
    return start + (end - start) * step / (n_steps - 1)


def _invert_cumulated(cumulated: Tensor, uniforms: Tensor) -> Tensor:
    # The largest uniform number is 1 − 2^-53; times any total it rounds to less than the total.
    level = uniforms[..., None] * cumulated[..., -1:]
    drawn = torch.searchsorted(cumulated, level, right=True).squeeze(-1)
    return drawn.clamp_(max=cumulated.shape[-1] - 1)
