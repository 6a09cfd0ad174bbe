"""Does the network compute what its one-page description says, and see only what it may?"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from canvaslm.layout import Layout
from canvaslm.model import backbone
from canvaslm.model.attention import masked_attention
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.kv_cache import KVCache
from canvaslm.model.shape import ModelParams
from oracles import block_causal_mask, plain_forward, token_times, two_stream_forward
from oracles import causal_mask as causal


def denoised(model: Backbone, batch, clean: Tensor | None = None) -> Tensor:
    return model.denoise(
        batch.noisy,
        batch.times,
        context=model.encode(batch.clean if clean is None else clean),
        guess=None,
        has_guess=None,
    )


SHAPES = [
    {},
    {"clean_mask": "block"},
    {"self_conditioning": "input", "qk_norm": True},
    {"bias": False, "n_kv_heads": 4},
    {"n_kv_heads": 1, "vocab_multiple": 16},
    {"token_shift": True},
    {"tilt": 2.0},
]


PREVIOUS = {"noisy_input": "previous", "likelihood_bias": True}


@pytest.mark.parametrize(
    "changes",
    [
        *SHAPES,
        PREVIOUS,
        PREVIOUS | {"time_width": 0, "token_shift": True},
        PREVIOUS | {"tilt": 1.5},
    ],
)
def test_two_streams_equal_the_dense_description(changes, build_model, batch) -> None:
    model = build_model(**changes)
    encoded = model.encode(batch.clean)
    noisy = model.denoise(
        batch.noisy,
        batch.times,
        context=encoded,
        guess=batch.guess,
        has_guess=batch.has_guess,
    )
    guess = batch.guess * batch.has_guess[:, None, None]
    true_noisy, true_clean = two_stream_forward(model, batch.clean, batch.noisy, batch.times, guess)
    assert (noisy - true_noisy).abs().max() < 1e-12
    assert (encoded.hidden - true_clean).abs().max() < 1e-12
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(noisy.square().sum(), parameters)
    true_gradients = torch.autograd.grad(true_noisy.square().sum(), parameters)
    for name, gradient, truth in zip(names, gradients, true_gradients, strict=True):
        assert (gradient - truth).abs().max() < 1e-9 * truth.abs().max(), name


@pytest.mark.parametrize("changes", SHAPES)
def test_one_stream_equals_the_dense_description(changes, build_model, batch) -> None:
    model = build_model(**changes)
    T, L = batch.noisy.shape[1], model.layout.canvas_tokens
    times = batch.times.clone()
    times[:, 0] = 0  # a clean prefix, as in context: prefix
    hidden = model.denoise_one_stream(
        batch.noisy, times, guess=batch.guess, has_guess=batch.has_guess
    )
    truth = plain_forward(
        model,
        batch.noisy,
        torch.arange(T),
        token_times(times, model),
        block_causal_mask(T, T, L),
        batch.guess * batch.has_guess[:, None, None],
    )
    assert (hidden - truth).abs().max() < 1e-12


def test_float32_stays_within_1e_5_of_float64(build_model, batch) -> None:
    exact, narrow = denoised(build_model(), batch), denoised(build_model().float(), batch)
    assert narrow.dtype == torch.float32
    assert (narrow - exact).abs().max() < 1e-5 * exact.abs().max()


def test_twin_is_a_causal_model_that_needs_no_times(tiny_params, tiny_layout, batch) -> None:
    model = Backbone(tiny_params.twin(), tiny_layout.model_copy(update={"canvas_tokens": 1}))
    initialise(model.double(), 1)
    hidden = model.encode(batch.clean[:, :11]).hidden
    truth = plain_forward(
        model, batch.clean[:, :11], torch.arange(11), torch.zeros(3, 11), causal(11, 11)
    )
    assert (hidden - truth).abs().max() < 1e-12
    noisy = model.denoise_one_stream(batch.clean, None, guess=None, has_guess=None)
    assert (noisy[:, :11] - hidden).abs().max() < 1e-12  # a canvas of one token is causal


# BR-31
@pytest.mark.parametrize("clean_mask", ["causal", "block"])
def test_own_clean_copy_never_reaches_a_noisy_canvas(clean_mask: str, build_model, batch) -> None:
    model = build_model(clean_mask=clean_mask)
    L, V = model.layout.canvas_tokens, model.layout.vocab_size
    before = denoised(model, batch)
    for b in range(model.layout.canvases_per_window):
        own = slice(b * L, (b + 1) * L)
        clean = batch.clean.clone()
        clean[:, own] = (clean[:, own] + 1) % V
        after = denoised(model, batch, clean)
        assert torch.equal(after[:, : own.stop], before[:, : own.stop])
        if own.stop < before.shape[1]:
            later = (after - before)[:, own.stop :].abs().amax(-1)
            assert later.min() > 1e-6  # and every later canvas does see it


# BR-31
def test_description_that_leaks_gives_other_numbers(build_model, batch) -> None:
    model = build_model()
    leaking, _ = two_stream_forward(model, batch.clean, batch.noisy, batch.times, leaks=True)
    assert (denoised(model, batch) - leaking).abs().max() > 1e-2


def leaking_attention(q, k, v, clean_k, clean_v, *, canvas_tokens: int, start: int) -> Tensor:
    """The product's rule with >= where > belongs: a canvas sees its own clean copy."""
    canvas = torch.arange(q.shape[2]) // canvas_tokens
    seen = torch.cat((canvas[:, None] >= canvas, canvas[:, None] == canvas), 1)
    return masked_attention(q, torch.cat((clean_k, k), 2), torch.cat((clean_v, v), 2), seen)


