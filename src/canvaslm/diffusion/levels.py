"""At which levels of noise is a canvas shown, so that what it costs there adds up to the bound?

At every time of a grid, or at one random time of every part of continuous time. Either way a sweep
has as many passes as there are levels, and takes every canvas through every level once.

A network knows the times that it was trained at, and no others. So it may be told the next of those
instead of the time itself, and its softmax then is the posterior at the time that it was told: that
is the evidence to take out. What is left is a cavity like any other, a function of the noisy tokens
and the context, so that the bound stays one.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.bound import chunked_step_nats, token_evidence
from canvaslm.diffusion.cavity_head import StepNats
from canvaslm.diffusion.continuous_bound import chunked_continuous_nats
from canvaslm.diffusion.corruption import Noisy, draw_continuous_pass, draw_sweep_pass
from canvaslm.diffusion.schedule import position_times, tilt_speed
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
        self,
        hidden: Tensor,
        weight: Tensor,
        noisy: Noisy,
        clean: Tensor,
        *,
        vocab_chunk: int,
        is_cavity: bool,
    ) -> StepNats:
        """(B, T) what a pass adds to the bound, and the diagnostic.

        ``is_cavity`` says that the logits lack the evidence of the noisy token.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GridLevels:
    """Every time of 1..N once: the bound of a process of N steps.

    Attributes:
        n_times: N.
        tilt: of the model (``position_times``).
        told: of how many times the network is told the next one; None: the time itself.
    """

    n_times: int
    tilt: float
    told: int | None = None

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
        return f"times 1..{self.n_times} of {self.n_times}, cosine schedule, {_words(self.told)}"

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
            tilt=self.tilt,
            seed=seed,
        )

    def shown_times(self, noisy: Noisy) -> Tensor:
        """(B, C) t/N, or the next time of those that the network is told."""
        told = self._other_times
        times, n_times = noisy.times, self.n_times
        if told is not None:
            times, n_times = self._next(noisy, told), told
        return times.double() / n_times

    def nats(
        self,
        hidden: Tensor,
        weight: Tensor,
        noisy: Noisy,
        clean: Tensor,
        *,
        vocab_chunk: int,
        is_cavity: bool,
    ) -> StepNats:
        """(B, T) nats of the reverse step, and the diagnostic."""
        told, evidence = self._other_times, None
        if told is not None:
            next_told = _of_positions(self._next(noisy, told), clean, n_times=told, tilt=self.tilt)
            evidence = token_evidence(next_told, n_times=told, vocab_size=weight.shape[0])
        now, before = (
            _of_positions(times, clean, n_times=self.n_times, tilt=self.tilt)
            for times in (noisy.times, noisy.times - 1)
        )
        return chunked_step_nats(
            hidden,
            weight,
            noisy.ids,
            clean,
            t=now,
            n_times=self.n_times,
            vocab_chunk=vocab_chunk,
            before=before,
            evidence=evidence,
            is_cavity=is_cavity,
        )

    @property
    def _other_times(self) -> int | None:
        """How many times the network is told of, where they are not those of the grid."""
        return None if self.told == self.n_times else self.told

    def _next(self, noisy: Noisy, told: int) -> Tensor:
        """(B, C) the first of the told times at or above t/N, as a whole number."""
        return -(-noisy.times * told // self.n_times)


@dataclass(frozen=True, kw_only=True)
class ContinuousLevels:
    """One random time in each K-th of (0, 1]: an unbiased estimate of the integral over time.

    Attributes:
        n_passes: K.
        tilt: of the model.
        told: of how many times the network is told the next one; None: the time itself.
    """

    n_passes: int
    tilt: float
    told: int | None = None

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
        parts = f"one time in each of {self.n_passes} equal parts of (0, 1]"
        return f"{parts}, cosine schedule, {_words(self.told)}"

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
            tilt=self.tilt,
            seed=seed,
        )

    def shown_times(self, noisy: Noisy) -> Tensor:
        """(B, C) the times themselves, or the next of those that the network is told."""
        told = self.told
        return noisy.times if told is None else _next_above(noisy.times, told).double() / told

    def nats(
        self,
        hidden: Tensor,
        weight: Tensor,
        noisy: Noisy,
        clean: Tensor,
        *,
        vocab_chunk: int,
        is_cavity: bool,
    ) -> StepNats:
        """(B, T) the integrand times the width of a part, and the diagnostic."""
        evidence = None
        if self.told is not None:
            next_told = _of_positions(
                _next_above(noisy.times, self.told), clean, n_times=self.told, tilt=self.tilt
            )
            evidence = token_evidence(next_told, n_times=self.told, vocab_size=weight.shape[0])
        time = _of_positions(noisy.times, clean, n_times=1, tilt=self.tilt)
        # A position that stands at an end of its times, and stays there for a while, costs nothing:
        # at time 1 by the integrand itself, and at 0 nothing is asked of it.
        is_noisy = time > 0
        cost = chunked_continuous_nats(
            hidden[is_noisy],
            weight,
            noisy.ids[is_noisy],
            clean[is_noisy],
            time=time[is_noisy],
            vocab_chunk=vocab_chunk,
            evidence=None if evidence is None else evidence[is_noisy],
            is_cavity=is_cavity,
        )
        speed = tilt_speed(self.tilt, clean.shape[1] // noisy.times.shape[1])
        return StepNats(bound=cost.bound * (speed / self.n_passes), plain=cost.plain).put(is_noisy)


def _next_above(times: Tensor, told: int) -> Tensor:
    """The first of the told times at or above each time of (0, 1], as a whole number."""
    return torch.ceil(times * told).long().clamp(max=told)


def _words(told: int | None) -> str:
    """What the network is told, in words."""
    return "network told the time" if told is None else f"network told the next of {told} times"


def _of_positions(times: Tensor, clean: Tensor, *, n_times: int, tilt: float) -> Tensor:
    """The time (B, T) of each position, from that (B, C) of its canvas."""
    canvas_tokens = clean.shape[1] // times.shape[1]
    return position_times(times, canvas_tokens=canvas_tokens, n_times=n_times, tilt=tilt)
