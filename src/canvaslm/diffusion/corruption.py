"""What does a canvas look like at time t?

Uniform-state corruption (Austin et al. 2021, arXiv 2107.03006, "uniform" transition): a token is
kept with probability ᾱ(t), else drawn anew, uniformly over all V real tokens. There is no mask
token: a noisy canvas is a canvas of ordinary tokens. Special tokens, the end of text among them,
are real tokens, so they can be drawn; a padded row of the embedding table is none and is never
drawn; the draw may return the clean token.

Every draw belongs to a window's number, so the noise of a window does not depend on the batch in
which it is read, nor on the device. ``docs/process.md`` derives the process.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.schedule import (
    Context,
    DiffusionParams,
    clean_share,
    position_times,
)
from canvaslm.layout import Layout
from canvaslm.randomness import stream

_GOLDEN = (5**0.5 - 1) / 2  # the step whose multiples lie most evenly on a circle


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """Windows after corruption.

    Attributes:
        ids: (B, T) int64, the noisy tokens, on the device of the clean ones.
        times: (B, C), the time of each canvas in 0..N, on the same device: int64, or float64 in
            [0, 1] under continuous times, whose N is 1; 0 where a canvas is left clean, which then
            carries no loss.
    """

    ids: Tensor
    times: Tensor

    @property
    def carries_loss(self) -> Tensor:
        """(B, C) bool: the canvases that were corrupted."""
        return self.times > 0


def draw_corruption(
    clean: Tensor,
    numbers: np.ndarray,
    *,
    layout: Layout,
    diffusion: DiffusionParams,
    context: Context,
    tilt: float,
    seed: int,
) -> Noisy:
    """Corrupt windows for training: one time per canvas, on 1..N or in (0, 1].

    How a time is drawn is ``diffusion.time_draw``: uniformly by the window's own generator, as the
    mean of two such draws (``middle``), or as the next point of a sequence that fills (0, 1] evenly
    over the canvases of the run (``spread``: multiples of the golden section from a start that the
    seed draws; Weyl 1916). All three depend on the window's number alone.
    Under the context ``prefix`` a number of leading canvases, uniform on 0..C-1, stays clean.

    Args:
        clean: (B, T) int64 ids below ``layout.vocab_size``.
        numbers: (B,) the number of each window in the run, the key of its draws.
        layout: lengths and vocabulary.
        diffusion: the times and how they are drawn.
        context: what earlier canvases are to the model; a phase of a run has its own.
        tilt: of the model (``position_times``).
        seed: the run's seed.
    """
    n_canvases = layout.canvases_per_window
    times = _empty_times(len(numbers), n_canvases, diffusion)
    uniforms, replacements = _empty_draws(len(numbers), layout)
    for row, number in enumerate(numbers):
        draws = stream(seed, "corruption", int(number))
        times[row] = _draw_times(draws, int(number), n_canvases, diffusion, seed)
        n_clean = draws.integers(n_canvases)
        if context == "prefix":
            times[row, :n_clean] = 0
        _draw_tokens(draws, layout, uniforms[row], replacements[row])
    return _corrupted(clean, times, uniforms, replacements, diffusion.n_times, tilt)


def draw_sweep_pass(
    clean: Tensor,
    numbers: np.ndarray,
    *,
    pass_number: int,
    layout: Layout,
    n_times: int,
    tilt: float,
    seed: int,
) -> Noisy:
    """Corrupt windows for one of the N passes that take every canvas through every time.

    In pass m, canvas b stands at time 1 + ((b + m) mod N), so passes 0..N-1 visit each time of each
    canvas once, and a sum over them has no variance from the choice of times.

    Args:
        clean: (B, T) int64 ids below ``layout.vocab_size``.
        numbers: (B,) the index of each window in its split, with the pass the key of its draws.
        pass_number: m, in 0..N-1.
        layout: lengths and vocabulary.
        n_times: the number of diffusion times, N.
        tilt: of the model.
        seed: the evaluation's seed.
    """
    levels = sweep_levels(layout, pass_number=pass_number, n_levels=n_times)
    times = np.tile(levels, (len(numbers), 1))
    uniforms, replacements = _empty_draws(len(numbers), layout)
    for row, number in enumerate(numbers):
        draws = stream(seed, f"bound/{pass_number}", int(number))
        _draw_tokens(draws, layout, uniforms[row], replacements[row])
    return _corrupted(clean, times, uniforms, replacements, n_times, tilt)


def draw_continuous_pass(
    clean: Tensor,
    numbers: np.ndarray,
    *,
    pass_number: int,
    n_passes: int,
    layout: Layout,
    tilt: float,
    seed: int,
) -> Noisy:
    """Corrupt windows for one of the K passes that sample continuous time, a stratum at a time.

    In pass m, canvas b stands at time ((b + m) mod K + u)/K with u uniform on (0, 1]. Passes 0..K-1
    visit each K-th of the time of each canvas once: the mean over them is unbiased, and has no
    variance from how many times fall where.

    Args:
        clean: (B, T) int64 ids below ``layout.vocab_size``.
        numbers: (B,) the index of each window in its split, with the pass the key of its draws.
        pass_number: m, in 0..K-1.
        n_passes: K.
        layout: lengths and vocabulary.
        tilt: of the model.
        seed: the evaluation's seed.

    Returns:
        Noisy windows whose times are float64 in (0, 1].
    """
    levels = sweep_levels(layout, pass_number=pass_number, n_levels=n_passes)
    times = np.empty((len(numbers), layout.canvases_per_window), dtype=np.float64)
    uniforms, replacements = _empty_draws(len(numbers), layout)
    for row, number in enumerate(numbers):
        draws = stream(seed, f"continuous_bound/{pass_number}", int(number))
        times[row] = (levels - draws.random(layout.canvases_per_window)) / n_passes
        _draw_tokens(draws, layout, uniforms[row], replacements[row])
    return _corrupted(clean, times, uniforms, replacements, 1, tilt)


def sweep_levels(layout: Layout, *, pass_number: int, n_levels: int) -> np.ndarray:
    """(C,) which of the levels 1..n each canvas stands at in a pass; in n passes, each at each."""
    return 1 + (np.arange(layout.canvases_per_window) + pass_number) % n_levels


def corrupt_at(
    clean: Tensor,
    times: np.ndarray,
    uniforms: np.ndarray,
    replacements: np.ndarray,
    *,
    n_times: int,
    tilt: float,
) -> Tensor:
    """Keep each token whose uniform number lies below the clean share of its position's time.

    Args:
        clean: (B, T) int64 ids.
        times: (B, C) the time of each canvas, whole or not, in 0..N; C divides T.
        uniforms: (B, T) numbers in [0, 1).
        replacements: (B, T) int64, the token that stands where the clean one is not kept.
        n_times: the number of diffusion times, N.
        tilt: of the model.

    Returns:
        (B, T) int64 ids on the device of ``clean``.
    """
    canvas_tokens = clean.shape[-1] // times.shape[-1]
    each = position_times(times, canvas_tokens=canvas_tokens, n_times=n_times, tilt=tilt)
    share = clean_share(each, n_times)  # (B, T)
    keep = torch.from_numpy(uniforms < share).to(clean.device)
    return torch.where(keep, clean, torch.from_numpy(replacements).to(clean.device))


def _empty_times(n_rows: int, n_canvases: int, diffusion: DiffusionParams) -> np.ndarray:
    """Room for the times of a batch, (B, C)."""
    dtype = np.float64 if diffusion.train_times is None else np.int64
    return np.empty((n_rows, n_canvases), dtype=dtype)


def _draw_times(
    draws: np.random.Generator, number: int, n_canvases: int, diffusion: DiffusionParams, seed: int
) -> np.ndarray:
    """(C,) times of one window: whole ones in 1..N, or real ones in (0, 1]."""
    N = diffusion.train_times
    if diffusion.time_draw == "uniform" and N is not None:
        return draws.integers(1, N + 1, size=n_canvases)
    places = _PLACES[diffusion.time_draw](draws, number, n_canvases, seed)  # in [0, 1)
    return 1 - places if N is None else 1 + np.floor(places * N).astype(np.int64).clip(max=N - 1)


def _uniform_places(
    draws: np.random.Generator, number: int, n_canvases: int, seed: int
) -> np.ndarray:
    del number, seed
    return draws.random(n_canvases)


def _middle_places(
    draws: np.random.Generator, number: int, n_canvases: int, seed: int
) -> np.ndarray:
    del number, seed
    return draws.random((2, n_canvases)).mean(axis=0)


def _spread_places(
    draws: np.random.Generator, number: int, n_canvases: int, seed: int
) -> np.ndarray:
    del draws
    start = stream(seed, "time_start").random()
    return (start + (number * n_canvases + np.arange(n_canvases)) * _GOLDEN) % 1.0


_PLACES = {"uniform": _uniform_places, "middle": _middle_places, "spread": _spread_places}


def _empty_draws(n_rows: int, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Room for the draws of a batch: uniform numbers and replacement tokens."""
    shape = (n_rows, layout.window_tokens)
    return np.empty(shape, dtype=np.float64), np.empty(shape, dtype=np.int64)


def _draw_tokens(
    draws: np.random.Generator, layout: Layout, uniforms: np.ndarray, replacements: np.ndarray
) -> None:
    """Fill one window's draws."""
    uniforms[:] = draws.random(layout.window_tokens)
    replacements[:] = draws.integers(layout.vocab_size, size=layout.window_tokens)


def _corrupted(
    clean: Tensor,
    times: np.ndarray,
    uniforms: np.ndarray,
    replacements: np.ndarray,
    n_times: int,
    tilt: float,
) -> Noisy:
    """Apply the draws of a batch."""
    assert clean.shape == uniforms.shape, f"{tuple(clean.shape)} ids, draws for {uniforms.shape}"
    ids = corrupt_at(clean, times, uniforms, replacements, n_times=n_times, tilt=tilt)
    return Noisy(ids=ids, times=torch.from_numpy(times).to(clean.device))
