"""How is one window read, so that any one thing in it may be changed and all else stay?

A reading holds all that the passes over a window take, on the CPU in float32. There the same call
with the same shapes gives the same bits, so that what is equal to the last bit was not reached by
the change, and what is not was.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from canvaslm.corpus.batches import window_indices
from canvaslm.diffusion.corruption import draw_corruption
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.run_audit.subject import Subject

Part = Literal["clean", "noisy", "times"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One window as the passes take it.

    Attributes:
        clean: (1, T) int64, what the clean stream is given; for the twin, its shifted input.
        noisy: (1, T) int64, a corruption of the window; the window itself for the twin.
        times: (1, C) float, the time of each canvas as a share of 1.
        vocab_size: V, the ids that may stand there.
    """

    clean: Tensor
    noisy: Tensor
    times: Tensor
    vocab_size: int

    @property
    def has_noise(self) -> bool:
        """Whether this is a denoiser's window; the twin's has no times."""
        return bool(self.times.any())

    def changed(self, part: Part, where: slice, *, seed: int) -> "Reading":
        """The same window with another value at each place of one part.

        Args:
            part: what is changed.
            where: places along the window, in tokens, or in canvases for ``times``.
            seed: draws the other tokens, none of which is the one that stood there.
        """
        values = getattr(self, part).clone()
        if part == "times":
            values[:, where] = 0.0  # another time for one position at least, whatever the tilt
        else:
            values[:, where] = _others(values[:, where], seed, where.start or 0, self.vocab_size)
        return dataclasses.replace(self, **{part: values})


def read_window(subject: Subject) -> Reading:
    """The run's first window, with the noise that it had in training."""
    recipe, numbers = subject.recipe, np.array([0])
    windows = torch.from_numpy(windows_of(subject, numbers))
    if recipe.diffusion is None:
        start = torch.full_like(windows[:, :1], subject.eot_id)
        shifted = torch.cat([start, windows[:, :-1]], dim=1)
        return Reading(
            clean=shifted,
            noisy=windows,
            times=torch.zeros(1, 1),
            vocab_size=recipe.layout.vocab_size,
        )
    noisy = draw_corruption(
        windows,
        numbers,
        layout=recipe.layout,
        diffusion=recipe.diffusion,
        context="clean",  # every canvas is noisy, whatever the run left clean
        tilt=recipe.model.tilt,
        seed=recipe.pretrain.seed,
    )
    times = noisy.times.double() / recipe.diffusion.n_times
    return Reading(clean=windows, noisy=noisy.ids, times=times, vocab_size=recipe.layout.vocab_size)


def windows_of(subject: Subject, numbers: np.ndarray) -> np.ndarray:
    """The ids (n, T) of the windows with any run numbers, one after the other or not."""
    seed, n_windows = subject.recipe.pretrain.seed, len(subject.train)
    indices = [
        window_indices(int(number), 1, seed=seed, n_windows=n_windows)[0] for number in numbers
    ]
    return subject.train.gather(np.array(indices))


def on_cpu(model: Backbone) -> Backbone:
    """The model itself where it lies on the CPU, else a copy there."""
    if model.embedding.weight.device.type == "cpu":
        return model
    return copy.deepcopy(model).cpu()


def fresh_model(subject: Subject) -> Backbone:
    """A network of the run's shape with the weights that its seed draws, on the CPU."""
    model = Backbone(subject.recipe.model, subject.recipe.layout)
    initialise(model, subject.recipe.pretrain.seed)
    return model.eval()


@torch.no_grad()
def encoded_logits(model: Backbone, reading: Reading) -> Tensor:
    """Logits (T, V) of the clean stream."""
    return model.logits(model.encode(reading.clean).hidden)[0]


@torch.no_grad()
def denoised_logits(model: Backbone, reading: Reading, guess: Tensor | None = None) -> Tensor:
    """Logits (T, V) of the noisy canvases over clean context, as in decoding and in the bound."""
    context = model.encode(reading.clean)
    hidden = model.denoise(
        reading.noisy, reading.times, context=context, guess=guess, has_guess=None
    )
    return model.logits(hidden)[0]


@torch.no_grad()
def one_stream_logits(model: Backbone, reading: Reading) -> Tensor:
    """Logits (T, V) of the noisy canvases, each over the noisy ones before it."""
    hidden = model.denoise_one_stream(reading.noisy, reading.times, guess=None, has_guess=None)
    return model.logits(hidden)[0]


@torch.no_grad()
def cached_logits(model: Backbone, reading: Reading) -> Tensor:
    """Logits (T, V) of the noisy canvases, each over a cache of the clean ones before it."""
    T, L = reading.clean.shape[1], model.layout.canvas_tokens
    cache, parts = KVCache.for_model(model, 1, T), []
    for b in range(T // L):
        own = slice(b * L, (b + 1) * L)
        hidden = model.denoise(
            reading.noisy[:, own],
            reading.times[:, b : b + 1],
            context=cache,
            guess=None,
            has_guess=None,
        )
        parts.append(model.logits(hidden)[0])
        model.encode(reading.clean[:, own], cache=cache)
    return torch.cat(parts)


@torch.no_grad()
def cached_clean_logits(model: Backbone, reading: Reading) -> Tensor:
    """Logits (T, V) of the clean stream: half of it at once, then one token, then the rest."""
    T = reading.clean.shape[1]
    cache, parts = KVCache.for_model(model, 1, T), []
    for piece in reading.clean.tensor_split([T // 2, T // 2 + 1], dim=1):
        if piece.shape[1]:
            parts.append(model.logits(model.encode(piece, cache=cache).hidden)[0])
    return torch.cat(parts)


def _others(ids: Tensor, seed: int, number: int, vocab_size: int) -> Tensor:
    """For each id another one, drawn uniformly."""
    draws = stream(seed, "run_audit/changes", number)
    steps = draws.integers(1, vocab_size, size=tuple(ids.shape))
    return (ids + torch.from_numpy(steps)) % vocab_size
