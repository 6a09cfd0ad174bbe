"""Is a cached prefix the same as no cache, and are its unwritten slots never read?"""

import pytest
import torch
from torch import Tensor

from canvaslm.device import autocast
from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Encoded, KVCache

FLOAT64_TOLERANCE = 1e-12


def denoise_canvas(model: Backbone, cache: KVCache, batch, b: int) -> Tensor:
    L = model.layout.canvas_tokens
    own = slice(b * L, (b + 1) * L)
    return model.denoise(
        batch.noisy[:, own],
        batch.times[:, b : b + 1],
        context=cache,
        guess=batch.guess[:, own],
        has_guess=batch.has_guess,
    )


def decode_window(model: Backbone, cache: KVCache, batch) -> Tensor:
    """Hidden states of the noisy canvases (B, T, D), each before its clean copy is appended."""
    L = model.layout.canvas_tokens
    parts = []
    for b in range(model.layout.canvases_per_window):
        parts.append(denoise_canvas(model, cache, batch, b))
        model.encode(batch.clean[:, b * L : (b + 1) * L], cache=cache)
    return torch.cat(parts, dim=1)


# BR-32
@pytest.mark.parametrize("pieces", [[10], [7, 3], [1] * 10, [2, 5, 3]])
def test_pieces_with_a_cache_equal_one_call_without(pieces: list[int], build_model, batch) -> None:
    model = build_model()
    cache = KVCache.for_model(model, 3, 12)
    parts = [model.encode(ids, cache=cache).hidden for ids in batch.clean[:, :10].split(pieces, 1)]
    whole = model.encode(batch.clean[:, :10])
    assert (torch.cat(parts, 1) - whole.hidden).abs().max() < FLOAT64_TOLERANCE
    assert cache.length == 10
    for layer in range(model.params.n_layers):
        for cached, kept in zip(cache.keys_values(layer), whole.keys_values(layer), strict=True):
            assert (cached - kept).abs().max() < FLOAT64_TOLERANCE


@pytest.mark.parametrize("clean_mask", ["causal", "block"])
@pytest.mark.parametrize("site", ["input", "output"])
def test_decoding_over_a_cache_equals_the_whole_window(
    clean_mask: str, site: str, build_model, batch
) -> None:
    model = build_model(clean_mask=clean_mask, self_conditioning=site)
    with torch.no_grad():
        whole = model.denoise(
            batch.noisy,
            batch.times,
            context=model.encode(batch.clean),
            guess=batch.guess,
            has_guess=batch.has_guess,
        )
        decoded = decode_window(model, KVCache.for_model(model, 3, 16), batch)
    assert (decoded - whole).abs().max() < FLOAT64_TOLERANCE


# BR-28
def test_what_lies_in_unwritten_slots_changes_no_bit(build_model, batch) -> None:
    model = build_model()
    outputs = []
    for rubbish in (0.0, torch.nan):
        cache = KVCache.for_model(model, 3, 20)
        cache._keys.fill_(rubbish)
        cache._values.fill_(rubbish)
        with torch.no_grad():
            outputs.append(decode_window(model, cache, batch))
    assert torch.equal(*outputs)
    assert outputs[1].isfinite().all()


def test_denoising_reads_the_cache_and_never_writes_it(build_model, batch) -> None:
    model = build_model()
    cache = KVCache.for_model(model, 3, 16)
    model.encode(batch.clean[:, :7], cache=cache)
    held = [tensor.clone() for layer in range(2) for tensor in cache.keys_values(layer)]
    before = denoise_canvas(model, cache, batch, 0)
    assert cache.length == cache.start == 7
    after = [tensor for layer in range(2) for tensor in cache.keys_values(layer)]
    assert all(map(torch.equal, held, after))
    # What it puts behind them is nobody's: neither the next forward's nor the next token's.
    assert torch.equal(denoise_canvas(model, cache, batch, 0), before)
    model.encode(batch.clean[:, 7:12], cache=cache)
    whole = model.encode(batch.clean[:, :12])
    for cached, kept in zip(cache.keys_values(1), whole.keys_values(1), strict=True):
        assert (cached - kept).abs().max() < FLOAT64_TOLERANCE


def test_kept_rows_go_on_as_if_alone(build_model, batch) -> None:
    model = build_model()
    cache = KVCache.for_model(model, 3, 16)
    model.encode(batch.clean[:, :7], cache=cache)
    cache.keep_rows(torch.tensor([2, 0]))
    together = model.encode(batch.clean[[2, 0], 7:12], cache=cache).hidden
    alone = model.encode(batch.clean[[2, 0], :12]).hidden[:, 7:]
    assert (together - alone).abs().max() < FLOAT64_TOLERANCE
    assert cache.capacity == 16


def test_full_cache_refuses_one_more_token(build_model, batch) -> None:
    model = build_model()
    cache = KVCache.for_model(model, 3, 7)
    with pytest.raises(AssertionError, match="8 tokens do not fit a cache of 7"):
        model.encode(batch.clean[:, :8], cache=cache)


@pytest.mark.parametrize(("first", "second"), [(0, 3), (4, 3), (3, 4)])
def test_block_mask_refuses_a_part_of_a_canvas(first: int, second: int, build_model, batch) -> None:
    model = build_model(clean_mask="block")
    cache = KVCache.for_model(model, 3, 16)
    cache.advance(batch.clean[:, :first])
    with pytest.raises(InputError, match="whole canvases of 4 tokens"):
        model.encode(batch.clean[:, :second], cache=cache)


def test_cache_takes_the_type_of_the_arithmetic(build_model) -> None:
    model = build_model().float()
    assert KVCache.for_model(model, 1, 4).keys_values(0)[0].dtype == torch.float32
    with autocast(torch.device("cpu"), "bfloat16"):
        assert KVCache.for_model(model, 1, 4).keys_values(0)[0].dtype == torch.bfloat16


