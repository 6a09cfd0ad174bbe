"""Does a guess enter once, from zero, and only in the rows that have one?"""

import pytest
import torch
from torch import Tensor

from canvaslm.device import autocast
from canvaslm.layout import Layout
from canvaslm.loss import chunked_cross_entropy
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.self_conditioning import SelfConditioning
from canvaslm.model.shape import ModelParams

each_site = pytest.mark.parametrize("site", ["input", "output"])
each_form = pytest.mark.parametrize("form", ["linear", "gated"])


def denoised(model: Backbone, batch, guess: Tensor | None, has_guess: Tensor | None) -> Tensor:
    dtype = model.head_weight.dtype
    return model.denoise(
        batch.noisy,
        batch.times,
        context=model.encode(batch.clean),
        guess=None if guess is None else guess.to(dtype),
        has_guess=has_guess,
    )


@each_site
@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fresh_network_gives_the_same_bits_with_a_guess_and_without(
    site: str, form: str, dtype: torch.dtype, tiny_params: ModelParams, tiny_layout: Layout, batch
) -> None:
    changes = {"self_conditioning": site, "self_conditioning_form": form}
    params = tiny_params.model_copy(update=changes)
    model = Backbone(params, tiny_layout).to(dtype)
    initialise(model, 1)
    without = denoised(model, batch, None, None)
    assert torch.equal(denoised(model, batch, batch.guess, None), without)
    assert torch.equal(denoised(model, batch, batch.guess, batch.has_guess), without)


@pytest.mark.parametrize("bias", [True, False])
def test_projection_is_born_as_zero(bias: bool) -> None:
    guess = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for gated in (True, False):
        assert not SelfConditioning(4, bias=bias, gated=gated)(guess, None).any()


def test_a_gated_guess_is_what_its_formula_says() -> None:
    layer = SelfConditioning(4, bias=True, gated=True).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    guess = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    assert layer.gate is not None
    assert layer.up is not None
    gate, up = layer.gate(guess), layer.up(guess)
    due = layer.projection(gate * torch.sigmoid(gate) * up)
    torch.testing.assert_close(layer(guess, None), due, rtol=1e-12, atol=1e-12)


@each_site
@each_form
def test_rows_without_a_guess_add_exactly_nothing(site: str, form: str, build_model, batch) -> None:
    model = build_model(self_conditioning=site, self_conditioning_form=form)
    guess = batch.guess.clone()
    guess[~batch.has_guess] = torch.nan
    mixed, without = (
        denoised(model, batch, guess, batch.has_guess),
        denoised(model, batch, None, None),
    )
    assert torch.equal(mixed[1], without[1])
    assert (mixed[0] - without[0]).abs().max() > 0.1
    mixed.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_output_site_adds_the_projected_guess_once(build_model, batch) -> None:
    model = build_model(self_conditioning="output")
    added = denoised(model, batch, batch.guess, None) - denoised(model, batch, None, None)
    projected = model.self_conditioning.projection(batch.guess)
    assert (added - projected).abs().max() < 1e-12


def test_flags_that_are_numbers_are_refused() -> None:
    layer = SelfConditioning(4, bias=True, gated=False)
    with pytest.raises(TypeError, match="expected bool"):
        layer(torch.zeros(2, 3, 4), torch.tensor([1.0, 0.0]))


def two_pass_nats(model: Backbone, batch) -> Tensor:
    """One training step's loss, both passes inside one autocast region."""
    with autocast(torch.device("cpu"), "bfloat16"):
        encoded = model.encode(batch.clean)
        inputs = (batch.noisy, batch.times)
        with torch.no_grad():
            first = model.denoise(*inputs, context=encoded, guess=None, has_guess=None)
            guess = model.soft_embedding(first, vocab_chunk=10)
        hidden = model.denoise(*inputs, context=encoded, guess=guess, has_guess=batch.has_guess)
        return chunked_cross_entropy(
            hidden, model.head_weight, batch.clean, vocab_chunk=10, reduction="mean"
        )


# BR-34
@each_site
def test_two_passes_under_autocast_leave_no_parameter_without_gradient(
    site: str, build_model, batch
) -> None:
    model = build_model(self_conditioning=site).float()
    two_pass_nats(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


# BR-34
def test_weights_changed_in_place_are_seen_by_the_next_pass(build_model, batch) -> None:
    model = build_model().float()
    with autocast(torch.device("cpu"), "bfloat16"):
        before = two_pass_nats(model, batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05)
        after = two_pass_nats(model, batch)
    fresh = build_model().float()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, two_pass_nats(fresh, batch))
    assert not torch.equal(after, before)
