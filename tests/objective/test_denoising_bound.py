"""The bound, pass by pass: both sweeps, both ways of self-conditioning."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.diffusion.bound import step_nats
from canvaslm.diffusion.continuous_bound import continuous_nats
from canvaslm.diffusion.levels import ContinuousLevels, GridLevels, Levels
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.denoising_bound import Conditioning, bound_passes, conditionings_of
from oracles import all_sequences, kept_share, noise_matrix
from shapes import tiny_diffusion, tiny_shape

SWEEPS: list[Levels] = [GridLevels(n_times=5, tilt=0.0), ContinuousLevels(n_passes=4, tilt=0.0)]
BOTH: tuple[Conditioning, ...] = ("off", "two_pass")


def tiny_model(layout: Layout) -> Backbone:
    """A float64 model whose self-conditioning is no longer zero, so that a guess matters."""
    model = Backbone(tiny_shape(), layout).double()
    initialise(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("self_conditioning"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return model


def windows_of(layout: Layout, n: int) -> Tensor:
    draws = np.random.Generator(np.random.Philox(key=1))
    return torch.from_numpy(draws.integers(layout.vocab_size, size=(n, layout.window_tokens)))


def totals(
    model: Any,
    windows: Tensor,
    numbers: np.ndarray,
    levels: Levels,
    *,
    layout: Layout,
    conditionings: Sequence[Conditioning] = BOTH,
    vocab_chunk: int = 10,
) -> dict[Conditioning, Tensor]:
    passes = bound_passes(
        model,
        model.encode_context(windows),
        windows,
        numbers,
        levels=levels,
        conditionings=conditionings,
        layout=layout,
        seed=5,
        vocab_chunk=vocab_chunk,
    )
    nats = [one.nats for one in passes]
    assert len(nats) == levels.n_passes
    return {x: torch.stack([each[x].bound for each in nats]).sum(0) for x in conditionings}


@pytest.mark.parametrize("levels", SWEEPS, ids=lambda levels: levels.name)
def test_both_bounds_equal_a_loop_with_dense_logits_and_a_guess_of_the_same_noise(
    tiny_layout: Layout, levels: Levels
) -> None:
    model = tiny_model(tiny_layout)
    windows, numbers = windows_of(tiny_layout, 3), np.array([4, 5, 6])
    expected = {x: torch.zeros(windows.shape, dtype=torch.float64) for x in BOTH}
    with torch.no_grad():
        clean = model.encode(windows)
        for m in range(levels.n_passes):
            noisy = levels.draw(windows, numbers, pass_number=m, layout=tiny_layout, seed=5)
            on_grid = isinstance(levels, GridLevels)
            shown = noisy.times.double() / levels.n_passes if on_grid else noisy.times
            first = model.logits(
                model.denoise(noisy.ids, shown, context=clean, guess=None, has_guess=None)
            )
            guess = first.softmax(-1) @ model.head_weight
            second = model.logits(
                model.denoise(noisy.ids, shown, context=clean, guess=guess, has_guess=None)
            )
            t = noisy.times.repeat_interleave(tiny_layout.canvas_tokens, dim=1)
            for name, logits in zip(BOTH, (first, second), strict=True):
                if on_grid:
                    nats = step_nats(logits, noisy.ids, windows, t=t, n_times=levels.n_passes)
                else:
                    nats = continuous_nats(logits, noisy.ids, windows, time=t) / levels.n_passes
                expected[name] += nats
    found = totals(model, windows, numbers, levels, layout=tiny_layout)
    for name in BOTH:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
    assert float((found["off"] - found["two_pass"]).abs().max()) > 1e-3  # the guess says something


def test_the_bound_on_a_grid_is_the_objectives_to_the_bit(tiny_layout: Layout) -> None:
    model, diffusion = tiny_model(tiny_layout), tiny_diffusion()
    windows, numbers = windows_of(tiny_layout, 3), np.arange(3)
    objective = Denoising(layout=tiny_layout, diffusion=diffusion, seed=5, vocab_chunk=10)
    of_objective = objective.bound_nats(model, windows, numbers, n_times=5)
    levels, summed = GridLevels(n_times=5, tilt=0.0), torch.zeros_like(of_objective)
    for one in bound_passes(
        model,
        model.encode_context(windows),
        windows,
        numbers,
        levels=levels,
        conditionings=BOTH,
        layout=tiny_layout,
        seed=5,
        vocab_chunk=10,
    ):
        summed += one.nats["off"].bound
    assert torch.equal(summed, of_objective)


@pytest.mark.parametrize("levels", SWEEPS, ids=lambda levels: levels.name)
def test_neither_batch_nor_chunk_changes_a_value(tiny_layout: Layout, levels: Levels) -> None:
    model = tiny_model(tiny_layout)
    windows, numbers = windows_of(tiny_layout, 5), np.array([9, 2, 7, 4, 0])
    whole = totals(model, windows, numbers, levels, layout=tiny_layout)
    again = totals(model, windows, numbers, levels, layout=tiny_layout)
    for chunk, size in ((10, 2), (1, 5), (37, 1), (1000, 3)):
        parts = [
            totals(
                model,
                windows[i : i + size],
                numbers[i : i + size],
                levels,
                layout=tiny_layout,
                vocab_chunk=chunk,
            )
            for i in range(0, 5, size)
        ]
        for name in BOTH:
            assert torch.equal(again[name], whole[name])  # the same bytes for the same batch
            part = torch.cat([each[name] for each in parts])
            torch.testing.assert_close(part, whole[name], rtol=1e-12, atol=1e-12)


def test_a_network_that_takes_no_guess_has_one_bound() -> None:
    assert conditionings_of(tiny_shape(self_conditioning="off")) == ("off",)
    for site in ("input", "output"):
        assert conditionings_of(tiny_shape(self_conditioning=site)) == BOTH


class Pairs:
    """Canvases of two letters of three: what one says of itself depends on the other's noise."""

    def __init__(self) -> None:
        self.params = tiny_shape()
        self.head_weight = torch.eye(3, dtype=torch.float64)
        rng = np.random.default_rng(11)
        self.cavity = torch.from_numpy(1.5 * rng.normal(size=(9, 2, 3)))  # by noisy canvas

    def encode_context(self, ids: Tensor) -> None:
        """What stands in other canvases says nothing about one."""

    def logits(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Posterior logits (..., 2, 3) of canvases (..., 2) at times (...)."""
        share = torch.cos(times * (np.pi / 2)) ** 2
        evidence = torch.log1p(3 * share / (1 - share))
        return self.cavity[noisy @ torch.tensor([3, 1])] + evidence[
            ..., None, None
        ] * torch.nn.functional.one_hot(noisy, 3)

    def denoise(self, noisy: Tensor, times: Tensor, **_: object) -> Tensor:
        return self.logits(noisy.unflatten(1, (-1, 2)), times).flatten(1, 2)


@pytest.mark.parametrize("n_passes", [2, 8])
def test_the_continuous_estimate_is_unbiased_against_numerical_integration(n_passes: int) -> None:
    """The estimate of one canvas, over many windows, is its integral over times and noise."""
    model = Pairs()
    canvases = torch.from_numpy(all_sequences(3, 2))  # (9, 2)
    clean = torch.tensor([2, 0])
    nodes, weights = np.polynomial.legendre.leggauss(200)
    integral = 0.0
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        noise = noise_matrix(kept_share(float(node), 1), 3)
        odds = torch.from_numpy(noise[2][canvases[:, 0]] * noise[0][canvases[:, 1]])  # (9,)
        logits = model.logits(canvases, torch.full((9,), float(node), dtype=torch.float64))
        nats = continuous_nats(logits, canvases, clean.expand(9, 2), time=float(node)).sum(1)
        integral += float(weight * (odds * nats).sum())
    layout = Layout(canvas_tokens=2, canvases_per_window=4, vocab_size=3)
    windows = clean.repeat(3000, 4)
    found = totals(
        model,
        windows,
        np.arange(3000),
        ContinuousLevels(n_passes=n_passes, tilt=0.0),
        layout=layout,
        conditionings=("off",),
    )["off"]
    per_canvas = found.unflatten(1, (4, 2)).sum(2).flatten()
    error = float(per_canvas.std()) / len(per_canvas) ** 0.5
    assert abs(float(per_canvas.mean()) - integral) < 4 * error
    assert error < 0.04 * integral
