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

from canvaslm.diffusion.schedule import Context, clean_share
from canvaslm.layout import Layout
from canvaslm.randomness import stream


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """Windows after corruption.

    Attributes:
        ids: (B, T) int64, the noisy tokens, on the device of the clean ones.
        times: (B, C) the time of each canvas, on the same device: int64 in 0..N, and 0 where a
            canvas is left clean, which then carries no loss; or float64 in (0, 1] where time is
            continuous.
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
    n_times: int,
    context: Context,
    seed: int,
) -> Noisy:
    """Corrupt windows for training: one time per canvas, uniform on 1..N.

    Under the context ``prefix`` a number of leading canvases, uniform on 0..C-1, stays clean.

    Args:
        clean: (B, T) int64 ids below ``layout.vocab_size``.
        numbers: (B,) the number of each window in the run, the key of its draws.
        layout: lengths and vocabulary.
        n_times: the number of diffusion times, N.
        context: what earlier canvases are to the model.
        seed: the run's seed.
    """
    n_canvases = layout.canvases_per_window
    times = np.empty((len(numbers), n_canvases), dtype=np.int64)
    uniforms, replacements = _empty_draws(len(numbers), layout)
    for row, number in enumerate(numbers):
        draws = stream(seed, "corruption", int(number))
        times[row] = draws.integers(1, n_times + 1, size=n_canvases)
        n_clean = draws.integers(n_canvases)
        if context == "prefix":
            times[row, :n_clean] = 0
        _draw_tokens(draws, layout, uniforms[row], replacements[row])
    return _corrupted(clean, times, uniforms, replacements, n_times)


def draw_sweep_pass(
    clean: Tensor,
    numbers: np.ndarray,
    *,
    pass_number: int,
    layout: Layout,
    n_times: int,
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
        seed: the evaluation's seed.
    """
    levels = sweep_levels(layout, pass_number=pass_number, n_levels=n_times)
    times = np.tile(levels, (len(numbers), 1))
    uniforms, replacements = _empty_draws(len(numbers), layout)
    for row, number in enumerate(numbers):
        draws = stream(seed, f"bound/{pass_number}", int(number))
        _draw_tokens(draws, layout, uniforms[row], replacements[row])
    return _corrupted(clean, times, uniforms, replacements, n_times)


def draw_continuous_pass(
    clean: Tensor,
    numbers: np.ndarray,
    *,
    pass_number: int,
    n_passes: int,
    layout: Layout,
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
    return _corrupted(clean, times, uniforms, replacements, 1)


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
) -> Tensor:
    """Keep each token whose uniform number lies below the clean share of its canvas's time.

    Args:
        clean: (B, T) int64 ids.
        times: (B, C) the time of each canvas, whole or not, in 0..N; C divides T.
        uniforms: (B, T) numbers in [0, 1).
        replacements: (B, T) int64, the token that stands where the clean one is not kept.
        n_times: the number of diffusion times, N.

    Returns:
        (B, T) int64 ids on the device of ``clean``.
    """
    canvas_tokens = clean.shape[-1] // times.shape[-1]
    share = np.repeat(clean_share(times, n_times), canvas_tokens, axis=-1)  # (B, T)
    keep = torch.from_numpy(uniforms < share).to(clean.device)
    return torch.where(keep, clean, torch.from_numpy(replacements).to(clean.device))


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
) -> Noisy:
    """Apply the draws of a batch."""
    assert clean.shape == uniforms.shape, f"{tuple(clean.shape)} ids, draws for {uniforms.shape}"
    ids = corrupt_at(clean, times, uniforms, replacements, n_times=n_times)
    return Noisy(ids=ids, times=torch.from_numpy(times).to(clean.device))
