"""At which levels of noise is a canvas shown, so that what it costs there adds up to the bound?

At every time of a grid, or at one random time of every part of continuous time. Either way a sweep
has as many passes as there are levels, and takes every canvas through every level once.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from canvaslm.diffusion.bound import chunked_step_nats
from canvaslm.diffusion.cavity_head import StepNats
from canvaslm.diffusion.continuous_bound import chunked_continuous_nats
from canvaslm.diffusion.corruption import Noisy, draw_continuous_pass, draw_sweep_pass
from canvaslm.layout import Layout


class Levels(Protocol):
    """A sweep over levels of noise."""

    @property
    def n_passes(self) -> int:
        """How many passes and levels there are."""
        ...

    @property
    def name(self) -> str:
        """The sweep as a key of a report."""
        ...

    @property
    def estimator(self) -> str:
        """What its sum estimates, in words."""
        ...

    @property
    def noise_levels(self) -> str:
        """Which levels there are, in words."""
        ...

    def draw(
        self,
        clean: Tensor,
        numbers: np.ndarray,
        *,
        pass_number: int,
        layout: Layout,
        seed: int,
    ) -> Noisy:
        """Corrupt windows (B, T) for one pass; ``numbers`` (B,) are the keys of their draws."""
        ...

    def shown_times(self, noisy: Noisy) -> Tensor:
        """(B, C) times in (0, 1], as the network is told them."""
        ...

    def nats(
        self, hidden: Tensor, weight: Tensor, noisy: Noisy, clean: Tensor, *, vocab_chunk: int
    ) -> StepNats:
        """(B, T) what a pass adds to the bound, and the diagnostic."""
        ...


@dataclass(frozen=True, kw_only=True)
class GridLevels:
    """Every time of 1..N once: the bound of a process of N steps.

    Attributes:
        n_times: N.
    """

    n_times: int

    @property
    def n_passes(self) -> int:
        """N."""
        return self.n_times

    @property
    def name(self) -> str:
        """The sweep as a key of a report."""
        return f"n_times_{self.n_times}"

    @property
    def estimator(self) -> str:
        """What its sum estimates, in words."""
        return "negative ELBO, clean context, every time of every canvas once, one draw each"

    @property
    def noise_levels(self) -> str:
        """Which levels there are, in words."""
        return f"times 1..{self.n_times} of {self.n_times}, cosine schedule"

    def draw(
        self,
        clean: Tensor,
        numbers: np.ndarray,
        *,
        pass_number: int,
        layout: Layout,
        seed: int,
    ) -> Noisy:
        """Canvas b at time 1 + ((b + m) mod N)."""
        return draw_sweep_pass(
            clean,
            numbers,
            pass_number=pass_number,
            layout=layout,
            n_times=self.n_times,
            seed=seed,
        )

    def shown_times(self, noisy: Noisy) -> Tensor:
        """(B, C) t/N."""
        return noisy.times / self.n_times

    def nats(
        self, hidden: Tensor, weight: Tensor, noisy: Noisy, clean: Tensor, *, vocab_chunk: int
    ) -> StepNats:
        """(B, T) nats of the reverse step, and the diagnostic."""
        return chunked_step_nats(
            hidden,
            weight,
            noisy.ids,
            clean,
            t=_of_positions(noisy.times, clean),
            n_times=self.n_times,
            vocab_chunk=vocab_chunk,
        )


@dataclass(frozen=True, kw_only=True)
class ContinuousLevels:
    """One random time in each K-th of (0, 1]: an unbiased estimate of the integral over time.

    Attributes:
        n_passes: K.
    """

    n_passes: int

    @property
    def name(self) -> str:
        """The sweep as a key of a report."""
        return "continuous"

    @property
    def estimator(self) -> str:
        """What its sum estimates, in words."""
        return (
            "negative ELBO in continuous time, clean context, a random time in every part of every "
            "canvas's time, one draw each"
        )

    @property
    def noise_levels(self) -> str:
        """Which levels there are, in words."""
        return f"one time in each of {self.n_passes} equal parts of (0, 1], cosine schedule"

    def draw(
        self,
        clean: Tensor,
        numbers: np.ndarray,
        *,
        pass_number: int,
        layout: Layout,
        seed: int,
    ) -> Noisy:
        """Canvas b somewhere in part (b + m) mod K."""
        return draw_continuous_pass(
            clean,
            numbers,
            pass_number=pass_number,
            n_passes=self.n_passes,
            layout=layout,
            seed=seed,
        )

    def shown_times(self, noisy: Noisy) -> Tensor:
        """(B, C) the times themselves."""
        return noisy.times

    def nats(
        self, hidden: Tensor, weight: Tensor, noisy: Noisy, clean: Tensor, *, vocab_chunk: int
    ) -> StepNats:
        """(B, T) the integrand times the width of a part, and the diagnostic."""
        cost = chunked_continuous_nats(
            hidden,
            weight,
            noisy.ids,
            clean,
            time=_of_positions(noisy.times, clean),
            vocab_chunk=vocab_chunk,
        )
        return StepNats(bound=cost.bound / self.n_passes, plain=cost.plain)


def _of_positions(times: Tensor, clean: Tensor) -> Tensor:
    """The time (B, T) of each position, from that (B, C) of its canvas."""
    return times.repeat_interleave(clean.shape[1] // times.shape[1], dim=1)