def trained_nats(layout: Layout, params: ModelParams) -> float:
    """Nats per token after a short training on independent tokens, seen through pure noise."""
    model = Backbone(params, layout)
    initialise(model, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    nats = torch.tensor(math.inf)
    for _ in range(50):
        shape = (32, layout.window_tokens)
        clean, noisy = torch.randint(layout.vocab_size, (2, *shape), generator=generator)
        times = torch.ones(32, layout.canvases_per_window)
        context = model.encode(clean)
        hidden = model.denoise(noisy, times, context=context, guess=None, has_guess=None)
        logits = model.logits(hidden).flatten(0, 1)
        nats = torch.nn.functional.cross_entropy(logits, clean.flatten())
        optimizer.zero_grad()
        nats.backward()
        optimizer.step()
    return nats.item()


# BR-31
@pytest.mark.slow
def test_leak_would_drive_the_loss_to_zero_and_the_product_does_not(
    tiny_params: ModelParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(canvas_tokens=2, canvases_per_window=2, vocab_size=4)
    params = tiny_params.model_copy(update={"n_layers": 1, "clean_mask": "causal"})
    assert trained_nats(layout, params) > math.log(4) - 0.1
    monkeypatch.setattr(backbone, "canvas_attention", leaking_attention)
    assert trained_nats(layout, params) < 0.1


def test_row_does_not_depend_on_its_neighbours(build_model, batch) -> None:
    model = build_model()
    together = denoised(model, batch)
    context = model.encode(batch.clean[1:2])
    alone = model.denoise(
        batch.noisy[1:2], batch.times[1:2], context=context, guess=None, has_guess=None
    )
    assert (together[1] - alone[0]).abs().max() < 1e-12


def test_gradient_reaches_the_clean_stream_through_its_keys(build_model, batch) -> None:
    model = build_model()
    encoded = model.encode(batch.clean)
    hidden = model.denoise(batch.noisy, batch.times, context=encoded, guess=None, has_guess=None)
    first_key = torch.autograd.grad(hidden.sum(), encoded.keys[0])[0]
    last_canvas = slice(-model.layout.canvas_tokens, None)
    assert first_key[:, :, : last_canvas.start].any()
    assert not first_key[:, :, last_canvas].any()  # no later canvas is there to read it


def test_recomputed_blocks_give_the_same_bits(build_model, batch) -> None:
    gradients = []
    for recompute in (False, True):
        model = build_model()
        model.checkpoint_blocks = recompute
        denoised(model, batch).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for kept, computed_again in zip(*gradients, strict=True):
        assert (kept is None) == (computed_again is None)
        assert kept is None or torch.equal(kept, computed_again)


# BR-26
def test_padded_rows_of_the_table_are_never_seen(build_model, batch) -> None:
    model = build_model(vocab_multiple=16)
    assert model.embedding.weight.shape[0] == 48
    plain = build_model()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(model.get_parameter(name)[: len(parameter)])
        model.embedding.weight[37:] = torch.nan
    hidden = denoised(model, batch)
    assert torch.equal(hidden, denoised(plain, batch))
    assert model.head_weight.shape == (37, model.params.width)
    assert torch.equal(model.logits(hidden), plain.logits(hidden))
    assert torch.equal(
        model.soft_embedding(hidden, vocab_chunk=16), plain.soft_embedding(hidden, vocab_chunk=16)
    )


def test_a_head_of_its_own_is_no_part_of_the_table(build_model, batch) -> None:
    model = build_model(tied=False, vocab_multiple=16)
    assert model.head_weight.shape == model.table.shape == (37, model.params.width)
    hidden = denoised(model, batch)
    before = model.logits(hidden)
    with torch.no_grad():
        model.embedding.weight[:37] = 0.0
    assert torch.equal(model.logits(hidden), before)
    assert not torch.equal(denoised(model, batch), hidden)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab_chunk", [1, 10, 36, 37, 100])
def test_soft_embedding_does_not_depend_on_its_chunk(
    vocab_chunk: int, tied: bool, build_model
) -> None:
    model = build_model(tied=tied)
    hidden = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1)).double() * 5
    truth = model.logits(hidden).softmax(-1) @ model.table
    assert (model.soft_embedding(hidden, vocab_chunk=vocab_chunk) - truth).abs().max() < 1e-12


