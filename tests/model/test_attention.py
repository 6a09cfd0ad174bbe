"""Does each path without a mask equal the same attention under a written-down mask?"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from canvaslm.layout import Layout
from canvaslm.model import attention
from canvaslm.model.attention import (
    block_causal_attention,
    canvas_attention,
    causal_attention,
    masked_attention,
)
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from oracles import (
    block_causal_mask,
    causal_mask,
    masked_softmax_attention,
    two_stream_mask,
)

Tensors = tuple[Tensor, Tensor, Tensor]
T, L = 12, 4


def heads(n_queries: int, n_keys: int, *, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(1)

    def draw(n_heads: int, n_tokens: int) -> Tensor:
        draws = torch.randn(2, n_heads, n_tokens, 8, generator=generator, dtype=torch.float64)
        return draws.to(dtype).requires_grad_()

    return draw(4, n_queries), draw(2, n_keys), draw(2, n_keys)


def two_streams(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs of 2T tokens, noisy before clean, by the product's functions."""
    clean_k, clean_v = k[:, :, T:], v[:, :, T:]
    noisy = canvas_attention(
        q[:, :, :T], k[:, :, :T], v[:, :, :T], clean_k, clean_v, canvas_tokens=L, start=0
    )
    return torch.cat((noisy, causal_attention(q[:, :, T:], clean_k, clean_v)), dim=2)


def block_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return block_causal_attention(q, k, v, canvas_tokens=L)


