"""Does decoding with a cache give what it gives without one, and what training saw?"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.layout import Layout
from canvaslm.model.kv_cache import KVCache
from canvaslm.sampling.acceptance import Quota
from canvaslm.sampling.sampler import CanvasStep
from oracles import generate_without_cache, tilted_time
from samplers import EVIDENCES, RULES, make_sampler, sure_of


class _Recorder:
    """Hidden states of every forward, taken by a hook."""

    def __init__(self, model: Any) -> None:
        self.hidden: list[Tensor] = []
        model.final_norm.register_forward_hook(lambda module, args, out: self.hidden.append(out))


@pytest.mark.parametrize("evidence", sorted(EVIDENCES))
@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("prompt_tokens", [0, 1, 5, 8])
def test_cache_changes_neither_ids_nor_hidden_states(
    opinionated: Any, tiny_layout: Layout, rule: str, prompt_tokens: int, evidence: str
) -> None:
    model = opinionated(tiny_layout)
    acceptance, level = RULES[rule]
    prompt = np.random.default_rng(prompt_tokens).integers(37, size=prompt_tokens).tolist()
    n_canvases = 2
    with torch.no_grad():
        ids, hidden = generate_without_cache(
            model,
            prompt,
            n_canvases,
            11,
            rule=rule,
            level=level,
            n_steps=5,
            temperatures=(0.8, 0.4),
            evidence=evidence,
        )
    recorder = _Recorder(model)
    sampler = make_sampler(model, acceptance=acceptance, denoise_steps=5, evidence=evidence)
    [made] = sampler.generate([prompt], n_canvases * 4, [11])
    assert made.ids == ids
    # What only writes the cache makes no hidden states.
    for decoded, expected in zip(recorder.hidden, hidden, strict=True):
        assert (decoded[0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({"clean_mask": "block"}, [3, 1, 4, 1]),
        ({"likelihood_bias": True}, [3, 1, 4]),
        ({"token_shift": True}, [3, 1, 4]),
        ({"likelihood_bias": True, "noisy_input": "previous"}, [3, 1, 4]),
        ({"likelihood_bias": True, "noisy_input": "previous"}, []),
        ({"likelihood_bias": True, "noisy_input": "previous", "token_shift": True}, [3]),
        ({"tilt": 1.0}, [3, 1, 4]),
        ({"likelihood_bias": True, "noisy_input": "previous", "tilt": 3.0}, [3]),
    ],
)
@pytest.mark.parametrize("evidence", sorted(EVIDENCES))
def test_cache_is_exact_under_every_shape_and_self_conditioning(
    opinionated: Any,
    tiny_layout: Layout,
    changes: dict[str, object],
    prompt: list[int],
    evidence: str,
) -> None:
    for site in ("input", "output"):
        model = opinionated(tiny_layout, self_conditioning=site, **changes)
        with torch.no_grad():
            ids, _ = generate_without_cache(
                model,
                prompt,
                3,
                5,
                rule="quota",
                level=0.9,
                n_steps=4,
                temperatures=(0.8, 0.4),
                evidence=evidence,
            )
        sampler = make_sampler(model, acceptance=Quota(threshold=0.9), evidence=evidence)
        [made] = sampler.generate([prompt], 12, [5])
        assert made.ids == ids


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("tilt", [1.0, 3.0])
def test_a_tilt_is_decoded_by_every_rule_as_without_a_cache(
    opinionated: Any, tiny_layout: Layout, rule: str, tilt: float, is_biased: bool
) -> None:
    """Positions wait for their time, and keep their token when it has come to 0."""
    model = opinionated(tiny_layout, likelihood_bias=is_biased, tilt=tilt)
    acceptance, level = RULES[rule]
    with torch.no_grad():
        ids, _ = generate_without_cache(
            model, [3, 1], 2, 7, rule=rule, level=level, n_steps=6, temperatures=(0.8, 0.4)
        )
    seen: list[CanvasStep] = []
    sampler = make_sampler(model, acceptance=acceptance, denoise_steps=6, on_step=seen.append)
    [made] = sampler.generate([[3, 1]], 8, [7])
    assert made.ids == ids
    assert len(seen) == 12
    kept: dict[tuple[int, int], int] = {}
    for state in seen:
        left = 5 - state.step
        stands = [tilted_time(left, i, canvas_tokens=4, n_times=6, tilt=tilt) for i in range(4)]
        rows = zip(state.accepted[0].tolist(), state.tokens[0].tolist(), stands, strict=True)
        for place, (accepted, token, at) in enumerate(rows):
            assert accepted or at > 0
            assert not accepted or at < 6
            assert kept.get((state.canvas, place), token) == token
            if at == 0:
                kept[state.canvas, place] = token
    assert len(kept) == 8


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("site", ["off", "input", "output"])
def test_weights_in_bfloat16_decode_whatever_the_products_are_made_in(
    opinionated: Any,
    tiny_layout: Layout,
    site: str,
    has_tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_tiles)
    model = opinionated(tiny_layout, dtype=torch.bfloat16, self_conditioning=site)
    made = make_sampler(model, evidence="cavity").generate([[1, 2], [3, 4]], 8, [0, 1])
    assert [(len(row.ids), row.reason) for row in made] == [(8, "length")] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_guess_is_looked_up_in_the_table_whatever_the_head_is(
    opinionated: Any, tiny_layout: Layout, tied: bool
) -> None:
    model = opinionated(tiny_layout, tied=tied, self_conditioning="input")
    recorder, shown = _Recorder(model), []
    assert model.self_conditioning is not None
    model.self_conditioning.register_forward_pre_hook(lambda _, given: shown.append(given[0]))
    make_sampler(model, denoise_steps=3).generate([[3, 1]], 4, [2])
    assert len(shown) == 2
    for guess, hidden in zip(shown, recorder.hidden[:2], strict=True):
        with torch.no_grad():
            due = model.logits(hidden).softmax(-1) @ model.table
        torch.testing.assert_close(guess, due, rtol=1e-10, atol=1e-10)


def test_decoding_sees_what_training_sees(opinionated: Any, tiny_layout: Layout) -> None:
    """Each step's hidden states equal those of the two-stream form over a whole window."""
    model = opinionated(tiny_layout)
    prompt = [3, 1, 4, 1]
    steps: list[CanvasStep] = []
    recorder = _Recorder(model)
    [made] = make_sampler(model, denoise_steps=3, on_step=steps.append).generate([prompt], 12, [2])
    decoded = list(recorder.hidden)
    clean = torch.tensor([prompt + made.ids])
    for state, hidden in zip(steps, decoded, strict=True):
        noisy = torch.zeros_like(clean)
        own = slice(4 + 4 * state.canvas, 8 + 4 * state.canvas)
        noisy[:, own] = state.noisy
        times = torch.full((1, 4), (3 - state.step) / 3, dtype=torch.float64)
        with torch.no_grad():
            window = model.denoise(
                noisy, times, context=model.encode(clean), guess=None, has_guess=None
            )
        assert (window[:, own] - hidden).abs().max() < 1e-12


