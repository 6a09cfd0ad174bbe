"""Does the bound say of a known model what that model costs?

With one token in a canvas, the twin's own next-token distribution is a cavity: what the clean
context says, without the noisy token. The bound of that denoiser is the twin's loss, token by
token and for every N. Here the expectation over x_t is exact, so that nothing is left to chance: a
fault in the steps, in their sum, or between the two models' windows shows in the last digits.

A check that every formula passes would prove nothing. So the known mistake is tried beside it: the
posterior, which has seen the noisy token, passed off as the cavity. It must come out different.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.bound import expected_step_nats, step_nats, token_evidence
from canvaslm.diffusion.corruption import draw_sweep_pass
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.verdict import Verdict

TOLERANCE_NATS = 1e-5  # between two float64 sums of one number; they differ by far less
_TOLD_APART_NATS = 0.01  # of a token; it moves by tenths wherever a model is sure of anything
_BLOCK_VALUES = 2**19  # float64 values of one (rows, V) table: 4 MiB


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The bound of the twin's own predictions beside the twin's loss.

    Attributes:
        n_windows: windows that it was made on; 0: none was asked for.
        n_tokens: tokens of them.
        twin_nats: the twin's loss, nats per token.
        bound_nats: the bound, nats per token, by N.
        max_difference_nats: the largest difference of a single token, by N.
        guard_n_times: N of the guard; None where no N is above 1.
        guard: what the posterior as the cavity costs more under the same draws, (M,) nats of each
            token; empty where it was not tried.
    """

    n_windows: int
    n_tokens: int
    twin_nats: float
    bound_nats: dict[int, float]
    max_difference_nats: dict[int, float]
    guard_n_times: int | None
    guard: np.ndarray

    @property
    def verdict(self) -> Verdict:
        """Whether bound and loss are one number, told by a check that can tell a mistake."""
        if self.n_windows == 0:
            return "not_measured"
        if not all(x <= TOLERANCE_NATS for x in self.max_difference_nats.values()):  # NaN is not
            return "fail"
        return "pass" if self.guard_size_nats >= _TOLD_APART_NATS else "not_measured"

    @property
    def guard_size_nats(self) -> float:
        """How far the mistake moves a token, either way, on average; 0 where it was not tried."""
        return float(np.abs(self.guard).mean()) if self.guard.size else 0.0

    @property
    def verdict_reason(self) -> str:
        """What the verdict rests on."""
        if self.n_windows == 0:
            return "eval_bound.proof_windows is 0"
        worst = max(self.max_difference_nats, key=lambda n: _size(self.max_difference_nats[n]))
        found = self.max_difference_nats[worst]
        told = (
            f"at canvas 1 the bound of the twin's predictions differs from its loss by at most "
            f"{found:.1e} nats a token (N = {worst}), {TOLERANCE_NATS:g} allowed"
        )
        if self.verdict == "not_measured":
            return f"{told}; but a posterior passed off as the cavity is not told apart"
        return told

    def metrics(self) -> dict[str, Any]:
        """The figures, as a report holds them."""
        verdict = {"verdict": self.verdict, "verdict_reason": self.verdict_reason}
        if self.n_windows == 0:
            return {"n_windows": 0, **verdict}
        return {
            "n_windows": self.n_windows,
            "n_tokens": self.n_tokens,
            "tolerance_nats": TOLERANCE_NATS,
            "autoregressive_nats_per_token": self.twin_nats,
            "estimator": "exact expectation over noisy tokens, every time, float64",
            "bounds": {
                f"n_times_{n}": {
                    "bound_nats_per_token": nats,
                    "max_difference_nats": self.max_difference_nats[n],
                }
                for n, nats in self.bound_nats.items()
            },
            "posterior_as_cavity": {
                "n_times": self.guard_n_times,
                "difference_nats_per_token": float(self.guard.mean()) if self.guard.size else None,
                "mean_absolute_difference_nats": self.guard_size_nats,
            },
            **verdict,
        }