def decoded_canvas(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One canvas after a prefix of 7 clean tokens, which is not a whole number of canvases."""
    return canvas_attention(
        q, k[:, :, 7:], v[:, :, 7:], k[:, :, :7], v[:, :, :7], canvas_tokens=L, start=7
    )


PATHS = {
    "causal": (causal_attention, causal_mask(T, T)),
    "causal after a cache": (causal_attention, causal_mask(5, T)),
    "one causal token": (causal_attention, causal_mask(1, T)),
    "block causal": (block_causal, block_causal_mask(T, T, L)),
    "block causal after a cache": (block_causal, block_causal_mask(L, T, L)),
    "two streams": (two_streams, two_stream_mask(T, L, "causal")),
    "one canvas after 7 clean tokens": (decoded_canvas, torch.ones(L, 7 + L, dtype=torch.bool)),
}
each_path = pytest.mark.parametrize(("attend", "seen"), PATHS.values(), ids=PATHS.keys())
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@each_path
def test_each_path_equals_its_mask(attend: Attend, seen: Tensor) -> None:
    inputs = heads(*seen.shape)
    output, truth = attend(*inputs), masked_softmax_attention(*inputs, seen)
    assert (output - truth).abs().max() < 1e-12
    pull = torch.randn(truth.shape, generator=torch.Generator().manual_seed(3)).double()
    gradients = torch.autograd.grad(output, inputs, pull)
    for gradient, true_gradient in zip(
        gradients, torch.autograd.grad(truth, inputs, pull), strict=True
    ):
        assert (gradient - true_gradient).abs().max() < 1e-12


@each_path
def test_each_path_stays_within_1e_6_of_its_mask_in_float32(attend: Attend, seen: Tensor) -> None:
    inputs = heads(seen.shape[0], seen.shape[1], dtype=torch.float32)
    q, k, v = (x.double() for x in inputs)
    truth = masked_softmax_attention(q, k, v, seen)
    assert (attend(*inputs) - truth).abs().max() < 1e-6


# BR-30
@each_path
def test_only_a_forbidden_key_leaves_a_query_bit_equal(attend: Attend, seen: Tensor) -> None:
    with torch.no_grad():
        q, k, v = heads(*seen.shape)
        before = attend(q, k, v)
        for key in range(seen.shape[1]):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, key] += 1
            other_v[:, :, key] += 1
            after = attend(q, other_k, other_v)
            for query in range(seen.shape[0]):
                unmoved = torch.equal(before[:, :, query], after[:, :, query])
                assert unmoved != bool(seen[query, key]), (query, key)


# BR-31
def test_rule_says_which_canvas_sees_which() -> None:
    assert block_causal_mask(6, 6, 2).sum(1).tolist() == [2, 2, 4, 4, 6, 6]
    noisy_rows = two_stream_mask(6, 2, "causal")[:6]
    assert noisy_rows.sum(1).tolist() == [2, 2, 4, 4, 6, 6]
    assert noisy_rows[:, 6:].sum(1).tolist() == [0, 0, 2, 2, 4, 4]  # clean keys: strictly before


# BR-31
def test_mask_that_leaks_is_told_apart() -> None:
    q, k, v = heads(2 * T, 2 * T)
    leaking = masked_softmax_attention(q, k, v, two_stream_mask(T, L, "causal", leaks=True))
    assert (two_streams(q, k, v) - leaking)[:, :, :T].abs().max() > 1e-2


# BR-32
def test_queries_in_several_chunks_sit_on_the_last_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERY_ROWS", 2)
    q, k, v = heads(5, T)
    truth = masked_softmax_attention(q, k, v, causal_mask(5, T))
    assert (causal_attention(q, k, v) - truth).abs().max() < 1e-12


# BR-29
def test_mask_of_numbers_is_refused() -> None:
    q, k, v = heads(T, T)
    with pytest.raises(TypeError, match="expected a bool mask"):
        masked_attention(q, k, v, torch.ones(T, T).tril())


# BR-27
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_query_that_sees_nothing_gets_zeros_and_finite_gradients(backend: SDPBackend) -> None:
    seen = causal_mask(T, T)
    seen[3] = False
    inputs = heads(T, T)
    with sdpa_kernel(backend):
        output = masked_attention(*inputs, seen)
    truth = masked_softmax_attention(*inputs, seen)
    assert (output - truth).abs().max() < 1e-12
    assert not output[:, :, 3].any()
    for gradient in torch.autograd.grad(output.sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("start", [0, 4, 7])
def test_block_masks_of_the_fused_path_say_the_same(start: int) -> None:
    clean = start + T - L
    q, k, v = heads(T, clean + T)
    mask = attention._block_mask("canvas", T, clean + T, L, start, torch.device("cpu"))
    fused = flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask, enable_gqa=True)
    plain = canvas_attention(
        q,
        k[:, :, clean:],
        v[:, :, clean:],
        k[:, :, :clean],
        v[:, :, :clean],
        canvas_tokens=L,
        start=start,
    )
    assert (fused - plain).abs().max() < 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("start", [0, 8])
def test_block_causal_block_mask_of_the_fused_path_says_the_same(start: int) -> None:
    q, k, v = heads(T, start + T)
    mask = attention._block_mask("block_causal", T, start + T, L, start, torch.device("cpu"))
    fused = flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask, enable_gqa=True)
    assert (fused - block_causal(q, k, v)).abs().max() < 1e-12


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("clean_mask", ["causal", "block"])
def test_no_tensor_grows_with_the_square_of_the_window(clean_mask: str, tiny_params) -> None:
    layout = Layout(canvas_tokens=64, canvases_per_window=8, vocab_size=5)
    params = ModelParams.model_validate({**tiny_params.model_dump(), "clean_mask": clean_mask})
    model = Backbone(params, layout)
    ids = torch.zeros(1, layout.window_tokens, dtype=torch.int64)
    with LargestTensor() as largest:
        encoded = model.encode(ids)
        hidden = model.denoise(
            ids, torch.ones(1, 8), context=encoded, guess=None, has_guess=None
        ) + model.denoise_one_stream(ids, torch.ones(1, 8), guess=None, has_guess=None)
        hidden.sum().backward()
    assert largest.elements < layout.window_tokens**2 / 8


# BR-31
def test_weights_of_the_product_fall_on_two_four_and_six_keys() -> None:
    """L = 6 in canvases of two: equal scores leave a weight on each key that is seen."""
    q, k = torch.zeros(2, 1, 1, 6, 12, dtype=torch.float64)
    noisy_v = torch.eye(6, 12, dtype=torch.float64)[None, None]
    clean_v = noisy_v.roll(6, -1)
    one_stream = block_causal_attention(q, k, noisy_v, canvas_tokens=2)[0, 0] > 0
    assert one_stream.sum(1).tolist() == [2, 2, 4, 4, 6, 6]
    two_streams = canvas_attention(q, k, noisy_v, k, clean_v, canvas_tokens=2, start=0)[0, 0] > 0
    assert two_streams.sum(1).tolist() == [2, 2, 4, 4, 6, 6]
    assert two_streams[:, 6:].sum(1).tolist() == [0, 0, 2, 2, 4, 4]  # clean: strictly before
