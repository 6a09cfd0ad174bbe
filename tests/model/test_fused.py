"""Are the norm, the rotation and the gate those of their formulas, forwards and backwards?"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.model.fused import Gated, Rotate, ScaledNorm

EPS = 1e-5
Formula = Callable[..., Tensor]


def draw(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x: Tensor) -> Tensor:
    cos, sin = angles(x)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    turns = torch.arange(x.shape[2] * x.shape[3] // 2, dtype=x.dtype).view(x.shape[2], -1)
    return turns.cos(), turns.sin()


def heads(x: Tensor) -> Tensor:
    """(B, S, H·E) as (B, H, S, E): the same memory in another order."""
    return x.unflatten(-1, (3, 4)).transpose(1, 2)


CASES: dict[str, tuple[Formula, Formula, tuple[Tensor, ...]]] = {
    "norm": (lambda x, w: ScaledNorm.apply(x, w, EPS), norm, (draw(2, 5, 12), draw(12, seed=2))),
    "norm of heads": (
        lambda x, w: ScaledNorm.apply(heads(x), w, EPS),
        lambda x, w: norm(heads(x), w),
        (draw(2, 5, 12), draw(4, seed=2)),
    ),
    "norm of a small row": (
        lambda x, w: ScaledNorm.apply(x, w, EPS),
        norm,
        (draw(1, 3, 12) * 1e-3, draw(12, seed=2)),
    ),
    "rotation": (
        lambda x: Rotate.apply(heads(x), *angles(heads(x))),
        lambda x: rotate(heads(x)),
        (draw(2, 5, 12),),
    ),
    "gate": (
        Gated.apply,
        lambda gate, up: functional.silu(gate) * up,
        (draw(2, 5, 7), draw(2, 5, 7, seed=2)),
    ),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str
)
@pytest.mark.parametrize("name", list(CASES))
def test_values_and_gradients_are_those_of_the_formula(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    fused, formula, operands = CASES[name]
    ours = [x.to(dtype, copy=True).requires_grad_() for x in operands]
    plain = [x.clone().requires_grad_() for x in operands]
    made, expected = fused(*ours), formula(*plain)
    assert made.dtype == dtype
    assert made.detach().double() == pytest.approx(expected.detach(), rel=tolerance, abs=tolerance)
    slope = draw(*expected.shape, seed=3)
    made.backward(slope.to(dtype))
    expected.backward(slope)
    for x, y in zip(ours, plain, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        scale = float(y.grad.abs().max())
        assert x.grad.double() == pytest.approx(y.grad, rel=tolerance, abs=tolerance * scale)


@pytest.mark.parametrize("name", list(CASES))
def test_bfloat16_is_rounded_and_nothing_else(name: str) -> None:
    fused, formula, operands = CASES[name]
    ours = [x.bfloat16().requires_grad_() for x in operands]
    plain = [x.detach().double().requires_grad_() for x in ours]
    made, expected = fused(*ours), formula(*plain)
    assert made.dtype == torch.bfloat16
    slope = draw(*expected.shape, seed=3).bfloat16()
    made.backward(slope)
    expected.backward(slope.double())
    pairs: list[tuple[Tensor, Tensor]] = [(made.detach(), expected.detach())]
    for x, y in zip(ours, plain, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        pairs.append((x.grad, y.grad))
    for found, true in pairs:
        assert (found.double() - true).norm() <= 2**-7 * true.norm()


@pytest.mark.parametrize("name", list(CASES))
def test_operands_and_incoming_gradients_are_left_alone(name: str) -> None:
    fused, _, operands = CASES[name]
    given = [x.clone().requires_grad_() for x in operands]
    made = fused(*given)
    slope = draw(*made.shape, seed=3)
    kept = slope.clone()
    made.backward(slope)
    assert torch.equal(slope, kept)
    assert all(torch.equal(x, y) for x, y in zip(given, operands, strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_not_finite_stays_visible_in_value_and_gradient(name: str) -> None:
    fused, _, operands = CASES[name]
    given = [x.clone() for x in operands]
    given[0].view(-1)[0] = torch.nan
    given = [x.requires_grad_() for x in given]
    made = fused(*given)
    made.backward(torch.ones_like(made))
    assert not made.isfinite().all()
    if name != "rotation":  # whose gradient does not depend on what was turned
        assert given[0].grad is not None
        assert not given[0].grad.isfinite().all()