def prove_at_canvas_one(
    twin: Backbone,
    windows: Tensor,
    numbers: np.ndarray,
    *,
    next_token: NextToken,
    n_times: Sequence[int],
    seed: int,
) -> Proof:
    """Hold the bound of the twin's next-token distribution against the twin's own loss.

    Memory is bounded: positions go through in blocks of a few megabytes.

    Args:
        twin: the autoregressive model, in any precision; a copy of it computes in float64.
        windows: (B, T) int64 held-out ids on its device; B may be 0.
        numbers: (B,) the index of each in its split, the key of the guard's draws.
        next_token: the twin's objective.
        n_times: the numbers of diffusion times, N.
        seed: of the guard's draws.
    """
    guard_times = min((n for n in n_times if n > 1), default=None)
    if not len(windows):
        return Proof(
            n_windows=0,
            n_tokens=0,
            twin_nats=math.nan,
            bound_nats={},
            max_difference_nats={},
            guard_n_times=guard_times,
            guard=np.empty(0),
        )
    exact = copy.deepcopy(twin).double().eval()
    with torch.no_grad():
        loss = next_token.nats(exact, windows).flatten()  # (M,)
        hidden = next_token.hidden(exact, windows).flatten(0, 1)  # (M, D)
        found = {n: torch.empty_like(loss) for n in n_times}
        for rows, log_x in _predictions(exact, hidden):
            clean = windows.flatten()[rows]
            for n, bound in found.items():
                bound[rows] = sum(
                    expected_step_nats(log_x, clean, t=t, n_times=n) for t in range(1, n + 1)
                )
        guard = np.empty(0)
        if guard_times is not None:
            guard = _guard(exact, hidden, windows, numbers, n_times=guard_times, seed=seed)
    return Proof(
        n_windows=len(windows),
        n_tokens=windows.numel(),
        twin_nats=float(loss.mean()),
        bound_nats={n: float(bound.mean()) for n, bound in found.items()},
        max_difference_nats={n: float((bound - loss).abs().max()) for n, bound in found.items()},
        guard_n_times=guard_times,
        guard=guard,
    )


def _guard(
    twin: Backbone,
    hidden: Tensor,
    windows: Tensor,
    numbers: np.ndarray,
    *,
    n_times: int,
    seed: int,
) -> np.ndarray:
    """(M,) what the posterior as the cavity costs more than the cavity, on the same draws."""
    V, T = twin.layout.vocab_size, windows.shape[1]
    layout = Layout(canvas_tokens=1, canvases_per_window=T, vocab_size=V)
    sweep = [
        draw_sweep_pass(
            windows,
            numbers,
            pass_number=m,
            layout=layout,
            n_times=n_times,
            tilt=0.0,
            seed=seed,
        )
        for m in range(n_times)
    ]
    more = hidden.new_zeros(len(hidden))
    for rows, log_x in _predictions(twin, hidden):
        clean = windows.flatten()[rows]
        for one in sweep:
            noisy, t = one.ids.flatten()[rows], one.times.flatten()[rows]
            seen = token_evidence(t, n_times=n_times, vocab_size=V)[:, None]
            posterior = log_x.scatter_add(1, noisy[:, None], seen)
            twice = posterior.scatter_add(1, noisy[:, None], seen)  # taken off once, it is left
            right, wrong = (
                step_nats(logits, noisy, clean, t=t, n_times=n_times)
                for logits in (posterior, twice)
            )
            more[rows] += wrong - right
    return more.cpu().numpy()


def _predictions(twin: Backbone, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The next-token log-probabilities (R, V), block by block."""
    n_rows = max(1, _BLOCK_VALUES // twin.layout.vocab_size)
    for first in range(0, len(hidden), n_rows):
        rows = slice(first, min(first + n_rows, len(hidden)))
        yield rows, twin.logits(hidden[rows]).log_softmax(-1)


def _size(difference: float) -> float:
    """A difference that is no number is the largest."""
    return difference if math.isfinite(difference) else math.inf