def test_second_canvas_needs_its_context_in_the_cache(build_model, batch) -> None:
    model = build_model()
    cache = KVCache.for_model(model, 3, 16)
    model.encode(batch.clean[:, :4], cache=cache)
    with pytest.raises(AssertionError, match="behind a cache there is one canvas"):
        model.denoise(
            batch.noisy[:, 4:12],
            batch.times[:, 1:3],
            context=cache,
            guess=None,
            has_guess=None,
        )


def test_rows_of_an_encoding_are_those_of_the_batch(build_model, batch) -> None:
    encoded = build_model().encode(batch.clean)
    some = encoded.rows(batch.has_guess)
    assert isinstance(some, Encoded)
    assert torch.equal(some.hidden, encoded.hidden[[0, 2]])
    assert torch.equal(some.keys_values(1)[1], encoded.keys_values(1)[1][[0, 2]])


def test_detached_encoding_stops_the_gradient(build_model, batch) -> None:
    encoded = build_model().encode(batch.clean)
    assert encoded.hidden.requires_grad
    assert encoded.keys_values(0)[0].requires_grad
    stopped = encoded.detach()
    tensors = (stopped.hidden, *stopped.keys, *stopped.values)
    assert not any(tensor.requires_grad for tensor in tensors)
    assert torch.equal(stopped.keys[1], encoded.keys[1])


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("changes", "n_read"),
    [
        ({"clean_mask": "causal"}, 1),
        ({"clean_mask": "causal"}, 3),
        ({"clean_mask": "block"}, 4),
        ({"noisy_input": "previous", "likelihood_bias": True}, 1),
        ({"noisy_input": "previous", "likelihood_bias": True}, 3),
        ({"token_shift": True}, 3),
        ({"noisy_input": "previous", "likelihood_bias": True, "token_shift": True}, 1),
        ({"tilt": 2.0}, 3),
    ],
)
def test_reading_and_denoising_at_once_is_one_after_the_other(
    changes: dict[str, object], n_read: int, is_packed: bool, build_model, batch, monkeypatch
) -> None:
    monkeypatch.setattr("canvaslm.model.kv_cache.can_be_packed", lambda _: is_packed)
    model = build_model(**changes)
    ids, noisy = batch.clean[:, 4 : 4 + n_read], batch.noisy[:, :4]
    times = batch.times[:, :1]
    one, other = (KVCache.for_model(model, 3, 12) for _ in range(2))
    for cache in (one, other):
        model.encode(batch.clean[:, :4], cache=cache)
    read, hidden = model.encode_and_denoise(ids, noisy, times, cache=one)
    assert (read - model.encode(ids, cache=other).hidden).abs().max() < FLOAT64_TOLERANCE
    plain = model.denoise(noisy, times, context=other, guess=None, has_guess=None)
    assert (hidden - plain).abs().max() < FLOAT64_TOLERANCE
    assert one.length == other.length == 4 + n_read
    for layer in range(model.params.n_layers):
        for cached, kept in zip(one.keys_values(layer), other.keys_values(layer), strict=True):
            assert (cached - kept).abs().max() < FLOAT64_TOLERANCE


def test_reading_and_denoising_at_once_refuses_a_part_of_a_canvas(build_model, batch) -> None:
    model = build_model(clean_mask="block")
    cache = KVCache.for_model(model, 3, 12)
    with pytest.raises(InputError, match="whole canvases of 4 tokens"):
        model.encode_and_denoise(
            batch.clean[:, :3], batch.noisy[:, :4], batch.times[:, :1], cache=cache
        )


def test_cut_cache_goes_on_as_if_the_rest_had_never_been_read(build_model, batch) -> None:
    model = build_model()
    cut, plain = (KVCache.for_model(model, 3, 12) for _ in range(2))
    model.encode(batch.clean[:, :9], cache=cut)
    kept = [slab.clone() for slab in cut.keys_values(0)]
    cut.cut(5)
    assert cut.length == cut.start == 5
    assert all(
        torch.equal(slab, before[:, :, :5])
        for slab, before in zip(cut.keys_values(0), kept, strict=True)
    )
    model.encode(batch.clean[:, :5], cache=plain)
    gap = model.encode(batch.noisy[:, :4], cache=cut).hidden
    assert (gap - model.encode(batch.noisy[:, :4], cache=plain).hidden).abs().max() < 1e-12
    with pytest.raises(AssertionError, match="cannot be kept"):
        cut.cut(10)


def test_the_tokens_of_a_cache_follow_its_rows_its_cuts_and_its_copies(build_model, batch) -> None:
    model = build_model()
    cache = KVCache.for_model(model, 3, 12)
    model.encode(batch.clean[:, :9], cache=cache)
    places = range(0, 9, 4)
    assert torch.equal(cache.ids_at(places), batch.clean[:, :9:4])
    assert torch.equal(model.encode(batch.clean).ids_at(places), batch.clean[:, :9:4])
    rows = torch.tensor([2, 0])
    copy = cache.some_rows(rows, room=4)
    model.encode(batch.noisy[rows, :2], cache=copy)
    copied = torch.cat((batch.clean[rows, 8:9], batch.noisy[rows, :2]), dim=1)
    assert torch.equal(copy.ids_at(range(8, 11)), copied)
    cache.cut(5)
    cache.keep_rows(rows)
    model.encode(batch.noisy[rows, 5:6], cache=cache)
    kept = torch.stack((batch.clean[rows, 4], batch.noisy[rows, 5]), dim=1)
    assert torch.equal(cache.ids_at(range(4, 6)), kept)
    with pytest.raises(IndexError):
        cache.ids_at(range(6, 7))
