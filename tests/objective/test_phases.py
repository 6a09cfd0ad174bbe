"""A run that begins with a phase of its own, and a clean stream that learns the next token."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.denoising import Denoising
from shapes import tiny_diffusion, tiny_shape

N_FIRST = 3


def model_of(layout: Layout, **changes: object) -> Backbone:
    model = Backbone(tiny_shape(**changes), layout).double()
    initialise(model, 3)
    return model


def objective_of(layout: Layout, **changes: object) -> Denoising:
    n_first = N_FIRST if changes.get("first_phase") else 0
    diffusion = tiny_diffusion(**changes)
    return Denoising(
        layout=layout, diffusion=diffusion, seed=5, vocab_chunk=10, first_phase_windows=n_first
    )


def windows_of(layout: Layout, n: int) -> Tensor:
    draws = np.random.Generator(np.random.Philox(key=1))
    return torch.from_numpy(draws.integers(layout.vocab_size, size=(n, layout.window_tokens)))


def next_token_nats(model: Backbone, windows: Tensor) -> Tensor:
    """By a dense table over the clean stream: each token of a window but the first."""
    logits = model.logits(model.encode(windows).hidden)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


def test_the_companion_pulls_beside_the_loss_and_is_no_part_of_it(tiny_layout: Layout) -> None:
    model, windows, numbers = model_of(tiny_layout), windows_of(tiny_layout, 4), np.arange(4)
    alone = objective_of(tiny_layout).loss(model, windows, numbers)
    beside = objective_of(tiny_layout, next_token_weight=0.25).loss(model, windows, numbers)
    torch.testing.assert_close(beside.nats, alone.nats, rtol=1e-12, atol=0)
    assert beside.n_targets == alone.n_targets == windows.numel()
    assert beside.companion is not None
    due = 0.25 * next_token_nats(model, windows)
    torch.testing.assert_close(beside.companion, due, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    pulls = torch.autograd.grad(beside.pull, parameters, allow_unused=True)
    expected = torch.autograd.grad(alone.nats + due, parameters, allow_unused=True)
    for mine, theirs in zip(pulls, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_a_first_phase_of_next_tokens_never_sees_noise(tiny_layout: Layout) -> None:
    model, windows = model_of(tiny_layout), windows_of(tiny_layout, N_FIRST)
    objective = objective_of(tiny_layout, first_phase="next_token", first_phase_share=0.5)
    calls: list[str] = []
    for name in ("denoise", "denoise_one_stream"):
        setattr(model, name, lambda *_, name=name, **__: calls.append(name))
    got = objective.loss(model, windows, np.arange(N_FIRST))
    torch.testing.assert_close(got.nats, next_token_nats(model, windows), rtol=1e-12, atol=0)
    assert got.n_targets == windows[:, 1:].numel()
    assert got.companion is None
    assert not calls


def test_a_noisy_first_phase_is_the_noisy_context(tiny_layout: Layout) -> None:
    model, windows = model_of(tiny_layout), windows_of(tiny_layout, N_FIRST)
    phased = objective_of(tiny_layout, first_phase="noisy", first_phase_share=0.5)
    numbers = np.arange(N_FIRST)
    noisy = objective_of(tiny_layout, context="noisy").loss(model, windows, numbers)
    assert torch.equal(phased.loss(model, windows, numbers).nats, noisy.nats)
    clean = objective_of(tiny_layout).loss(model, windows, numbers + N_FIRST)
    assert torch.equal(phased.loss(model, windows, numbers + N_FIRST).nats, clean.nats)


@pytest.mark.parametrize("phase", ["noisy", "next_token"])
def test_a_batch_over_both_phases_is_the_sum_of_its_parts(tiny_layout: Layout, phase: str) -> None:
    model, windows = model_of(tiny_layout), windows_of(tiny_layout, 6)
    objective = objective_of(
        tiny_layout, first_phase=phase, first_phase_share=0.5, next_token_weight=0.5
    )
    numbers = np.array([0, 7, 2, 3, 1, 9])
    whole = objective.loss(model, windows, numbers)
    parts = [
        objective.loss(model, windows[i : i + 1], numbers[i : i + 1]) for i in range(len(numbers))
    ]
    assert whole.n_targets == sum(part.n_targets for part in parts)
    total = sum((part.pull for part in parts[1:]), start=parts[0].pull)
    torch.testing.assert_close(whole.pull, total, rtol=1e-12, atol=0)
    companions = [part.companion for part in parts if part.companion is not None]
    assert len(companions) == 3  # of the windows of the second phase
    assert whole.companion is not None


def test_next_tokens_are_not_learned_by_a_stream_that_sees_them(tiny_layout: Layout) -> None:
    shape = tiny_shape(clean_mask="block")
    for changes in (
        {"next_token_weight": 1.0},
        {"first_phase": "next_token", "first_phase_share": 0.5},
    ):
        with pytest.raises(InputError, match="causal"):
            objective_of(tiny_layout, **changes).refuse_misfit(shape)
    objective_of(tiny_layout, first_phase="noisy", first_phase_share=0.5).refuse_misfit(shape)


def test_one_stream_does_not_read_the_previous_token(tiny_layout: Layout) -> None:
    shape = tiny_shape(likelihood_bias=True, noisy_input="previous")
    for context in ("noisy", "prefix"):
        with pytest.raises(InputError, match="clean_mask"):
            objective_of(tiny_layout, context=context).refuse_misfit(shape)
    first = {"first_phase_share": 0.5}
    with pytest.raises(InputError, match="noisy_input"):
        objective_of(tiny_layout, first_phase="noisy", **first).refuse_misfit(shape)
    objective_of(tiny_layout, first_phase="next_token", **first).refuse_misfit(shape)


def test_operations_of_the_first_windows_follow_the_phases(tiny_layout: Layout) -> None:
    params = tiny_shape()
    plain, noisy = (objective_of(tiny_layout, context=c) for c in ("clean", "noisy"))
    each, cheap = (x.flops_of_first(params, 1) for x in (plain, noisy))
    phased = objective_of(tiny_layout, first_phase="noisy", first_phase_share=0.5)
    assert phased.flops_of_first(params, 2) == 2 * cheap
    assert phased.flops_of_first(params, 10) == pytest.approx(3 * cheap + 7 * each)
    told = objective_of(tiny_layout, first_phase="next_token", first_phase_share=0.5)
    clean_only = told.flops_of_first(params, 1)
    assert clean_only < cheap < each
    beside = objective_of(tiny_layout, next_token_weight=1.0).flops_of_first(params, 1)
    assert each < beside < each + clean_only
