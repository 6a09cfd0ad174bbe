"""What does each held-out token cost the twin, and the denoiser at every level of noise?"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.levels import Levels
from canvaslm.evaluation.loss_parity import evaluating
from canvaslm.evaluation.tally import HeldOut
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.objective.denoising_bound import Conditioning, PassCost, bound_passes
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.progress import Track


@dataclass(frozen=True, kw_only=True)
class BoundCosts:
    """One sweep, in one way of self-conditioning, over W windows.

    Attributes:
        levels: the sweep.
        conditioning: how self-conditioning was used.
        nats: (W, T) float64, the bound of each token.
        from_noise: (W, T) float64, cross-entropy of each token when its canvas stood at the last
            level; on a grid that canvas is pure noise. 0 where a token is clean there by its time.
        by_level: (n, 2) float64, nats of each level and cross-entropy there, per token.
    """

    levels: Levels
    conditioning: Conditioning
    nats: np.ndarray
    from_noise: np.ndarray
    by_level: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TokenCosts:
    """Every scored token, with what it costs both models: about a hundred bytes each.

    Attributes:
        layout: of the denoiser; position and canvas of a token follow from it.
        numbers: (W,) the index of each window in its split.
        ids: (W, T) int64.
        documents: (W, T) int64.
        text_bytes: (W, T) int64.
        twin: (W, T) float64 nats.
        bounds: one for each sweep and way of self-conditioning.
    """

    layout: Layout
    numbers: np.ndarray
    ids: np.ndarray
    documents: np.ndarray
    text_bytes: np.ndarray
    twin: np.ndarray
    bounds: tuple[BoundCosts, ...]

    @property
    def tokens_sha256(self) -> str:
        """Which tokens these are: a hash of the windows' numbers and ids."""
        told = hashlib.sha256()
        for array in (self.numbers, self.ids):
            told.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return told.hexdigest()

    @property
    def positions(self) -> np.ndarray:
        """(W, T) the place of each token in its canvas, from 0."""
        places = np.arange(self.layout.window_tokens) % self.layout.canvas_tokens
        return np.broadcast_to(places, self.ids.shape)

    @property
    def canvases(self) -> np.ndarray:
        """(W, T) the canvas of each token in its window, from 0."""
        places = np.arange(self.layout.window_tokens) // self.layout.canvas_tokens
        return np.broadcast_to(places, self.ids.shape)


def score_tokens(
    twin: Backbone,
    denoiser: Backbone,
    held_out: HeldOut,
    numbers: np.ndarray,
    *,
    next_token: NextToken,
    layout: Layout,
    sweeps: Sequence[Levels],
    conditionings: Sequence[Conditioning],
    seed: int,
    batch_windows: int,
    track: Track,
) -> TokenCosts:
    """Score the same windows with both models, at every level of every sweep.

    The noise of a window follows from its index, the seed and the pass, so that neither the batch
    size nor an earlier call changes it. Both models are left in the mode they came in.

    Args:
        twin: the autoregressive model.
        denoiser: the diffusion model, on the same device.
        held_out: windows that neither has seen.
        numbers: (W,) which of them.
        next_token: the twin's objective; its chunk of the vocabulary serves both.
        layout: of the denoiser.
        sweeps: the levels of noise, a bound for each.
        conditionings: the ways of self-conditioning.
        seed: of the noise.
        batch_windows: windows at once; changes no value.
        track: shows how far it is.
    """
    shape = (len(numbers), layout.window_tokens)
    costs = TokenCosts(
        layout=layout,
        numbers=numbers,
        ids=held_out.gather(numbers),
        documents=np.stack([held_out.documents_of(int(n)) for n in numbers]),
        text_bytes=np.stack([held_out.text_bytes_of(int(n)) for n in numbers]),
        twin=np.empty(shape),
        bounds=tuple(
            BoundCosts(
                levels=levels,
                conditioning=conditioning,
                nats=np.zeros(shape),
                from_noise=np.empty(shape),
                by_level=np.zeros((levels.n_passes, 2)),
            )
            for levels in sweeps
            for conditioning in conditionings
        ),
    )

    def passes() -> Iterator[None]:
        device = denoiser.head_weight.device
        for first in range(0, len(numbers), batch_windows):
            rows = slice(first, first + batch_windows)
            windows = torch.from_numpy(costs.ids[rows]).to(device)
            costs.twin[rows] = _on_cpu(next_token.nats(twin, windows))
            context = denoiser.encode_context(windows)
            for levels in sweeps:
                for one in bound_passes(
                    denoiser,
                    context,
                    windows,
                    numbers[rows],
                    levels=levels,
                    conditionings=conditionings,
                    layout=layout,
                    seed=seed,
                    vocab_chunk=next_token.vocab_chunk,
                ):
                    _add(costs, rows, levels, one)
                    yield

    n_batches = -(-len(numbers) // batch_windows)
    total = n_batches * sum(levels.n_passes for levels in sweeps)
    with evaluating(twin), evaluating(denoiser):
        for _ in track(passes(), total=total, label="noisy passes"):
            pass
    return costs


def _add(costs: TokenCosts, rows: slice, levels: Levels, one: PassCost) -> None:
    """Add one pass over some windows to the rows of its sweep."""
    layout = costs.layout
    is_last = np.repeat(one.levels == levels.n_passes, layout.canvas_tokens)  # (T,)
    for bound in costs.bounds:
        if bound.levels is not levels:
            continue
        cost = one.nats[bound.conditioning]
        step, plain = _on_cpu(cost.bound), _on_cpu(cost.plain)
        bound.nats[rows] += step
        bound.from_noise[rows, is_last] = plain[:, is_last]
        for column, nats in enumerate((step, plain)):
            of_canvas = nats.reshape(len(nats), -1, layout.canvas_tokens).sum((0, 2))  # (C,)
            np.add.at(bound.by_level[:, column], one.levels - 1, of_canvas / costs.ids.size)


def _on_cpu(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()
