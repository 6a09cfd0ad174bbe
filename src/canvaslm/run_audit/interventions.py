"""What do the logits of the trained model say to one change in a window?

One part of the window is changed, everything else stays, and every changed token becomes another
token, so that no trial is empty. Logits that may not see the change must be equal to the last bit.
Those that may see it must move by far more than rounding does: all of them in a fresh network of
the same shape, which ignores nothing yet, and some of them in the trained one. It may well have
learned to ignore a thing; a canvas at its last time, for one, is all noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.randomness import stream
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.reading import (
    Part,
    Reading,
    denoised_logits,
    encoded_logits,
    one_stream_logits,
)

_MOST_PLACES = 16  # of a kind are tried; where there are more, as many are drawn
_LEAST_SHARE = 1e-5  # of the largest logit: a hundred times what float32 rounds
_PATHS: dict[str, Callable[[Backbone, Reading], Tensor]] = {
    "clean stream": encoded_logits,
    "noisy canvases": denoised_logits,
    "one stream": one_stream_logits,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One change, and the rows of logits that are watched.

    Attributes:
        path: which passes are run: ``clean stream``, ``noisy canvases`` or ``one stream``.
        part: what is changed.
        where: places in it, as :meth:`Reading.changed` counts them.
        watched: positions of the window.
    """

    path: str
    part: Part
    where: slice
    watched: slice


class Window:
    """A window under trial, read without a change once for each path.

    Args:
        trained: the model of the run, on the CPU.
        fresh: a network of its shape with initial weights.
        reading: the window.
        seed: draws the places and the other tokens.
    """

    def __init__(self, trained: Backbone, fresh: Backbone, reading: Reading, *, seed: int) -> None:
        self.n_canvases = reading.times.shape[1]
        self.n_tokens = reading.clean.shape[1]
        self.canvas_tokens = trained.layout.canvas_tokens
        self._trained = trained
        self._fresh = fresh
        self._reading = reading
        self._seed = seed
        self._unchanged: dict[tuple[str, bool], Tensor] = {}

    def some(self, first: int, last: int) -> list[int]:
        """All of first..last-1, or a seeded sample of them with both ends."""
        numbers = range(first, last)
        if len(numbers) <= _MOST_PLACES:
            return list(numbers)
        draws = stream(self._seed, "run_audit/places", len(numbers))
        inner = draws.choice(len(numbers) - 2, _MOST_PLACES - 2, replace=False)
        return sorted({first, last - 1, *(first + 1 + int(n) for n in inner)})

    def canvas(self, b: int) -> slice:
        """The tokens of canvas b."""
        return slice(b * self.canvas_tokens, (b + 1) * self.canvas_tokens)

    def unseen(self, name: str, trials: Sequence[Trial], first_test: str) -> Check:
        """A check that none of the changes moves a bit of what is watched."""
        effects = [self._effect(self._trained, trial) for trial in trials]
        moved = [effect for effect in effects if not effect.is_equal]
        measured = f"{len(moved)} of {len(effects)} changes move a bit of the logits"
        if moved:
            measured += f"; {_told(moved[0])}"
        return decide(
            "flow",
            name,
            holds=not moved,
            measured=measured,
            expected=f"none does, in float32 on the CPU{_if_empty(trials)}",
            first_test=first_test,
        )

    def seen(self, name: str, trials: Sequence[Trial], first_test: str) -> Check:
        """A check that the changes move what is watched by more than rounding does."""
        fresh, trained = (
            [self._effect(model, trial) for trial in trials]
            for model in (self._fresh, self._trained)
        )
        lost = [effect for effect in fresh if not _LEAST_SHARE < effect.share < math.inf]
        kept = [effect for effect in trained if _LEAST_SHARE < effect.share < math.inf]
        strongest = max((effect.share for effect in trained), default=0.0)
        measured = (
            f"{len(kept)} of {len(trials)} changes move the logits, by up to "
            f"{told_gap(strongest)}; {len(fresh) - len(lost)} of {len(trials)} those of a fresh "
            "network"
        )
        if lost:
            measured += f"; {_told(lost[0])}"
        return decide(
            "flow",
            name,
            holds=not lost and (bool(kept) or not trials),
            measured=measured,
            expected="some do, and all of them in a fresh network, by more than "
            f"{_LEAST_SHARE:g} of the largest logit{_if_empty(trials)}",
            first_test=first_test,
        )

    def _effect(self, model: Backbone, trial: Trial) -> "_Effect":
        run, key = _PATHS[trial.path], (trial.path, model is self._fresh)
        if key not in self._unchanged:
            self._unchanged[key] = run(model, self._reading)
        unchanged = self._unchanged[key]
        before = unchanged[trial.watched]
        changed = self._reading.changed(trial.part, trial.where, seed=self._seed)
        after = run(model, changed)[trial.watched]
        return _Effect(
            trial=trial,
            share=largest_gap(after, before, scale=unchanged),
            is_equal=torch.equal(after, before),
        )


def largest_gap(first: Tensor, second: Tensor, *, scale: Tensor) -> float:
    """The largest difference as a share of the largest value of ``scale``; infinite for NaN."""
    share = float((first - second).abs().max() / scale.abs().max().clamp(min=1e-30))
    return math.inf if math.isnan(share) else share


def told_gap(share: float) -> str:
    """A share of the largest logit, in words."""
    return f"{share:.2g} of the largest" if math.isfinite(share) else "what is no finite number"


@dataclass(frozen=True, kw_only=True)
class _Effect:
    """What became of the watched logits: the largest move, as a share of the largest logit."""

    trial: Trial
    share: float
    is_equal: bool


def _told(effect: _Effect) -> str:
    """One change and what came of it, in words."""
    trial = effect.trial
    unit = "canvases" if trial.part == "times" else "positions"
    return (
        f"first: changing {trial.part} of {unit} {_span(trial.where)} moves the logits of "
        f"positions {_span(trial.watched)} by {told_gap(effect.share)} ({trial.path})"
    )


def _span(places: slice) -> str:
    end = "the end" if places.stop is None else str(places.stop - 1)
    return f"{places.start or 0} to {end}"


def _if_empty(trials: Sequence[Trial]) -> str:
    return "" if trials else "; the window has no such place"
