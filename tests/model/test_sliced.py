"""Do blocks that share buffers of keys compute what a written-down mask says, forward and back?"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from canvaslm.model import attention, sliced
from canvaslm.model.attention import (
    block_causal_attention,
    canvas_attention,
    causal_attention,
)
from oracles import block_causal_mask, causal_mask, masked_softmax_attention

L, C = 4, 3
T = C * L
EPS = {torch.float64: 1e-12, torch.float32: 2e-6}


@pytest.fixture(params=["products", "library"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs with the probabilities kept, and through the kernel that keeps none."""
    monkeypatch.setattr(sliced, "_KEPT", 1000 if request.param == "products" else 0)
    monkeypatch.setattr(attention, "_MANY_SCORES", 0)
    return request.param


def draw(B: int, n_heads: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Heads (B, n_heads, n, 8) that lie in memory as a projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(B, n, n_heads, 8, generator=generator, dtype=torch.float64)
    return draws.to(dtype).transpose(1, 2).requires_grad_()


def two_streams(H: int, K: int, start: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    clean = start + T
    return [draw(2, n, m, i, dtype) for i, (n, m) in enumerate([(H, T), (K, T), (K, T)])] + [
        draw(2, K, clean, 7, dtype),
        draw(2, K, clean, 8, dtype),
    ]


def sees(start: int) -> Tensor:
    """For noisy queries: the clean keys, then the noisy ones."""
    canvas = torch.arange(T) // L
    clean = torch.arange(start + T)[None] < start + canvas[:, None] * L
    return torch.cat((clean, canvas[:, None] == canvas[None]), dim=1)


def masked_two_streams(
    q: Tensor, k: Tensor, v: Tensor, clean_k: Tensor, clean_v: Tensor, start: int
) -> Tensor:
    keys, values = torch.cat((clean_k, k), dim=2), torch.cat((clean_v, v), dim=2)
    return masked_softmax_attention(q, keys, values, sees(start))


def pulled(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    pull = torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, pull)]


def assert_close(found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> None:
    for x, y in zip(found, truth, strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).abs().max() < EPS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize(("H", "K"), [(1, 1), (3, 1), (4, 2), (2, 2)])
def test_two_streams_equal_their_mask(H: int, K: int, start: int, dtype: torch.dtype) -> None:
    inputs = two_streams(H, K, start, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = pulled(canvas_attention(*inputs, canvas_tokens=L, start=start), inputs)
    assert_close(found, pulled(masked_two_streams(*exact, start=start), exact), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize(("H", "K"), [(3, 1), (4, 2)])
def test_one_stream_equals_its_mask(H: int, K: int, start: int, dtype: torch.dtype) -> None:
    inputs = [draw(2, n, m, n, dtype) for n, m in [(H, T), (K, start + T), (K, start + T)]]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = pulled(block_causal_attention(*inputs, canvas_tokens=L), inputs)
    truth = masked_softmax_attention(*exact, seen=block_causal_mask(T, start + T, L))
    assert_close(found, pulled(truth, exact), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n_tokens", [2, 12, 13, 23])
def test_causal_blocks_equal_their_mask_whatever_is_left_for_the_last(
    n_tokens: int, dtype: torch.dtype
) -> None:
    inputs = [draw(2, n, n_tokens, n, dtype) for n in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = pulled(causal_attention(*inputs), inputs)
    truth = masked_softmax_attention(*exact, seen=causal_mask(n_tokens, n_tokens))
    assert_close(found, pulled(truth, exact), dtype)


def test_rows_of_the_batch_do_not_depend_on_what_goes_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = two_streams(4, 2, 7)
    together = pulled(canvas_attention(*inputs, canvas_tokens=L, start=7), inputs)
    monkeypatch.setattr(sliced, "_SCORES", 1)
    apart = pulled(canvas_attention(*inputs, canvas_tokens=L, start=7), inputs)
    assert all(torch.equal(x, y) for x, y in zip(together, apart, strict=True))


def test_last_part_of_the_batch_may_have_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "_SCORES", 2 * 4 * L * T)  # two rows go together
    inputs = [draw(5, n, T, i) for i, n in enumerate([4, 2, 2, 2, 2])]
    found = pulled(canvas_attention(*inputs, canvas_tokens=L, start=0), inputs)
    assert_close(found, pulled(masked_two_streams(*inputs, start=0), inputs), torch.float64)


def test_order_in_memory_changes_nothing() -> None:
    inputs = two_streams(4, 2, 0)
    others = [x.detach().contiguous().requires_grad_() for x in inputs]
    found = pulled(canvas_attention(*inputs, canvas_tokens=L, start=0), inputs)
    again = pulled(canvas_attention(*others, canvas_tokens=L, start=0), others)
    assert all((x - y).abs().max() < 1e-14 for x, y in zip(found, again, strict=True))


def rotten(x: Tensor, canvas: int) -> Tensor:
    """The same with NaN in one canvas."""
    spoilt = x.detach().clone()
    spoilt[:, :, canvas * L : (canvas + 1) * L] = torch.nan
    return spoilt.requires_grad_()


@pytest.mark.parametrize("canvas", range(C))
def test_nan_in_clean_keys_reaches_the_canvases_that_see_them_and_no_other(canvas: int) -> None:
    q, k, v, clean_k, clean_v = two_streams(4, 2, 0)
    inputs = [q, k, v, rotten(clean_k, canvas), rotten(clean_v, canvas)]
    output = canvas_attention(*inputs, canvas_tokens=L, start=0)
    unseen = (canvas + 1) * L
    assert output[:, :, :unseen].isfinite().all()
    assert output[:, :, unseen:].isnan().all()
    if unseen == T:  # nobody sees the last clean canvas, so nothing of it is in any gradient
        for gradient in torch.autograd.grad(output.sum(), inputs):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("canvas", range(C))
def test_nan_in_noisy_keys_stays_in_their_canvas(canvas: int) -> None:
    q, k, v, clean_k, clean_v = two_streams(4, 2, 0)
    inputs = [q, rotten(k, canvas), rotten(v, canvas), clean_k, clean_v]
    output = canvas_attention(*inputs, canvas_tokens=L, start=0)
    own = torch.arange(T) // L == canvas
    assert output[:, :, own].isnan().all()
    assert output[:, :, ~own].isfinite().all()
    d_q, d_k, d_v, d_clean_k, _ = torch.autograd.grad(output.sum(), inputs)
    for gradient in (d_q, d_k, d_v):
        assert gradient[:, :, ~own].isfinite().all()
    assert d_clean_k[:, :, : canvas * L].isnan().all()
    assert d_clean_k[:, :, canvas * L :].isfinite().all()


@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("casts", [True, False])
def test_bfloat16_heads_lose_no_more_than_their_own_rounding(
    casts: bool, has_tiles: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced, "multiplies_in_tiles", lambda: has_tiles)
    inputs = two_streams(4, 2, 7, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        found = pulled(canvas_attention(*inputs, canvas_tokens=L, start=7), inputs)
    truth = pulled(masked_two_streams(*exact, start=7), exact)
    for x, y in zip(found, truth, strict=True):
        assert x.dtype == torch.bfloat16
        # The library's backward pass reads the rounded result again.
        more = 1e-5 if kernel == "products" else 2**-7 * y.abs().max()
        assert ((x.double() - y).abs() <= 2**-8 * y.abs() + more).all()


@pytest.mark.parametrize("has_tiles", [True, False])
def test_one_stream_in_bfloat16_loses_no_more_than_its_own_rounding(
    has_tiles: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced, "multiplies_in_tiles", lambda: has_tiles)
    inputs = [draw(2, n, m, n, torch.bfloat16) for n, m in [(4, T), (2, 8 + T), (2, 8 + T)]]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = pulled(block_causal_attention(*inputs, canvas_tokens=L), inputs)
    seen = block_causal_mask(T, 8 + T, L)
    for x, y in zip(found, pulled(masked_softmax_attention(*exact, seen=seen), exact), strict=True):
        assert x.dtype == torch.bfloat16
        more = 1e-5 if kernel == "products" else 2**-7 * y.abs().max()
        assert ((x.double() - y).abs() <= 2**-8 * y.abs() + more).all()


def test_causal_window_in_bfloat16_is_rounded_once() -> None:
    inputs = [draw(2, n, T, n, torch.bfloat16) for n in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pulled(causal_attention(*inputs), inputs)
    truth = pulled(masked_softmax_attention(*exact, seen=causal_mask(T, T)), exact)
    for x, y in zip(found, truth, strict=True):
        assert x.dtype == torch.bfloat16
        assert ((x.double() - y).abs() <= 2**-8 * y.abs() + 1e-5).all()


def test_recomputed_pass_leaves_the_same_gradients() -> None:
    inputs = two_streams(4, 2, 0)

    def attend(*tensors: Tensor) -> Tensor:
        return canvas_attention(*tensors, canvas_tokens=L, start=0)

    plain = pulled(attend(*inputs), inputs)
    output: Tensor = checkpoint(attend, *inputs, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
    for x, y in zip(plain, pulled(output, inputs), strict=True):
        assert torch.equal(x, y)


def test_context_without_gradient_leaves_the_others_theirs() -> None:
    inputs = two_streams(4, 2, 0)
    plain = pulled(canvas_attention(*inputs, canvas_tokens=L, start=0), inputs)
    q, k, v, clean_k, clean_v = inputs
    output = canvas_attention(q, k, v, clean_k.detach(), clean_v.detach(), canvas_tokens=L, start=0)
    for x, y in zip(plain[:4], pulled(output, inputs[:3]), strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def kept_elements() -> Iterator[list[int]]:
    """Elements of all tensors that autograd is given to keep."""
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def test_long_windows_keep_no_more_for_a_token_than_short_ones(
    kept_elements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the product's own limits
    for_a_token = []
    for n_canvases in (8, 64):
        n = n_canvases * 64
        q, k, v, clean_k, clean_v = (draw(1, heads, n, 1) for heads in (2, 1, 1, 1, 1))
        kept_elements.clear()
        canvas_attention(q, k, v, clean_k, clean_v, canvas_tokens=64, start=0)
        for_a_token.append(sum(kept_elements) / n)
    assert for_a_token[1] == for_a_token[0]


def test_short_windows_keep_their_probabilities(kept_elements: list[int], kernel: str) -> None:
    inputs = [x.detach().requires_grad_() for x in two_streams(4, 2, 0)]
    canvas_attention(*inputs, canvas_tokens=L, start=0)
    probabilities = sum(2 * 4 * L * (b + 1) * L for b in range(C))
    given = sum(x.numel() for x in inputs)
    per_query = inputs[0].numel() + 2 * 4 * T  # what was taken, and a log-sum-exp
    assert sum(kept_elements) == given + (probabilities if kernel == "products" else per_query)