class LastDimensions(TorchDispatchMode):
    """Collects the last dimension of every three-dimensional result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim == 3:
            self.seen.add(result.shape[-1])
        return result


def test_soft_embedding_never_holds_all_logits(build_model) -> None:
    model, hidden = build_model(), torch.randn(2, 3, 24, dtype=torch.float64)
    with LastDimensions() as chunked:
        model.soft_embedding(hidden, vocab_chunk=10)
    with LastDimensions() as dense:
        model.logits(hidden)
    assert 37 not in chunked.seen
    assert 37 in dense.seen


def test_initial_weights_follow_from_the_seed_and_the_name(tiny_params, tiny_layout) -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    model, twin = Backbone(tiny_params, tiny_layout), Backbone(tiny_params.twin(), tiny_layout)
    torch.set_rng_state(before)
    initialise(model, 1)
    initialise(twin, 1)
    assert torch.equal(torch.get_rng_state(), before)  # no draw from the global generator
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    initialise(twin, 2)
    assert not torch.equal(twin.embedding.weight, model.embedding.weight)


def test_initial_weights_have_the_stated_spread(tiny_params, tiny_layout) -> None:
    params = tiny_params.model_copy(update={"width": 128, "ffn_width": 256, "n_layers": 8})
    model = Backbone(params, tiny_layout)
    initialise(model, 1)
    for name, parameter in model.named_parameters():
        if name.startswith("self_conditioning.") or name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            writes = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            expected = 0.02 / 4 if writes else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.08), name


def test_padding_the_table_changes_no_initial_weight(tiny_params, tiny_layout) -> None:
    plain = Backbone(tiny_params, tiny_layout)
    padded = Backbone(tiny_params.model_copy(update={"vocab_multiple": 16}), tiny_layout)
    initialise(plain, 1)
    initialise(padded, 1)
    assert torch.equal(plain.head_weight, padded.head_weight)


# BR-30
@pytest.mark.parametrize("clean_mask", ["causal", "block"])
def test_only_a_token_that_a_position_sees_moves_its_logits(
    clean_mask: str, build_model, batch
) -> None:
    model = build_model(clean_mask=clean_mask)
    L, V = 4, model.layout.vocab_size
    clean, noisy, times = batch.clean[:1, :12], batch.noisy[:1, :12], batch.times[:1, :3]

    def two_streams(noisy_ids: Tensor, clean_ids: Tensor) -> Tensor:
        context = model.encode(clean_ids)
        return model.denoise(noisy_ids, times, context=context, guess=None, has_guess=None)

    def one_stream(ids: Tensor) -> Tensor:
        return model.denoise_one_stream(ids, times, guess=None, has_guess=None)

    canvas = torch.arange(12) // L
    seen_clean = causal(12, 12) if clean_mask == "causal" else block_causal_mask(12, 12, L)
    paths = {
        "clean stream": (lambda ids: model.encode(ids).hidden, seen_clean),
        "one stream": (one_stream, block_causal_mask(12, 12, L)),
        "own noisy canvas": (
            lambda ids: two_streams(ids, clean),
            canvas[:, None] == canvas[None],
        ),
        "earlier clean canvases": (
            lambda ids: two_streams(noisy, ids),
            canvas[:, None] > canvas[None],
        ),
    }
    with torch.no_grad():
        for name, (run, seen) in paths.items():
            before = model.logits(run(clean))[0]
            for key in range(12):
                changed = clean.clone()
                changed[0, key] = (changed[0, key] + 1) % V
                after = model.logits(run(changed))[0]
                moved = [not torch.equal(*rows) for rows in zip(before, after, strict=True)]
                assert moved == seen[:, key].tolist(), (name, key)


def test_canvas_behind_a_clean_prefix_is_the_same_in_one_stream_and_in_two(
    build_model, batch
) -> None:
    """A network trained with `prefix` or `noisy` may be decoded over clean context."""
    model = build_model(clean_mask="block")
    L = model.layout.canvas_tokens
    times = torch.full_like(batch.times, 0.5)
    two = model.denoise(
        batch.noisy, times, context=model.encode(batch.clean), guess=None, has_guess=None
    )
    for b in range(model.layout.canvases_per_window):
        own = slice(b * L, (b + 1) * L)
        ids, prefix_times = batch.clean.clone(), torch.zeros_like(times)
        ids[:, own], prefix_times[:, b] = batch.noisy[:, own], 0.5
        one = model.denoise_one_stream(ids, prefix_times, guess=None, has_guess=None)
        assert (one[:, own] - two[:, own]).abs().max() < 1e-12


@pytest.mark.parametrize("n_layers", [1, 2])
def test_a_context_is_an_encoding_without_what_nobody_reads(build_model, batch, n_layers) -> None:
    model = build_model(n_layers=n_layers)
    found = []
    for context in (model.encode(batch.clean), model.encode_context(batch.clean)):
        hidden = model.denoise(
            batch.noisy, batch.times, context=context, guess=None, has_guess=None
        )
        model.zero_grad()
        hidden.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((hidden, *context.keys, *context.values, *gradients))
    whole, less = found
    assert len(whole) == len(less)
    assert all(torch.equal(x, y) for x, y in zip(whole, less, strict=True))


def test_a_context_fills_a_cache_as_an_encoding_does(build_model, batch) -> None:
    model = build_model()
    caches = [KVCache.for_model(model, len(batch.clean), batch.clean.shape[1]) for _ in range(2)]
    for part in batch.clean.split(8, dim=1):
        model.encode(part, cache=caches[0])
        model.encode_context(part, cache=caches[1])
    assert caches[0].length == caches[1].length == batch.clean.shape[1]
    for layer in range(model.params.n_layers):
        pairs = zip(*(cache.keys_values(layer) for cache in caches), strict=True)
        assert all(torch.equal(whole, less) for whole, less in pairs)


def test_a_stream_that_reads_the_previous_token_sees_all_but_the_last(build_model, batch) -> None:
    """Logits of a canvas hang on the clean token before it and on its own but the last one."""
    model = build_model(**PREVIOUS)
    L, V = model.layout.canvas_tokens, model.layout.vocab_size

    def logits(noisy: Tensor, clean: Tensor) -> Tensor:
        context = model.encode_context(clean)
        hidden = model.denoise(noisy, batch.times, context=context, guess=None, has_guess=None)
        return model.logits(hidden)

    with torch.no_grad():
        before = logits(batch.noisy, batch.clean)
        for place in range(2 * L):
            noisy = batch.noisy.clone()
            noisy[:, place] = (noisy[:, place] + 1) % V
            moved = (logits(noisy, batch.clean) - before).abs().amax((0, 2)) > 0
            own = torch.arange(len(moved)) // L == place // L
            is_last = place % L == L - 1
            assert moved.tolist() == (own & (not is_last)).tolist(), place


def test_without_noise_and_time_the_previous_token_gives_the_next_one(
    build_model, batch, monkeypatch
) -> None:
    """A noisy stream of true tokens that looks back alone is the clean one, one place on."""
    model = build_model(**PREVIOUS, time_width=0)
    L, T = model.layout.canvas_tokens, batch.clean.shape[1]

    def behind(q, k, v, clean_k, clean_v, *, canvas_tokens: int, start: int) -> Tensor:
        keys, values = torch.cat((clean_k, k), dim=2), torch.cat((clean_v, v), dim=2)
        query, key = torch.arange(T)[:, None], torch.arange(T)[None]
        first = query // canvas_tokens * canvas_tokens
        seen = torch.cat((key < first - 1, (key >= first) & (key <= query)), dim=1)
        return masked_attention(q, keys, values, seen)

    monkeypatch.setattr(backbone, "canvas_attention", behind)
    encoded = model.encode(batch.clean)
    hidden = model.denoise(batch.clean, None, context=encoded, guess=None, has_guess=None)
    assert (hidden[:, L:] - encoded.hidden[:, L - 1 : -1]).abs().max() < 1e-12


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("n_read", [1, 4, 7])
def test_the_previous_token_is_the_same_behind_a_cache(
    n_read: int, token_shift: bool, build_model, batch
) -> None:
    model = build_model(**PREVIOUS, token_shift=token_shift)
    L = model.layout.canvas_tokens
    noisy, times = batch.noisy[:, :L], batch.times[:, :1]
    caches = [KVCache.for_model(model, 3, n_read + L) for _ in range(2)]
    assert caches[0].pack(model) is not None
    caches[1].pack = lambda _: None  # pyright: ignore[reportAttributeAccessIssue]
    found = []
    for cache in caches:
        model.encode_context(batch.clean[:, :n_read], cache=cache)
        found.append(model.denoise(noisy, times, context=cache, guess=None, has_guess=None))
    text = torch.cat((torch.full_like(batch.clean[:, :1], -1), batch.clean), dim=1)
    truth = plain_forward(
        model,
        torch.cat((batch.clean[:, :n_read], batch.clean[:, n_read - 1 : n_read], noisy[:, :-1]), 1),
        torch.cat((torch.arange(n_read), torch.arange(L) + n_read - 1)),
        torch.cat((torch.zeros(3, n_read), times.expand(-1, L)), 1),
        _prefix_mask(n_read, L),
        before=torch.cat(
            (
                text[:, :n_read],  # of the prefix
                text[:, n_read - 1 : n_read + 1],  # of the last clean token and of what follows it
                noisy[:, :-2],
            ),
            dim=1,
        ),
    )[:, n_read:]
    assert (found[0] - truth).abs().max() < 1e-12
    assert (found[1] - truth).abs().max() < 1e-12


@pytest.mark.parametrize("changes", [PREVIOUS, PREVIOUS | {"token_shift": True}])
def test_the_previous_token_is_the_opening_where_a_text_begins(
    changes: dict[str, object], build_model, batch
) -> None:
    model = build_model(**changes)
    L = model.layout.canvas_tokens
    cache = KVCache.for_model(model, 3, L)
    behind = model.denoise(
        batch.noisy[:, :L], batch.times[:, :1], context=cache, guess=None, has_guess=None
    )
    assert (behind - denoised(model, batch)[:, :L]).abs().max() < 1e-12


def _prefix_mask(n_clean: int, n_noisy: int) -> Tensor:
    """A causal prefix, and a canvas behind it that sees all of it and itself."""
    seen = causal(n_clean + n_noisy, n_clean + n_noisy)
    seen[n_clean:] = True
    return seen
