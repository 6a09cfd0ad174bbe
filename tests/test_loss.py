"""Does the chunked loss equal its definition, for any chunk, reduction, target and type?"""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from canvaslm import scores
from canvaslm.device import autocast
from canvaslm.errors import InputError
from canvaslm.loss import IGNORED, TargetError, chunked_cross_entropy, dense_cross_entropy
from oracles import defined_nats

Problem = tuple[Tensor, Tensor, Tensor]
Loss = Callable[..., Tensor]

each_loss = pytest.mark.parametrize(
    "loss",
    [dense_cross_entropy, functools.partial(chunked_cross_entropy, vocab_chunk=7)],
    ids=["dense", "chunked"],
)


def problem(
    *, n_tokens: int = 24, vocab_size: int = 41, width: int = 8, share_ignored: float = 0.25
) -> Problem:
    """Hidden (2, n/2, D), head (V, D) and targets in float64; scores of a few nats."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, n_tokens // 2)
    hidden = torch.randn(*shape, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab_size, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < share_ignored] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def truth_of(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    nats = defined_nats(hidden, weight, targets, IGNORED)
    if reduction == "none":
        return nats
    return nats.sum() / (1 if reduction == "sum" else int((targets != IGNORED).sum()))


def assert_equal_with_gradients(
    nats: Tensor, truth: Tensor, inputs: Problem, *, tolerance: float
) -> None:
    """Values and gradients under a random pull on each value agree, relative to their size."""
    pull = torch.rand(truth.shape, generator=torch.Generator().manual_seed(2)).double() * 0.37
    gradients = torch.autograd.grad(nats, inputs[:2], pull.to(nats.dtype))
    true_gradients = torch.autograd.grad(truth, inputs[:2], pull.to(truth.dtype))
    for value, true_value in zip((nats, *gradients), (truth, *true_gradients), strict=True):
        assert value.shape == true_value.shape
        assert (value - true_value).abs().max() <= tolerance * true_value.abs().max()


# BR-21, BR-23: a pull of its own on each value, a quarter of the targets ignored
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("vocab_chunk", [1, 7, 8, 40, 41, 1000])
def test_chunk_size_changes_no_value(vocab_chunk: int, reduction) -> None:
    inputs = problem()
    nats = chunked_cross_entropy(*inputs, vocab_chunk=vocab_chunk, reduction=reduction)
    truth = truth_of(*inputs, reduction)
    assert_equal_with_gradients(nats, truth, inputs, tolerance=1e-12)


# BR-21
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_dense_loss_is_the_definition(reduction) -> None:
    inputs = problem()
    nats = dense_cross_entropy(*inputs, reduction=reduction)
    assert_equal_with_gradients(nats, truth_of(*inputs, reduction), inputs, tolerance=1e-12)


# BR-21
@pytest.mark.parametrize("vocab_chunk", [32, 1000, 1024, 4095, 4096, 5000])
def test_many_tokens_in_float32_stay_within_1e_6(vocab_chunk: int) -> None:
    exact = problem(n_tokens=128, vocab_size=4096)
    hidden, weight, targets = exact
    narrow = (hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_())
    nats = chunked_cross_entropy(*narrow, targets, vocab_chunk=vocab_chunk, reduction="mean")
    assert nats.dtype == torch.float32
    truth = truth_of(*exact, "mean")
    assert abs(nats.item() - truth.item()) < 1e-6
    gradients = torch.autograd.grad(nats, narrow)
    true_gradients = torch.autograd.grad(truth, exact[:2])
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        assert (gradient - true_gradient).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_remainder_of_1105_words_is_counted(dtype: torch.dtype) -> None:
    exact = problem(n_tokens=6, vocab_size=50_257, width=4, share_ignored=0)
    exact[2][0, 0] = 50_256
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in exact[:2])
    nats = chunked_cross_entropy(hidden, weight, exact[2], vocab_chunk=8192, reduction="none")
    truth = truth_of(*exact, "none")
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert (nats - truth).abs().max() < tolerance * truth.abs().max()
    gradient = torch.autograd.grad(nats.sum(), weight)[0]
    true_gradient = torch.autograd.grad(truth.sum(), exact[1])[0]
    assert (gradient - true_gradient).abs().max() < tolerance


def test_gradient_is_the_derivative() -> None:
    hidden, weight, targets = problem(n_tokens=6, vocab_size=11, width=3)

    def nats(h: Tensor, w: Tensor) -> Tensor:
        return chunked_cross_entropy(h, w, targets, vocab_chunk=4, reduction="none")

    assert torch.autograd.gradcheck(nats, (hidden, weight))


# BR-23
def test_doubled_pull_doubles_the_gradients() -> None:
    hidden, weight, targets = problem()
    nats = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=9, reduction="mean")
    once = torch.autograd.grad(nats * 0.37, (hidden, weight), retain_graph=True)
    twice = torch.autograd.grad(nats * 0.74, (hidden, weight))
    for single, double in zip(once, twice, strict=True):
        assert torch.equal(2 * single, double)


# BR-22
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@each_loss
def test_no_target_at_all_gives_zero_and_zero_gradients(loss: Loss, reduction) -> None:
    hidden, weight, targets = problem(share_ignored=1)
    nats = loss(hidden, weight, targets, reduction=reduction)
    assert nats.item() == 0.0
    for gradient in torch.autograd.grad(nats, (hidden, weight)):
        assert not gradient.any()


# BR-22
def test_ignored_rows_count_as_absent_whatever_they_hold() -> None:
    hidden, weight, targets = problem()
    ignored = targets == IGNORED
    spoilt = hidden.detach().clone()
    spoilt[ignored] = math.nan
    spoilt.requires_grad_()
    nats = chunked_cross_entropy(spoilt, weight, targets, vocab_chunk=7, reduction="none")
    kept = hidden.detach()[~ignored].requires_grad_()
    alone = chunked_cross_entropy(kept, weight, targets[~ignored], vocab_chunk=7, reduction="none")
    assert torch.equal(nats[~ignored], alone)
    assert not nats[ignored].any()
    d_spoilt, d_weight = torch.autograd.grad(nats.sum(), (spoilt, weight))
    d_kept, d_weight_alone = torch.autograd.grad(alone.sum(), (kept, weight))
    assert torch.equal(d_weight, d_weight_alone)
    assert torch.equal(d_spoilt[~ignored], d_kept)
    assert not d_spoilt[ignored].any()


# BR-22
def test_chunk_without_any_target_is_counted_in_the_sum() -> None:
    hidden, weight, targets = problem(share_ignored=0)
    low = targets % 10  # every target in the first of four chunks
    nats = chunked_cross_entropy(hidden, weight, low, vocab_chunk=12, reduction="mean")
    assert_equal_with_gradients(
        nats, truth_of(hidden, weight, low, "mean"), (hidden, weight, low), tolerance=1e-12
    )


# BR-24
@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("n_chunks", [4, 256])
def test_head_gradient_in_bfloat16_does_not_drift_with_the_number_of_chunks(
    n_chunks: int, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: has_tiles)
    hidden, weight, targets = problem(n_tokens=8192, vocab_size=256, width=8, share_ignored=0)
    h, w = narrow = [x.detach().to(torch.bfloat16).requires_grad_() for x in (hidden, weight)]
    nats = chunked_cross_entropy(h, w, targets, vocab_chunk=256 // n_chunks, reduction="mean")
    exact_h, exact_w = exact = [x.detach().float().requires_grad_() for x in narrow]
    truth = dense_cross_entropy(exact_h, exact_w, targets, reduction="mean")
    assert nats.dtype == torch.float32
    assert abs(nats.item() - truth.item()) < 1e-3 * truth.item()
    for gradient, true_gradient in zip(
        torch.autograd.grad(nats, narrow), torch.autograd.grad(truth, exact), strict=True
    ):
        assert gradient.dtype == torch.bfloat16
        error = (gradient.float() - true_gradient).norm() / true_gradient.norm()
        assert error < 3e-3


# BR-25
@pytest.mark.parametrize("target", [-4, -1, -101, 41, 48])
@each_loss
def test_target_outside_the_vocabulary_is_refused_with_its_place(target: int, loss: Loss) -> None:
    hidden, weight, targets = problem()
    targets[1, 3] = target
    with pytest.raises(TargetError, match=rf"target at \(1, 3\).*\[0, 41\).*got {target};") as got:
        loss(hidden, weight, targets, reduction="sum")
    assert isinstance(got.value, InputError)
    assert isinstance(got.value, ValueError)


@pytest.mark.parametrize(("vocab_chunk", "reduction"), [(0, "sum"), (-1, "sum"), (7, "average")])
def test_chunk_of_nothing_and_unknown_reduction_are_refused(vocab_chunk: int, reduction) -> None:
    with pytest.raises(InputError, match=r"vocab_chunk|reduction"):
        chunked_cross_entropy(*problem(), vocab_chunk=vocab_chunk, reduction=reduction)


def test_huge_scores_stay_finite() -> None:
    hidden, weight, targets = problem()
    nats = chunked_cross_entropy(hidden * 1e4, weight, targets, vocab_chunk=7, reduction="none")
    truth = dense_cross_entropy(hidden * 1e4, weight, targets, reduction="none")
    assert nats.isfinite().all()
    assert (nats - truth).abs().max() < 1e-8


def scaled_problem(*, at: float, spread: float, dtype: torch.dtype) -> Problem:
    """Scores of ``at`` plus or minus ``spread`` nats: all of them may lie where exp ends."""
    hidden, weight, targets = problem(n_tokens=24, vocab_size=41, width=8)
    with torch.no_grad():
        hidden[..., 0] = 1.0
        weight.mul_(spread / 3)
        weight[:, 0] += at
    narrow = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    return narrow[0], narrow[1], targets


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize(
    ("at", "spread"),
    # Sums from (75, 3) fit float32, but times a head of 75 they do not.
    [(0, 20), (75, 3), (95, 3), (-95, 3), (700, 3), (-2000, 3), (0, 300), (-60, 90)],
)
def test_scores_anywhere_keep_value_and_gradients(at: float, spread: float, reduction) -> None:
    inputs = scaled_problem(at=at, spread=spread, dtype=torch.float32)
    h, w = exact = [x.detach().double().requires_grad_() for x in inputs[:2]]
    truth = dense_cross_entropy(h, w, inputs[2], reduction=reduction)
    true_gradients = torch.autograd.grad(truth.sum(), exact)
    plain = dense_cross_entropy(*inputs, reduction=reduction)
    plain_gradients = torch.autograd.grad(plain.sum(), inputs[:2])
    nats = chunked_cross_entropy(*inputs, vocab_chunk=7, reduction=reduction)
    gradients = torch.autograd.grad(nats.sum(), inputs[:2])
    for value, other, true_value in zip(
        (nats, *gradients), (plain, *plain_gradients), (truth, *true_gradients), strict=True
    ):
        allowed = 2 * (other - true_value).norm() + 1e-6 * true_value.norm()
        assert (value - true_value).norm() <= allowed


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize(("at", "spread"), [(0, 3), (75, 3), (-95, 3), (700, 3), (-60, 90)])
def test_scores_anywhere_keep_value_and_gradients_in_bfloat16(
    at: float, spread: float, reduction, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: has_tiles)
    inputs = scaled_problem(at=at, spread=spread, dtype=torch.float32)
    h, w = narrow = [x.detach().bfloat16().requires_grad_() for x in inputs[:2]]
    exact_h, exact_w = exact = [x.detach().double().requires_grad_() for x in narrow]
    truth = dense_cross_entropy(exact_h, exact_w, inputs[2], reduction=reduction)
    nats = chunked_cross_entropy(h, w, inputs[2], vocab_chunk=7, reduction=reduction)
    pull = torch.linspace(0.5, 2.0, truth.numel()).view(truth.shape)
    gradients = torch.autograd.grad((nats * pull).sum(), narrow)
    true_gradients = torch.autograd.grad((truth * pull).sum(), exact)
    assert (nats - truth).norm() <= 1e-4 * truth.norm()
    # What all words have in common must cancel, though rounded probabilities leave some of it over.
    for value, true_value in zip(gradients, true_gradients, strict=True):
        assert (value.double() - true_value).norm() <= 5e-3 * true_value.norm()


def test_words_in_bfloat16_with_little_in_common_are_multiplied_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less their mean they would be rounded once more."""
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: True)
    _, weight, _ = scaled_problem(at=0, spread=3, dtype=torch.bfloat16)
    words = weight.detach()[:, 1:].contiguous()
    walk = scores.Scores(words, n_rows=6, vocab_chunk=41, dtype=torch.bfloat16, keep=True)
    slopes = torch.randn(6, 41, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.empty(6, words.shape[1])
    walk.descend_into(found, slopes, words, add=False)
    assert torch.equal(found, (slopes @ words).float())


def test_row_that_overflows_changes_no_bit_of_its_neighbours() -> None:
    hidden, weight, targets = scaled_problem(at=0, spread=3, dtype=torch.float32)
    targets = targets.clamp(min=0)
    with torch.no_grad():
        alone = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=7, reduction="none")
        hidden[1, 5] *= 1000
        beside = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=7, reduction="none")
    same = alone == beside
    assert not same[1, 5]
    assert same.sum() == targets.numel() - 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["hidden", "weight"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_what_is_not_finite_gives_a_loss_that_is_not(value: float, place: str, reduction) -> None:
    hidden, weight, targets = problem(share_ignored=0)
    with torch.no_grad():
        (hidden[0, 3] if place == "hidden" else weight[5])[2] = value
    nats = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=7, reduction=reduction)
    assert not nats.sum().isfinite()
    with torch.no_grad():
        nats = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=7, reduction=reduction)
    assert not nats.sum().isfinite()


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone_is_the_same(wanted: int, reduction) -> None:
    inputs = problem()
    both = chunked_cross_entropy(*inputs, vocab_chunk=7, reduction=reduction).sum()
    h, w = frozen = [x.detach() for x in inputs[:2]]
    frozen[wanted].requires_grad_()
    alone = chunked_cross_entropy(h, w, inputs[2], vocab_chunk=7, reduction=reduction).sum()
    gradient = torch.autograd.grad(alone, frozen[wanted])[0]
    assert torch.equal(gradient, torch.autograd.grad(both, inputs[:2])[wanted])


