"""How much of a canvas is still clean at time t of N?

The cosine schedule of Nichol and Dhariwal (2021, arXiv 2102.09672), without its offset: the clean
share falls as cos² from 1 at time 0 to 0 at time N. Both ends are literals, since the cosine of the
nearest float to π/2 is not zero. ``docs/process.md`` says what the share is used for.
"""

import math
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np
from pydantic import Field

from canvaslm.errors import InputError
from canvaslm.params import Params

if TYPE_CHECKING:  # stages that never need torch read DiffusionParams from here
    from torch import Tensor

Context: TypeAlias = Literal["clean", "noisy", "prefix"]


class DiffusionParams(Params):
    """How canvases are corrupted in training."""

    train_times: int = Field(ge=1, description="diffusion times used in training (N)")
    context: Context = Field(
        description="what a noisy canvas sees of the earlier ones: their clean tokens in a stream "
        "of their own (clean), their noisy tokens (noisy), or a clean prefix of random length and "
        "then noisy tokens (prefix)"
    )
    self_conditioning_share: float = Field(
        ge=0, le=1, description="share of windows whose second pass sees the guess of a first pass"
    )


@overload
def clean_share(t: float, n_times: int) -> float: ...
@overload
def clean_share(t: np.ndarray, n_times: int) -> np.ndarray: ...
@overload
def clean_share(t: "Tensor", n_times: int) -> "Tensor": ...
def clean_share(t: "float | np.ndarray | Tensor", n_times: int) -> "float | np.ndarray | Tensor":
    """Probability ᾱ(t) = cos²(π/2 · t/N) that a token is kept up to time t.

    Args:
        t: times in 0..N, whole or fractional: a number, an array or a tensor of any shape.
        n_times: the number of times, N.

    Returns:
        The share in float64, of the same kind, shape and device as ``t``; exactly 1 at t = 0 and
        exactly 0 at t = N.

    Raises:
        InputError: a time lies outside 0..N.
    """
    if isinstance(t, (int, float, np.generic)):
        return float(clean_share(np.asarray(t, dtype=np.float64), n_times))
    _refuse_times_outside(t, n_times)
    if isinstance(t, np.ndarray):
        share = np.cos(t * (math.pi / 2 / n_times)) ** 2
        return np.where(t == 0, 1.0, np.where(t == n_times, 0.0, share))
    # Methods of the tensor alone, so that this module loads without torch.
    share = (t.double() * (math.pi / 2 / n_times)).cos() ** 2
    return share.masked_fill(t == 0, 1.0).masked_fill(t == n_times, 0.0)


def _refuse_times_outside(t: "np.ndarray | Tensor", n_times: int) -> None:
    """Raise unless every time lies in 0..N; NaN lies nowhere."""
    if not bool(((t >= 0) & (t <= n_times)).all()):
        worst = next(time for time in map(float, t.reshape(-1)) if not 0 <= time <= n_times)
        raise InputError(
            "clean_share", expected=f"times in 0..{n_times}", got=f"{worst:g}", fix="check t"
        )
