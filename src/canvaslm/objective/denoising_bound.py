"""What do windows cost the denoiser, pass by pass, so that the passes add up to the bound?

The context is always the clean window before a canvas, whatever the training context was, and every
term is a function of the noisy tokens and that context alone. That leaves two ways to use a network
with self-conditioning: without a guess, or with the guess of a first pass over the same noisy
tokens. Both are valid bounds (``docs/bound.md``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.cavity_head import StepNats
from canvaslm.diffusion.corruption import sweep_levels
from canvaslm.diffusion.levels import Levels
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Context
from canvaslm.model.shape import ModelParams

Conditioning = Literal["off", "two_pass"]


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """What one noisy pass over a batch of windows cost.

    Attributes:
        levels: (C,) int64 the level of each canvas, in 1..n, the same in every window.
        nats: (B, T) each, by the way self-conditioning was used.
    """

    levels: np.ndarray
    nats: Mapping[Conditioning, StepNats]


def conditionings_of(params: ModelParams) -> tuple[Conditioning, ...]:
    """The ways in which a network's bound can be taken."""
    return ("off",) if params.self_conditioning == "off" else ("off", "two_pass")


@torch.no_grad()
def bound_passes(
    model: Backbone,
    context: Context,
    windows: Tensor,
    numbers: np.ndarray,
    *,
    levels: Levels,
    conditionings: Sequence[Conditioning],
    layout: Layout,
    seed: int,
    vocab_chunk: int,
) -> Iterator[PassCost]:
    """Take windows through all passes of a sweep; the sums over them are the bounds.

    With both conditionings a pass costs two forwards, since the guess is what the first one says:
    both see the same noisy tokens, so that their difference has little noise.

    Args:
        model: the denoiser.
        context: its clean keys and values of the windows, ``model.encode_context(windows)``.
        windows: (B, T) int64 clean ids.
        numbers: (B,) the index of each window in its split, the key of its draws.
        levels: the sweep.
        conditionings: which bounds are wanted.
        layout: lengths and vocabulary.
        seed: the evaluation's seed.
        vocab_chunk: vocabulary entries of one product of the head; changes no value.
    """
    for pass_number in range(levels.n_passes):
        noisy = levels.draw(windows, numbers, pass_number=pass_number, layout=layout, seed=seed)
        shown = levels.shown_times(noisy)
        hidden = model.denoise(noisy.ids, shown, context=context, guess=None, has_guess=None)
        read: dict[Conditioning, Tensor] = {"off": hidden}
        if "two_pass" in conditionings:
            guess = model.soft_embedding(hidden, vocab_chunk=vocab_chunk)
            read["two_pass"] = model.denoise(
                noisy.ids, shown, context=context, guess=guess, has_guess=None
            )
        nats: dict[Conditioning, StepNats] = {
            name: levels.nats(
                read[name],
                model.head_weight,
                noisy,
                windows,
                vocab_chunk=vocab_chunk,
                is_cavity=model.params.likelihood_bias,
            )
            for name in conditionings
        }
        at = sweep_levels(layout, pass_number=pass_number, n_levels=levels.n_passes)
        yield PassCost(levels=at, nats=nats)