def test_blocks_of_tokens_are_joined() -> None:
    exact = problem(n_tokens=1300, vocab_size=300)
    h, w = narrow = [x.detach().float().requires_grad_() for x in exact[:2]]
    truth = truth_of(*exact, "sum")
    true_gradients = torch.autograd.grad(truth, exact[:2])
    distances = []
    for loss in (dense_cross_entropy, functools.partial(chunked_cross_entropy, vocab_chunk=64)):
        nats = loss(h, w, exact[2], reduction="sum")
        assert nats.item() == pytest.approx(truth.item(), rel=1e-6)
        gradients = torch.autograd.grad(nats, narrow)
        distances.append(
            [
                float((mine - true).norm() / true.norm())
                for mine, true in zip(gradients, true_gradients, strict=True)
            ]
        )
    plain, chunked = distances
    assert all(mine <= 1.2 * other for mine, other in zip(chunked, plain, strict=True))


def test_checkpointed_and_repeated_backward_gives_the_same_bits() -> None:
    hidden, weight, targets = problem()

    def nats(h: Tensor, w: Tensor) -> Tensor:
        return chunked_cross_entropy(h, w, targets, vocab_chunk=7, reduction="sum")

    plain = nats(hidden, weight)
    first = torch.autograd.grad(plain, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(plain, (hidden, weight))
    wrapped = checkpoint(lambda h, w: nats(h * 1, w), hidden, weight, use_reentrant=False)
    assert isinstance(wrapped, Tensor)
    inside = torch.autograd.grad(wrapped, (hidden, weight))
    for gradient, second, third in zip(first, again, inside, strict=True):
        assert torch.equal(gradient, second)
        assert torch.equal(gradient, third)


class Products(TorchDispatchMode):
    """Counts the multiplications of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("reduction", "n_products"), [("sum", 3), ("mean", 3), ("none", 4)])
def test_a_gradient_takes_three_products_and_a_value_one(reduction, n_products: int) -> None:
    hidden, weight, targets = problem(share_ignored=0)
    one = hidden.numel() * len(weight)
    with Products() as counted:
        nats = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=7, reduction=reduction)
        nats.sum().backward()
    with Products() as valued, torch.no_grad():
        chunked_cross_entropy(hidden, weight, targets, vocab_chunk=7, reduction=reduction)
    assert counted.multiplications == n_products * one
    assert valued.multiplications == one


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_the_scores_of_512_tokens() -> None:
    N, V = 2048, 1000
    hidden, weight, targets = problem(n_tokens=N, vocab_size=V, share_ignored=0)
    with LargestTensor() as chunked:
        nats = chunked_cross_entropy(hidden, weight, targets, vocab_chunk=64, reduction="sum")
        nats.backward()
    with LargestTensor() as forward_only, torch.no_grad():
        chunked_cross_entropy(hidden, weight, targets, vocab_chunk=64, reduction="sum")
    with LargestTensor() as dense:
        dense_cross_entropy(hidden, weight, targets, reduction="sum").backward()
    line = 16  # one row is filled up to whole cache lines, and has one more
    assert 512 * V < chunked.elements <= 512 * (V + 2 * line)
    assert forward_only.elements <= 512 * (64 + 2 * line)
    assert dense.elements == N * V


def test_bfloat16_exponentials_of_a_cpu_with_tiles_take_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: True)
    weight = torch.zeros(50_000, 8)
    kept = {"n_rows": 4096, "vocab_chunk": 2048, "keep": True}
    narrow = scores.Scores(weight, dtype=torch.bfloat16, **kept)
    plain = scores.Scores(weight, dtype=torch.float32, **kept)
    assert (narrow.block_rows, plain.block_rows) == (1024, 512)
    assert narrow.table.nbytes == plain.table.nbytes


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 41, 64])
def test_memory_that_was_used_before_reaches_no_gradient(
    vocab_size: int, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: has_tiles)
    hidden, weight, targets = problem(n_tokens=200, vocab_size=vocab_size, width=64)
    h, w = inputs = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        nats = chunked_cross_entropy(h, w, targets, vocab_chunk=64, reduction="sum")
        gradients = torch.autograd.grad(nats, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in (nats, *gradients))


@pytest.mark.parametrize("has_tiles", [False, True])
def test_gradient_of_a_sure_token_in_bfloat16_is_no_remainder(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: has_tiles)
    weight = torch.eye(16)
    hidden = 12 * weight[:8]  # the target of each has all but 1e-4 of the probability
    h, w = inputs = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    nats = chunked_cross_entropy(h, w, torch.arange(8), vocab_chunk=4, reduction="sum")
    exact_h, exact_w = exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = dense_cross_entropy(exact_h, exact_w, torch.arange(8), reduction="sum")
    for x, y in zip(
        torch.autograd.grad(nats, inputs), torch.autograd.grad(truth, exact), strict=True
    ):
        assert (x.double() - y).norm() < 0.01 * y.norm()


def test_half_types_meet_over_float32_weights() -> None:
    hidden, weight, targets = problem(n_tokens=64)
    truth = truth_of(hidden, weight, targets, "mean")
    head = weight.detach().float().requires_grad_()
    states = hidden.detach().to(torch.bfloat16).requires_grad_()
    arguments = {"vocab_chunk": 7, "reduction": "mean"}
    outside = chunked_cross_entropy(states, head, targets, **arguments)
    plain = dense_cross_entropy(states, head, targets, reduction="mean")
    assert outside.item() == pytest.approx(plain.item(), rel=1e-6)
    with autocast(torch.device("cpu"), "bfloat16"):
        inside = chunked_cross_entropy(states, head, targets, **arguments)
        dense = dense_cross_entropy(states, head, targets, reduction="mean")
    gradients = torch.autograd.grad(inside, (states, head))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
    assert outside.dtype == inside.dtype == dense.dtype == torch.float32
    assert abs(outside.item() - truth.item()) < 5e-3 * truth.item()
    assert abs(inside.item() - truth.item()) <= abs(dense.item() - truth.item()) + 1e-3
