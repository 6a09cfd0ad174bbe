"""The denoising objective: noise by window number, contexts, self-conditioning, the bound."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from canvaslm.diffusion.bound import step_nats
from canvaslm.diffusion.corruption import draw_corruption, draw_sweep_pass
from canvaslm.diffusion.schedule import Context
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.denoising import Denoising
from oracles import all_sequences, copy_chain, kept_share, token_posteriors
from shapes import tiny_diffusion, tiny_shape


def tiny_model(layout: Layout, **changes: object) -> Backbone:
    """A float64 model whose self-conditioning is no longer zero, so that a guess matters."""
    model = Backbone(tiny_shape(**changes), layout).double()
    initialise(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("self_conditioning"):
                parameter.copy_(
                    torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape)
                )
    return model


def denoising(layout: Layout, *, context: Context = "clean", share: float = 0.5) -> Denoising:
    diffusion = tiny_diffusion(context=context, self_conditioning_share=share)
    return Denoising(layout=layout, diffusion=diffusion, seed=5, vocab_chunk=10)


def windows_of(layout: Layout, n: int) -> Tensor:
    draws = np.random.Generator(np.random.Philox(key=1))
    return torch.from_numpy(draws.integers(layout.vocab_size, size=(n, layout.window_tokens)))


CONTEXTS: list[tuple[Context, str]] = [("clean", "causal"), ("noisy", "block"), ("prefix", "block")]


@pytest.mark.parametrize(("context", "clean_mask"), CONTEXTS)
def test_micro_batches_add_up_to_the_whole_batch(
    tiny_layout: Layout, context: Context, clean_mask: str
) -> None:
    # BR-35: with `prefix`, micro-batches hold uneven numbers of targets.
    model = tiny_model(tiny_layout, clean_mask=clean_mask)
    objective = denoising(tiny_layout, context=context)
    windows, numbers = windows_of(tiny_layout, 8), np.arange(100, 108)

    def grads(size: int) -> tuple[float, list[Tensor]]:
        model.zero_grad()
        parts = [
            objective.loss(model, windows[i : i + size], numbers[i : i + size])
            for i in range(0, 8, size)
        ]
        n_targets = sum(part.n_targets for part in parts)
        for part in parts:
            (part.nats / n_targets).backward()
        total = sum(float(part.nats.detach()) for part in parts) / n_targets
        return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, reference = grads(8)
    for size in (4, 2, 1):
        other, parts = grads(size)
        assert other == pytest.approx(loss, rel=1e-12)
        for one, two in zip(reference, parts, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_noise_follows_the_window_number_not_the_row(tiny_layout: Layout) -> None:
    model, objective = tiny_model(tiny_layout), denoising(tiny_layout)
    windows, numbers = windows_of(tiny_layout, 4), np.array([9, 2, 7, 4])
    together = objective.loss(model, windows, numbers).nats.detach()
    order = [2, 0, 3, 1]
    shuffled = objective.loss(model, windows[order], numbers[order]).nats.detach()
    assert float(together) == pytest.approx(float(shuffled), rel=1e-12)
    renumbered = objective.loss(model, windows, numbers + 100).nats.detach()
    assert float(together) != pytest.approx(float(renumbered), rel=1e-6)


def test_prefix_canvases_carry_no_loss(tiny_layout: Layout) -> None:
    objective = denoising(tiny_layout, context="prefix")
    model = tiny_model(tiny_layout, clean_mask="block")
    windows, numbers = windows_of(tiny_layout, 16), np.arange(16)
    noisy = draw_corruption(
        windows,
        numbers,
        layout=tiny_layout,
        diffusion=objective.diffusion,
        context="prefix",
        seed=5,
        tilt=0.0,
    )
    n_noisy = int((noisy.times > 0).sum())
    assert 0 < n_noisy < 16 * tiny_layout.canvases_per_window
    got = objective.loss(model, windows, numbers)
    assert got.n_targets == n_noisy * tiny_layout.canvas_tokens


def test_a_guess_changes_only_the_rows_that_have_one(tiny_layout: Layout) -> None:
    model = tiny_model(tiny_layout)
    windows, numbers = windows_of(tiny_layout, 12), np.arange(12)
    losses = {
        share: [
            float(
                denoising(tiny_layout, share=share)
                .loss(model, windows[i : i + 1], numbers[i : i + 1])
                .nats.detach()
            )
            for i in range(12)
        ]
        for share in (0.0, 0.5, 1.0)
    }
    without, some, every = (losses[share] for share in (0.0, 0.5, 1.0))
    assert all(one != two for one, two in zip(without, every, strict=True))
    guessed = [one == two for one, two in zip(some, every, strict=True)]
    assert all(g or s == w for g, s, w in zip(guessed, some, without, strict=True))
    assert 0 < sum(guessed) < 12


def test_no_gradient_flows_through_the_first_pass(tiny_layout: Layout) -> None:
    model = tiny_model(tiny_layout)
    objective = denoising(tiny_layout, share=1.0)
    windows, numbers = windows_of(tiny_layout, 2), np.arange(2)
    calls: list[bool] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    objective.loss(model, windows, numbers).nats.backward()
    assert calls == [True, False, True]  # the clean stream, the guess, the pass that learns


def test_bound_takes_each_canvas_through_every_time_once(tiny_layout: Layout) -> None:
    windows = windows_of(tiny_layout, 3)
    times = torch.stack(
        [
            draw_sweep_pass(
                windows,
                np.arange(3),
                pass_number=m,
                layout=tiny_layout,
                n_times=6,
                seed=1,
                tilt=0.0,
            ).times
            for m in range(6)
        ]
    )
    assert times.sort(dim=0).values[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert bool((times.sort(dim=0).values == torch.arange(1, 7)[:, None, None]).all())


def test_bound_equals_a_loop_over_passes_with_dense_logits(tiny_layout: Layout) -> None:
    model, objective = tiny_model(tiny_layout), denoising(tiny_layout)
    windows, numbers = windows_of(tiny_layout, 3), np.array([4, 5, 6])
    expected = torch.zeros(windows.shape, dtype=torch.float64)
    with torch.no_grad():
        clean = model.encode(windows)
        for m in range(5):
            noisy = draw_sweep_pass(
                windows, numbers, pass_number=m, layout=tiny_layout, n_times=5, seed=5, tilt=0.0
            )
            hidden = model.denoise(
                noisy.ids, noisy.times.double() / 5, context=clean, guess=None, has_guess=None
            )
            t = noisy.times.repeat_interleave(tiny_layout.canvas_tokens, dim=1)
            expected += step_nats(model.logits(hidden), noisy.ids, windows, t=t, n_times=5)
    got = objective.bound_nats(model, windows, numbers, n_times=5)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_one_stream_with_a_causal_clean_mask_is_refused(tiny_layout: Layout) -> None:
    with pytest.raises(InputError, match="clean_mask"):
        denoising(tiny_layout, context="noisy").refuse_misfit(tiny_shape(clean_mask="causal"))
    denoising(tiny_layout, context="noisy").refuse_misfit(tiny_shape(clean_mask="block"))


def test_flops_count_the_clean_stream_and_the_first_pass(tiny_layout: Layout) -> None:
    params = tiny_shape()
    one_stream = denoising(tiny_layout, context="noisy", share=0.0).flops_of_first(params, 1)
    two_streams = denoising(tiny_layout, share=0.0).flops_of_first(params, 1)
    with_guess = denoising(tiny_layout, share=1.0).flops_of_first(params, 1)
    assert 1.4 * one_stream < two_streams < 2.0 * one_stream  # 1.5 but for the last clean block
    assert two_streams + one_stream / 3 < with_guess < two_streams + one_stream


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("context", ["clean", "noisy"])
def test_flops_are_those_that_torch_counts(context: Context, share: float) -> None:
    layout = Layout(canvas_tokens=8, canvases_per_window=8, vocab_size=300)
    # One narrow head: torch does not count every form of attention, so that it weighs a percent.
    changes = {"width": 64, "n_layers": 3, "n_heads": 1, "n_kv_heads": 1, "head_width": 8}
    params = tiny_shape(**changes, ffn_width=256, time_width=0, clean_mask="block")
    objective = denoising(layout, context=context, share=share)
    model = Backbone(params, layout)
    initialise(model, 3)
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        objective.loss(model, windows_of(layout, 4), np.arange(4)).nats.backward()
    counted = counter.get_total_flops() / 4
    projection = 6 * share * params.width**2 * layout.window_tokens  # left out by the formula
    assert counted == pytest.approx(objective.flops_of_first(params, 1) + projection, rel=0.02)


@pytest.mark.parametrize(("context", "clean_mask"), CONTEXTS)
def test_guess_is_the_embedded_posterior_of_the_same_noisy_tokens(
    tiny_layout: Layout, context: Context, clean_mask: str
) -> None:
    model = tiny_model(tiny_layout, clean_mask=clean_mask)
    windows, numbers = windows_of(tiny_layout, 12), np.arange(12)
    shown: list[tuple[Tensor, Tensor]] = []
    assert model.self_conditioning is not None
    model.self_conditioning.register_forward_pre_hook(lambda _, given: shown.append(given))
    objective = denoising(tiny_layout, context=context)
    objective.loss(model, windows, numbers)
    [(guess, has_guess)] = shown
    noisy = draw_corruption(
        windows,
        numbers,
        layout=tiny_layout,
        diffusion=objective.diffusion,
        context=context,
        seed=5,
        tilt=0.0,
    )
    arguments = (noisy.ids, noisy.times.double() / 4)
    with torch.no_grad():
        if context == "clean":
            clean = model.encode(windows)
            first = model.denoise(*arguments, context=clean, guess=None, has_guess=None)
        else:
            first = model.denoise_one_stream(*arguments, guess=None, has_guess=None)
        expected = model.logits(first).softmax(-1) @ model.head_weight
    assert 0 < int(has_guess.sum()) < 12
    assert not guess.requires_grad
    assert (guess - expected)[has_guess].abs().max() < 1e-12


def test_half_of_the_windows_get_a_guess(tiny_layout: Layout) -> None:
    model = tiny_model(tiny_layout)
    shown: list[Tensor] = []
    assert model.self_conditioning is not None
    model.self_conditioning.register_forward_pre_hook(lambda _, given: shown.append(given[1]))
    denoising(tiny_layout).loss(model, windows_of(tiny_layout, 1000), np.arange(1000))
    assert abs(int(shown[0].sum()) - 500) < 4 * (1000 * 0.25) ** 0.5


class ExactChain:
    """Exact per-token posteriors of canvases of three letters, each a noisy copy of the last."""

    def __init__(self, flip: float, n_times: int) -> None:
        self.n_times = n_times
        self.params = tiny_shape()
        self.head_weight = torch.eye(3, dtype=torch.float64)
        posteriors = [
            token_posteriors(copy_chain(3, 3, flip), kept_share(t, n_times))[1]
            for t in range(1, n_times + 1)
        ]
        self.table = torch.from_numpy(np.log(posteriors))  # (N, 27 noisy canvases, 3, V)

    def encode_context(self, ids: Tensor) -> None:
        """What stands in other canvases says nothing about one."""

    def denoise(self, noisy: Tensor, times: Tensor, **_: object) -> Tensor:
        canvases = noisy.unflatten(1, (-1, 3)) @ torch.tensor([9, 3, 1])  # (B, C)
        t = (times * self.n_times).round().long()
        return self.table[t - 1, canvases].flatten(1, 2)


@pytest.mark.parametrize(("n_times", "nats"), [(4, 0.7759), (16, 0.6656)])
def test_bound_of_the_copy_chain_is_its_value_in_expectation(n_times: int, nats: float) -> None:
    layout = Layout(canvas_tokens=3, canvases_per_window=8, vocab_size=3)
    rng = np.random.default_rng(2)
    drawn = rng.choice(27, p=copy_chain(3, 3, 0.1).flatten(), size=(300, 8))
    windows = torch.from_numpy(all_sequences(3, 3)[drawn].reshape(300, 24))
    model: Any = ExactChain(0.1, n_times)
    found = denoising(layout).bound_nats(model, windows, np.arange(300), n_times=n_times).mean(1)
    assert abs(float(found.mean()) - nats) < 4 * float(found.std()) / 300**0.5
    assert float(found.std()) / 300**0.5 < 0.02