# BR-58
def test_canvases_stand_where_the_prompt_and_the_committed_canvases_end(
    scripted: Any, tiny_layout: Layout
) -> None:
    model = scripted(
        lambda tag, start, step, noisy: sure_of([start, start + 1, start + 2, start + 3]),
        layout=Layout(canvas_tokens=4, canvases_per_window=5, vocab_size=37),
        denoise_steps=2,
    )
    [made] = make_sampler(model, denoise_steps=2).generate([[9, 8, 7, 6, 5, 4]], 12, [0])
    assert [start for _, start, _ in model.seen] == [6, 6, 10, 10, 14, 14]
    assert made.ids == list(range(6, 18))
    # BR-59: the cache holds the prompt and what is committed, nothing else.
    assert model.cached[-1].tolist() == [[9, 8, 7, 6, 5, 4, *range(6, 14)]]


# BR-59
def test_denoising_leaves_every_byte_of_the_cache_alone(
    opinionated: Any, tiny_layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opinionated(tiny_layout)
    caches: list[KVCache] = []
    build = KVCache.for_model

    def keep(*args: Any, **kwargs: Any) -> KVCache:
        caches.append(build(*args, **kwargs))
        return caches[-1]

    monkeypatch.setattr(KVCache, "for_model", staticmethod(keep))
    stored: list[tuple[int, list[bytes]]] = []

    def look(state: CanvasStep) -> None:
        slabs = [slab for layer in range(2) for slab in caches[0].keys_values(layer)]
        stored.append((state.canvas, [slab.contiguous().numpy().tobytes() for slab in slabs]))

    make_sampler(model, on_step=look).generate([[1, 2, 3]], 12, [0])
    assert len(caches) == 1
    for canvas in range(3):
        of_canvas = [content for number, content in stored if number == canvas]
        assert len(of_canvas) == 4
        assert all(content == of_canvas[0] for content in of_canvas)
        assert len(of_canvas[0][0]) == (3 + 4 * canvas) * 8 * 8  # positions · head width · float64


# BR-28
@pytest.mark.parametrize("changes", [{}, {"likelihood_bias": True, "noisy_input": "previous"}])
def test_garbage_in_unused_cache_slots_reaches_no_result(
    opinionated: Any, tiny_layout: Layout, changes: dict[str, object], caches_full: Any
) -> None:
    model = opinionated(tiny_layout, **changes)
    results = []
    for is_garbage in (False, True):
        with caches_full(is_garbage=is_garbage):
            results.append(make_sampler(model).generate([[1, 2, 3], [4, 5, 6]], 12, [0, 1]))
    assert results[0] == results[1]
    assert all(made.reason == "length" for made in results[0])
