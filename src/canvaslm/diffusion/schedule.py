"""How much of a canvas is still clean at time t of N?

The cosine schedule of Nichol and Dhariwal (2021, arXiv 2102.09672), without its offset: the clean
share falls as cos² from 1 at time 0 to 0 at time N. Both ends are literals, since the cosine of the
nearest float to π/2 is not zero. ``docs/process.md`` says what the share is used for.
"""

import math
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, overload

import numpy as np
from pydantic import Field, model_validator

from canvaslm.errors import InputError
from canvaslm.params import Params

if TYPE_CHECKING:  # stages that never need torch read DiffusionParams from here
    from torch import Tensor

# Of N: a position that should stand at an end and is rounded off it would have an end of its own.
_SNAP = 1e-9

Context: TypeAlias = Literal["clean", "noisy", "prefix"]
_TimeDraw: TypeAlias = Literal["uniform", "spread", "middle"]
_FirstPhase: TypeAlias = Literal["none", "noisy", "next_token"]


class DiffusionParams(Params):
    """How canvases are corrupted in training, and what of them is learned."""

    train_times: int | None = Field(
        ge=1, description="diffusion times used in training (N); null: any time in (0, 1]"
    )
    time_draw: _TimeDraw = Field(
        description="how the time of a canvas is drawn: by itself (uniform), at even distances "
        "over the canvases of the run (spread), or more often from the middle (middle)"
    )
    context: Context = Field(
        description="what a noisy canvas sees of the earlier ones: their clean tokens in a stream "
        "of their own (clean), their noisy tokens (noisy), or a clean prefix of random length and "
        "then noisy tokens (prefix)"
    )
    loss: Literal["plain", "changed", "bound"] = Field(
        description="what is learned: the clean token at every position (plain), at those whose "
        "token was drawn anew (changed), or the step of the likelihood bound (bound)"
    )
    next_token_weight: float = Field(
        ge=0,
        description="weight of the summed next-token nats of the clean stream beside the summed "
        "nats of the denoising loss, both divided by the targets of the latter; 0: none",
    )
    first_phase: _FirstPhase = Field(
        description="what the run begins with: the noisy context, at the price of one stream "
        "(noisy), the next-token loss alone (next_token), or what it ends with (none)"
    )
    first_phase_share: float = Field(
        ge=0, lt=1, description="share of the optimiser steps that the first phase takes"
    )
    self_conditioning_share: float = Field(
        ge=0, le=1, description="share of windows whose second pass sees the guess of a first pass"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (self.first_phase == "none") != (self.first_phase_share == 0):
            raise ValueError(
                "first_phase_share 0 exactly where first_phase is none "
                f"({self.first_phase_share:g}, {self.first_phase})"
            )
        needs_clean = self.next_token_weight > 0 or self.first_phase != "none"
        if needs_clean and self.context != "clean":
            raise ValueError(
                "context clean, where next_token_weight or first_phase asks for a clean stream "
                f"({self.context})"
            )
        if self.loss == "bound" and self.train_times is None:
            raise ValueError("train_times, where loss is bound: its steps have a number (null)")
        return self

    @property
    def n_times(self) -> int:
        """The number that a time is divided by to lie in [0, 1]: N, or 1 for continuous times."""
        return self.train_times or 1

    @property
    def learns_next_token(self) -> bool:
        """Whether the clean stream is trained to predict the next token."""
        return self.next_token_weight > 0


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


@overload
def position_times(
    times: np.ndarray, *, canvas_tokens: int, n_times: int, tilt: float
) -> np.ndarray: ...
@overload
def position_times(
    times: "Tensor", *, canvas_tokens: int, n_times: int, tilt: float
) -> "Tensor": ...
def position_times(
    times: "np.ndarray | Tensor", *, canvas_tokens: int, n_times: int, tilt: float
) -> "np.ndarray | Tensor":
    """The time of each position of canvases at the given times.

    Without a tilt it is the time of the canvas. With one, each position hurries through all of its
    times in 1/(1 + tilt) of the canvas's, the last position first on the way to noise, and so last
    on the way to text (Wu et al. 2023, arXiv 2305.09515): position i of L stands at
    t + tilt·(t − N·(1 − i/(L−1))), and at 0 or N beyond those ends. At t = 0 all are clean and at
    t = N all are noise, whatever the tilt. A canvas of one token has none.

    Args:
        times: (..., C) times of canvases in 0..N, whole or fractional.
        canvas_tokens: L.
        n_times: the number of times, N; 1 where times are shares of 1.
        tilt: 0 or more.

    Returns:
        (..., C·L) of the same kind and device: float64 with a tilt, else of the type of ``times``.
    """
    if isinstance(times, np.ndarray):
        each = np.repeat(times, canvas_tokens, axis=-1)
        if tilt == 0 or canvas_tokens == 1:
            return each
        late = np.tile(_lateness(canvas_tokens), times.shape[-1])
        each = each + tilt * (each - n_times * late)
        low, high = _SNAP * n_times, n_times - _SNAP * n_times
        return np.where(each < low, 0.0, np.where(each > high, float(n_times), each))
    each = times.repeat_interleave(canvas_tokens, dim=-1)
    if tilt == 0 or canvas_tokens == 1:
        return each
    each = each.double()
    late = each.new_tensor(_lateness(canvas_tokens)).repeat(times.shape[-1])
    each = each + tilt * (each - n_times * late)
    low, high = _SNAP * n_times, n_times - _SNAP * n_times
    return each.masked_fill(each < low, 0.0).masked_fill(each > high, float(n_times))


def tilt_speed(tilt: float, canvas_tokens: int) -> float:
    """How many times as fast a position goes through its times as its canvas does."""
    return 1.0 + tilt if canvas_tokens > 1 else 1.0


def noisy_share(tilt: float, canvas_tokens: int) -> float:
    """For what share of a canvas's time one of its positions is not clean, on average."""
    waits = tilt / (1 + tilt) if canvas_tokens > 1 else 0.0
    return 1 - waits / 2


def _lateness(canvas_tokens: int) -> np.ndarray:
    """(L,) in 1..0: what part of the canvas's time the noise of a position waits, by the tilt."""
    return 1 - np.arange(canvas_tokens) / (canvas_tokens - 1)


def _refuse_times_outside(t: "np.ndarray | Tensor", n_times: int) -> None:
    """Raise unless every time lies in 0..N; NaN lies nowhere."""
    if not bool(((t >= 0) & (t <= n_times)).all()):
        worst = next(time for time in map(float, t.reshape(-1)) if not 0 <= time <= n_times)
        raise InputError(
            "clean_share", expected=f"times in 0..{n_times}", got=f"{worst:g}", fix="check t"
        )
