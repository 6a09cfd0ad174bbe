"""Do the pieces of a block keep their precision and their meaning?"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model

from canvaslm.device import autocast
from canvaslm.model.kv_cache import KVCache
from canvaslm.model.layers import FeedForward, RMSNorm, Rotation, TimeEmbedding
from canvaslm.model.shape import ModelParams


def rotation(params: ModelParams, *, start: int = 0, length: int = 1) -> Rotation:
    return Rotation(
        [range(start, start + length)], params, dtype=torch.float32, device=torch.device("cpu")
    )


def true_angles(params: ModelParams, length: int) -> torch.Tensor:
    half = params.head_width // 2
    speeds = [params.rope_base ** (-i / half) for i in range(half)]
    return torch.tensor([[p * s for s in speeds] for p in range(length)], dtype=torch.float64)


@pytest.fixture
def wide_heads(tiny_params: ModelParams) -> ModelParams:
    return tiny_params.model_copy(update={"head_width": 64, "rope_base": 10000.0})


def test_a_score_depends_only_on_the_distance(wide_heads: ModelParams) -> None:
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(1))

    def score(q_at: int, k_at: int) -> float:
        turned_q = rotation(wide_heads, start=q_at)(q)
        return float((turned_q * rotation(wide_heads, start=k_at)(k)).sum())

    assert score(5, 2) == pytest.approx(score(4005, 4002), abs=1e-4)
    assert abs(score(5, 2) - score(6, 2)) > 1e-2


def test_rotary_tables_match_float64_at_position_4095(wide_heads: ModelParams) -> None:
    tables, truth = rotation(wide_heads, length=4096), true_angles(wide_heads, 4096)
    assert (tables.cos - truth.cos()).abs().max() < 1e-6
    assert (tables.sin - truth.sin()).abs().max() < 1e-6


# BR-33
def test_positions_256_and_257_differ_after_a_cast_to_bfloat16_and_a_reload(
    build_model, tmp_path: Path
) -> None:
    model = build_model().to(torch.bfloat16)
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(model, str(tmp_path / "model.safetensors"), strict=True)
    assert not list(model.buffers())  # nothing that a cast could round or a file could lack
    seen: list[Rotation] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model.encode(torch.zeros(1, 258, dtype=torch.int64))
    truth = true_angles(model.params, 258)
    assert seen[0].cos.dtype == torch.float32
    assert (seen[0].cos - truth.cos()).abs().max() < 1e-4
    assert (seen[0].sin - truth.sin()).abs().max() < 1e-4
    assert not torch.equal(seen[0].cos[256], seen[0].cos[257])


def test_norm_of_bfloat16_is_the_rounded_norm_of_float32() -> None:
    norm = RMSNorm(48, 1e-5)
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(norm(x), exact.float().to(torch.bfloat16))


def test_feed_forward_gates_with_silu(tiny_params: ModelParams) -> None:
    layer = FeedForward(tiny_params).double()
    x = torch.randn(3, tiny_params.width, dtype=torch.float64)
    gate = layer.gate(x)
    assert torch.allclose(layer(x), layer.down(gate / (1 + (-gate).exp()) * layer.up(x)))


def test_neighbouring_times_have_different_features(tiny_params: ModelParams) -> None:
    layer = TimeEmbedding(tiny_params.model_copy(update={"time_width": 64})).double()
    embedded = layer(torch.arange(65, dtype=torch.float64)[None] / 64)[0]
    distances = torch.cdist(embedded, embedded) + torch.eye(65) * 9
    assert distances.min() > 1e-3


# BR-33
def test_rotary_tables_stay_exact_under_autocast_and_behind_a_cache(build_model) -> None:
    model = build_model().float()
    seen: list[Rotation] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    with autocast(torch.device("cpu"), "bfloat16"):
        model.encode(torch.zeros(1, 258, dtype=torch.int64))
        cache = KVCache.for_model(model, 1, 258)
        model.encode(torch.zeros(1, 256, dtype=torch.int64), cache=cache)
        model.encode(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    truth = true_angles(model.params, 258)
    for tables, first in ((seen[0], 0), (seen[2], 256)):
        assert tables.cos.dtype == torch.float32
        assert (tables.cos - truth[first:].cos()).abs().max() < 1e-4
        assert (tables.sin - truth[first:].sin()).abs().max() < 1e-4
    assert not torch.equal(seen[2].cos[0], seen[2].cos[1])
