"""Is Muon what it is defined to be, and what torch makes of it in bfloat16?"""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from canvaslm.training.muon import Muon, orthogonalisation_flops, orthogonalise
from oracles import muon_by_hand, orthogonalised

SHAPES = [(24, 16), (16, 24), (16, 16), (4, 48), (1, 7)]


def random(shape, seed=0, spread=1.0):
    """A matrix whose singular values lie between ``spread`` and 1 times the largest."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.logspace(0, torch.tensor(spread).log10().item(), len(values))
    return (left @ torch.diag(values.double()) @ right).float()


def made(weight, dtype, **knobs):
    parameter = nn.Parameter(weight.clone())
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1} | knobs
    optimizer = Muon([{"params": [parameter]}], dtype=dtype, **options)
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return parameter, optimizer


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_a_step_is_torch_s_own_bit_for_bit(shape):
    ours, optimizer = made(random(shape), torch.bfloat16)
    theirs = nn.Parameter(ours.detach().clone())
    library = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(4):
        ours.grad, theirs.grad = random(shape, seed), random(shape, seed)
        optimizer.step()
        library.step()
        assert torch.equal(ours, theirs), seed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_the_definition(shape, dtype):
    parameter, optimizer = made(random(shape), dtype, momentum=0.9)
    gradients = [random(shape, seed, spread=0.01) for seed in range(1, 4)]
    due = muon_by_hand(parameter.detach(), gradients, rate=0.02, momentum=0.9, decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_to_one_and_vectors_stay(shape):
    matrix = random(shape, spread=0.1).double()
    found = orthogonalise(matrix)
    torch.testing.assert_close(found, orthogonalised(matrix), rtol=1e-9, atol=1e-9)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_the_size_of_an_update_is_that_of_adamw_whatever_the_shape():
    """A fifth of the rate, as the root of the mean square."""
    for shape in ((24, 16), (64, 256), (256, 16)):
        parameter, optimizer = made(torch.zeros(shape), torch.float32)
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        size = parameter.detach().square().mean().sqrt() / 0.02
        assert 0.15 < size < 0.25, shape


def test_a_gradient_of_zero_moves_nothing_but_by_decay():
    parameter, optimizer = made(random((6, 4)), torch.float32)
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), before * (1 - 0.02 * 0.1))
    optimizer.zero_grad()
    optimizer.step()  # and without one there is no step
    torch.testing.assert_close(parameter.detach(), before * (1 - 0.02 * 0.1))


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (4, 48)])
def test_operations_are_those_of_the_products(shape):
    matrix = random(shape)
    with FlopCounterMode(display=False) as counted:
        orthogonalise(matrix)
    assert counted.get_total_flops() == orthogonalisation_flops(torch.Size(shape))
