"""Is a packed copy of the weights the same network?"""

import pytest
import torch
from torch import Tensor

from canvaslm.device import autocast
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import KVCache
from canvaslm.model.packed import PackedBackbone, decoding_dtype

FLOAT64_TOLERANCE = 1e-12


def decode(model: Backbone, batch, pieces: list[int]) -> Tensor:
    """Hidden states of clean pieces and of a noisy canvas behind them, (B, T + L, D)."""
    L, n_clean = model.layout.canvas_tokens, sum(pieces)
    cache = KVCache.for_model(model, 3, n_clean + L)
    parts = [
        model.encode(ids, cache=cache).hidden for ids in batch.clean[:, :n_clean].split(pieces, 1)
    ]
    has_guess = None if model.self_conditioning is None else batch.has_guess
    guess = None if model.self_conditioning is None else batch.guess[:, :L]
    noisy, times = batch.noisy[:, :L], batch.times[:, :1]
    parts.append(model.denoise(noisy, times, context=cache, guess=guess, has_guess=has_guess))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"qk_norm": True},
        {"n_kv_heads": 4, "n_heads": 4},
        {"n_kv_heads": 1, "n_heads": 3, "self_conditioning": "input"},
        {"time_width": 0, "self_conditioning": "off"},
    ],
)
@pytest.mark.parametrize(("pieces", "clean_mask"), [([5, 1, 1], "causal"), ([8, 4], "block")])
def test_packed_weights_give_the_same_hidden_states(
    changes: dict[str, object],
    pieces: list[int],
    clean_mask: str,
    build_model,
    batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model(clean_mask=clean_mask, **changes)
    with torch.no_grad():
        packed = decode(model, batch, pieces)
        monkeypatch.setattr(KVCache, "pack", lambda self, model: None)
        plain = decode(model, batch, pieces)
    assert not torch.equal(packed, plain), "both ways were the same way"
    assert (packed - plain).abs().max() < FLOAT64_TOLERANCE * plain.abs().max()


def test_in_float32_it_is_no_further_from_float64_than_the_plain_blocks_are(
    build_model, batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(self_conditioning="off")
    with torch.no_grad():
        truth = decode(model, batch, [7, 1])
        packed = decode(model.float(), batch, [7, 1])
        monkeypatch.setattr(KVCache, "pack", lambda self, model: None)
        plain = decode(model, batch, [7, 1])
    far, reference = ((form - truth).abs().max() for form in (packed, plain))
    assert packed.dtype == torch.float32
    assert far < 2 * reference


@pytest.mark.parametrize("has_tiles", [False, True])
def test_bfloat16_weights_are_read_in_the_type_that_is_fastest(
    has_tiles: bool, build_model, batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_tiles)
    model = build_model(self_conditioning="off").bfloat16()
    exact = torch.bfloat16 if has_tiles else torch.float32
    assert decoding_dtype(model.head_weight) == exact
    assert decoding_dtype(model.head_weight.float()) == torch.float32
    with torch.no_grad():
        rounded = decode(model, batch, [7, 1])
        truth = decode(model.double(), batch, [7, 1])
    gap = float((rounded - truth).abs().max() / truth.abs().max())
    assert gap < (0.05 if has_tiles else 0.02)


@pytest.mark.parametrize("casts", [False, True])
def test_the_clean_stream_stops_at_the_last_keys(casts: bool, build_model, batch) -> None:
    model = build_model().float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        caches = [KVCache.for_model(model, 3, 12) for _ in range(2)]
        for cache in caches:
            cache._keys.fill_(torch.nan)
            cache._values.fill_(torch.nan)
        for ids in batch.clean[:, :7].split([4, 3], 1):
            whole = model.encode(ids, cache=caches[0])
            kept = model.encode_context(ids, cache=caches[1])
            for layer in range(model.params.n_layers):
                assert all(map(torch.equal, whole.keys_values(layer), kept.keys_values(layer)))
        assert (caches[1].pack(model) is None) == casts
    assert caches[0].length == caches[1].length == 7
    for layer in range(model.params.n_layers):
        assert all(map(torch.equal, *(cache.keys_values(layer) for cache in caches)))


def test_weights_are_packed_once_for_a_cache_and_not_under_autocast(build_model, batch) -> None:
    model = build_model().float()
    cache = KVCache.for_model(model, 3, 16)
    model.encode(batch.clean[:, :4], cache=cache)
    packed = cache.pack(model)
    assert isinstance(packed, PackedBackbone)
    model.encode(batch.clean[:, 4:8], cache=cache)
    assert cache.pack(model) is packed
    assert cache.some_rows(torch.tensor([1]), room=4).pack(model) is packed
    with autocast(torch.device("cpu"), "bfloat16"):
        other = KVCache.for_model(model, 3, 16)
        assert model.encode(batch.clean[:, :4], cache=other).hidden.isfinite().all()
        assert other.pack(model) is None


def test_a_forward_leaves_what_it_was_given(build_model, batch) -> None:
    model = build_model(time_width=0, self_conditioning="off")
    before = [parameter.clone() for parameter in model.parameters()]
    decode(model, batch, [3, 1])
    assert all(map(torch.equal, before, model.parameters()))
    stream = torch.randn(2, 3, 24, dtype=torch.float64)
    given = stream.clone()
    packed = PackedBackbone(model, 3)
    packed.run(stream, [range(stream.shape[1])], lambda layer, q, k, v: q)
    assert torch.equal(stream, given)
