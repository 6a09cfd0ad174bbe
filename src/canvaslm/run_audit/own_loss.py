"""What should the objective's loss on a window be, by the definition and not by its code?

The passes are run here, the guess is embedded here with all logits in memory, and the nats are a
log-softmax in float64 over the logits of those passes. Of the code under audit only the corruption
and the passes of the model are used, which have checks of their own.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.corruption import Noisy, draw_corruption
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Encoded
from canvaslm.randomness import stream
from canvaslm.run_audit.subject import Subject

_ROWS = 256  # positions whose logits are in memory in float64 at once


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """Nats of one window summed over its targets.

    Attributes:
        nats: the sum, in float64.
        n_targets: positions that carry loss.
        largest_logit: the largest absolute logit on the way.
    """

    nats: float
    n_targets: int
    largest_logit: float


def own_loss(subject: Subject, model: Backbone, window: Tensor, number: int) -> OwnLoss:
    """The training loss of window (1, T) under its run number.

    Args:
        subject: the run.
        model: any model of its shape, on the device of the window.
        window: (1, T) int64.
        number: keys its noise and its coin for self-conditioning.
    """
    with torch.no_grad():
        if subject.recipe.diffusion is None:
            start = torch.full_like(window[:, :1], subject.eot_id)
            hidden = model.encode(torch.cat([start, window[:, :-1]], dim=1)).hidden
            return _nats(hidden[0], model.head_weight, window[0])
        return _denoising_loss(subject, subject.recipe.diffusion, model, window, number)


def has_guess(subject: Subject, number: int) -> bool:
    """Whether a window's second pass sees a guess: its own coin, or never for other networks."""
    diffusion = subject.recipe.diffusion
    if diffusion is None or subject.recipe.model.self_conditioning == "off":
        return False
    coin = stream(subject.recipe.pretrain.seed, "self_conditioning", number).random()
    return coin < diffusion.self_conditioning_share


@contextlib.contextmanager
def sharpened(model: Backbone, factor: float) -> Iterator[None]:
    """Inside, the logits are about so many times as large, and so is what tells a loss apart.

    Args:
        model: comes back bit for bit for a power of two.
        factor: by which the gain of the final norm is multiplied.
    """
    with torch.no_grad():
        model.final_norm.weight.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            model.final_norm.weight.div_(factor)


def _denoising_loss(
    subject: Subject, diffusion: DiffusionParams, model: Backbone, window: Tensor, number: int
) -> OwnLoss:
    noisy = draw_corruption(
        window,
        np.array([number]),
        layout=subject.recipe.layout,
        n_times=diffusion.train_times,
        context=diffusion.context,
        seed=subject.recipe.pretrain.seed,
    )
    clean = model.encode(window) if diffusion.context == "clean" else None
    hidden = _pass(model, diffusion, noisy, clean, None)
    if has_guess(subject, number):
        guess = _embedded_posterior(hidden[0], model.head_weight)
        hidden = _pass(model, diffusion, noisy, clean, guess[None])
    carries = (noisy.times[0] > 0).repeat_interleave(subject.recipe.layout.canvas_tokens)
    return _nats(hidden[0][carries], model.head_weight, window[0][carries])


def _pass(
    model: Backbone,
    diffusion: DiffusionParams,
    noisy: Noisy,
    clean: Encoded | None,
    guess: Tensor | None,
) -> Tensor:
    times = noisy.times / diffusion.train_times
    if clean is None:
        return model.denoise_one_stream(noisy.ids, times, guess=guess, has_guess=None)
    return model.denoise(noisy.ids, times, context=clean, guess=guess, has_guess=None)


def _embedded_posterior(hidden: Tensor, head: Tensor) -> Tensor:
    """softmax(logits) @ E (T, D), by its definition in float64."""
    rows = head.double()
    parts = [(part.double() @ rows.T).softmax(-1) @ rows for part in hidden.split(_ROWS)]
    return torch.cat(parts).to(hidden.dtype)


def _nats(hidden: Tensor, head: Tensor, targets: Tensor) -> OwnLoss:
    """Cross-entropy of targets (n,) under hidden states (n, D), in float64."""
    rows, nats, largest = head.double(), 0.0, 0.0
    for part, aims in zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True):
        logits = part.double() @ rows.T  # (n, V)
        nats -= float(logits.log_softmax(-1).gather(1, aims[:, None]).sum())
        largest = max(largest, float(logits.abs().max()))
    return OwnLoss(nats=nats, n_targets=len(targets), largest_logit=largest)
