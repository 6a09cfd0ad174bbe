"""Letters: V vocabulary, L canvas tokens. Scripts get (row tag, start, step, noisy ids)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.measure import ForwardCounter
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling.acceptance import Acceptance, EntropyBound, Quota, UnchangedOrStronger
from canvaslm.sampling.evidence import Cavity, Evidence, Posterior
from canvaslm.sampling.one_pass import answer
from canvaslm.sampling.prediction import Prediction
from canvaslm.sampling.sampler import CanvasSampler, CanvasStep
from canvaslm.sampling.stopping import Never, StableAndConfident, Stopping
from oracles import generate_without_cache, tilted_time

RULES: dict[str, tuple[Acceptance, float]] = {
    "unchanged_or_stronger": (UnchangedOrStronger(), 0.0),
    "entropy_bound": (EntropyBound(bound=0.3), 0.3),
    "quota": (Quota(threshold=0.9), 0.9),
}
EVIDENCES: dict[str, Evidence] = {"posterior": Posterior(), "cavity": Cavity()}
EOT = 36


def _sampler(
    model: Any,
    *,
    acceptance: Acceptance | None = None,
    stopping: Stopping | None = None,
    denoise_steps: int = 4,
    temperatures: tuple[float, float] = (0.8, 0.4),
    eot_id: int | None = None,
    evidence: str | None = None,
    on_step: Callable[[CanvasStep], None] | None = None,
) -> CanvasSampler:
    extra: dict[str, Any] = {} if on_step is None else {"on_step": on_step}
    if evidence is not None:
        extra["evidence"] = EVIDENCES[evidence]
    return CanvasSampler(
        model=model,
        acceptance=acceptance or Quota(threshold=1.0),
        stopping=stopping or Never(),
        denoise_steps=denoise_steps,
        start_temperature=temperatures[0],
        end_temperature=temperatures[1],
        eot_id=eot_id,
        vocab_chunk=10,
        **extra,
    )


def _sure_of(ids: Sequence[int], vocab_size: int = 37, by: float = 60.0) -> Tensor:
    """Logits (L, V) that leave no doubt."""
    logits = torch.zeros(len(ids), vocab_size)
    logits[torch.arange(len(ids)), torch.tensor(ids)] = by
    return logits


class _Recorder:
    """Hidden states of every forward, taken by a hook."""

    def __init__(self, model: Any) -> None:
        self.hidden: list[Tensor] = []
        model.final_norm.register_forward_hook(lambda module, args, out: self.hidden.append(out))


# --- with a cache = without one -------------------------------------------------------------------


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
    sampler = _sampler(model, acceptance=acceptance, denoise_steps=5, evidence=evidence)
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
        sampler = _sampler(model, acceptance=Quota(threshold=0.9), evidence=evidence)
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
    sampler = _sampler(model, acceptance=acceptance, denoise_steps=6, on_step=seen.append)
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
    made = _sampler(model, evidence="cavity").generate([[1, 2], [3, 4]], 8, [0, 1])
    assert [(len(row.ids), row.reason) for row in made] == [(8, "length")] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_guess_is_looked_up_in_the_table_whatever_the_head_is(
    opinionated: Any, tiny_layout: Layout, tied: bool
) -> None:
    model = opinionated(tiny_layout, tied=tied, self_conditioning="input")
    recorder, shown = _Recorder(model), []
    assert model.self_conditioning is not None
    model.self_conditioning.register_forward_pre_hook(lambda _, given: shown.append(given[0]))
    _sampler(model, denoise_steps=3).generate([[3, 1]], 4, [2])
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
    [made] = _sampler(model, denoise_steps=3, on_step=steps.append).generate([prompt], 12, [2])
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
        lambda tag, start, step, noisy: _sure_of([start, start + 1, start + 2, start + 3]),
        layout=Layout(canvas_tokens=4, canvases_per_window=5, vocab_size=37),
        denoise_steps=2,
    )
    [made] = _sampler(model, denoise_steps=2).generate([[9, 8, 7, 6, 5, 4]], 12, [0])
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

    _sampler(model, on_step=look).generate([[1, 2, 3]], 12, [0])
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
            results.append(_sampler(model).generate([[1, 2, 3], [4, 5, 6]], 12, [0, 1]))
    assert results[0] == results[1]
    assert all(made.reason == "length" for made in results[0])


# --- steps, acceptance, what is emitted -----------------------------------------------------------


def test_times_go_down_from_one(scripted: Any, tiny_layout: Layout) -> None:
    model = scripted(lambda *_: torch.zeros(4, 37), layout=tiny_layout, denoise_steps=4)
    _sampler(model).generate([[1]], 8, [0])
    assert [time for _, _, time in model.seen] == [1.0, 0.75, 0.5, 0.25] * 2


# BR-55
def test_accepted_position_keeps_its_sample_and_the_others_are_drawn_anew(
    scripted: Any, tiny_layout: Layout
) -> None:
    layout = Layout(canvas_tokens=8, canvases_per_window=4, vocab_size=37)

    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        logits = torch.zeros(8, 37)  # entropy ln 37 everywhere ...
        logits[3, 20:22] = 50.0  # ... but at 3, where one of two ids is drawn
        return logits

    class OnlyThree:
        is_monotone: ClassVar[bool] = False

        def accept(self, now: Prediction, before: Prediction | None, accepted: Tensor) -> Tensor:
            return now.entropy < 1.0

    model = scripted(script, layout=layout, denoise_steps=3)
    states: list[CanvasStep] = []
    sampler = _sampler(model, acceptance=OnlyThree(), denoise_steps=3, on_step=states.append)
    [made] = sampler.generate([[1]], 8, [4])
    draws, noise = stream(4, "sample", 0), stream(4, "renoise", 0)
    read, sampled = noise.integers(37, size=8), -1
    for state in states:
        assert state.noisy[0].tolist() == read.tolist()
        sampled = 20 + int(draws.random(8)[3] >= 0.5)
        assert state.accepted[0].tolist() == [position == 3 for position in range(8)]
        assert int(state.tokens[0, 3]) == sampled
        read = noise.integers(37, size=8)
        read[3] = sampled
    # Emitted: the accepted sample, and the argmax (id 0 of equals) where nothing was accepted.
    assert made.ids == [0, 0, 0, sampled, 0, 0, 0, 0]


@pytest.mark.parametrize("evidence", sorted(EVIDENCES))
@pytest.mark.parametrize("rule", ["unchanged_or_stronger", "quota"])
def test_accepted_position_never_changes_under_a_monotone_rule(
    opinionated: Any, tiny_layout: Layout, rule: str, evidence: str
) -> None:
    model = opinionated(tiny_layout)
    states: list[CanvasStep] = []
    sampler = _sampler(
        model,
        acceptance=RULES[rule][0],
        denoise_steps=8,
        temperatures=(2.0, 1.0),
        evidence=evidence,
        on_step=states.append,
    )
    sampler.generate([[1, 2], [3, 4]], 12, [0, 1])
    compared = 0
    for before, now in itertools.pairwise(states):
        if before.canvas == now.canvas:
            held = before.accepted
            assert (now.accepted | ~held).all()
            assert torch.equal(now.tokens[held], before.tokens[held])
            assert torch.equal(now.noisy[held], before.tokens[held])
            compared += int(held.sum())
    assert compared > 50


class _NeverButLooking(Never):
    """The fixed schedule, by a rule that says that it reads every position."""

    reads_every_position: ClassVar[bool] = True


@pytest.mark.parametrize("rule", sorted(RULES))
def test_head_is_left_out_only_where_nobody_asks_and_changes_nothing(
    opinionated: Any, tiny_layout: Layout, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opinionated(tiny_layout)
    asked: list[int] = []

    def counted(question: Any, **options: Any) -> Any:
        asked.append(question.hidden[..., 0].numel())
        return answer(question, **options)

    monkeypatch.setattr("canvaslm.sampling.sampler.answer", counted)
    made, positions = [], []
    for stopping in (Never(), _NeverButLooking()):
        asked.clear()
        sampler = _sampler(model, acceptance=RULES[rule][0], stopping=stopping, denoise_steps=6)
        made.append(sampler.generate([[1, 2], [3, 4]], 12, [0, 1]))
        positions.append(sum(asked))
    assert made[0] == made[1]
    assert positions[1] == 3 * 6 * 2 * 4
    if RULES[rule][0].is_monotone:
        assert positions[0] < 0.8 * positions[1]
    else:
        assert positions[0] == positions[1]


def test_entropy_bound_may_take_a_token_back(scripted: Any, tiny_layout: Layout) -> None:
    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        logits = torch.zeros(4, 37)
        logits[step % 4, 30 + step] = 20.0  # sure, but not so that float32 rounds all else to 0
        return logits

    model = scripted(script, layout=tiny_layout, denoise_steps=3)
    states: list[CanvasStep] = []
    sampler = _sampler(
        model, acceptance=EntropyBound(bound=0.0), denoise_steps=3, on_step=states.append
    )
    [made] = sampler.generate([[1]], 4, [0])
    assert [state.accepted[0].nonzero().tolist() for state in states] == [[[0]], [[1]], [[2]]]
    assert [int(state.tokens[0, state.step]) for state in states] == [30, 31, 32]
    assert made.ids == [0, 0, 32, 0]


def test_self_conditioning_is_shown_the_step_before(scripted: Any, tiny_layout: Layout) -> None:
    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        return _sure_of([step] * 4)

    model = scripted(script, layout=tiny_layout, denoise_steps=3, self_conditioning="output")
    _sampler(model, denoise_steps=3).generate([[1]], 8, [0])
    assert [None if guess is None else int(guess[0, 0].argmax()) for guess in model.guesses] == [
        None, 0, 1, None, 0, 1,
    ]  # fmt: skip
    without = scripted(script, layout=tiny_layout, denoise_steps=3)
    _sampler(without, denoise_steps=3).generate([[1]], 8, [0])
    assert without.guesses == [None] * 6


# BR-60
def test_temperature_zero_is_the_argmax_and_opens_no_stream_of_samples(
    scripted: Any, tiny_layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untouchable:
        def random(self, *_: Any) -> Any:
            raise AssertionError("a random number was used at temperature 0")

    def guarded(seed: int, name: str, number: int = 0) -> Any:
        return Untouchable() if name == "sample" else stream(seed, name, number)

    monkeypatch.setattr("canvaslm.sampling.sampler.stream", guarded)
    logits = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))
    model = scripted(lambda *_: logits, layout=tiny_layout, denoise_steps=4)
    [made] = _sampler(model, temperatures=(0.0, 0.0)).generate([[1]], 4, [0])
    assert made.ids == logits.argmax(-1).tolist()


# --- rows -----------------------------------------------------------------------------------------


# BR-54, BR-56
@pytest.mark.parametrize("evidence", sorted(EVIDENCES))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_row_depends_neither_on_neighbours_nor_on_batch_size_nor_on_order(
    opinionated: Any, tiny_layout: Layout, rule: str, evidence: str
) -> None:
    model = opinionated(tiny_layout)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8], [], [1, 2, 3], [1, 2, 3]]
    seeds = [0, 1, 2, 3, 4, 0]
    sampler = _sampler(
        model,
        acceptance=RULES[rule][0],
        stopping=StableAndConfident(threshold=1.5, patience=0),
        denoise_steps=6,
        evidence=evidence,
    )
    # A text ends at an id that comes up in one of several rows, so that the batch shrinks.
    sampler = dataclasses.replace(sampler, eot_id=sampler.generate(prompts, 9, seeds)[2].ids[2])
    together = sampler.generate(prompts, 9, seeds)
    alone = [sampler.generate([p], 9, [s])[0] for p, s in zip(prompts, seeds, strict=True)]
    assert together == alone
    assert sampler.generate(prompts[::-1], 9, seeds[::-1]) == together[::-1]
    assert together[0] == together[5]
    assert together[0].ids != together[4].ids
    assert len({made.forwards for made in together}) > 1, "rows should stop at different steps"
    assert {made.reason for made in together} == {"end_of_text", "length"}


# BR-56
def test_each_row_samples_its_own_distribution(scripted: Any, tiny_layout: Layout) -> None:
    model = scripted(
        lambda tag, *_: _sure_of([{1: 3, 2: 7}[tag]] * 4), layout=tiny_layout, denoise_steps=4
    )
    made = _sampler(model, temperatures=(1.0, 1.0)).generate([[1], [2]], 8, [0, 0])
    assert [row.ids for row in made] == [[3] * 8, [7] * 8]


# BR-54
def test_finished_row_is_frozen_while_its_neighbour_goes_on(
    scripted: Any, tiny_layout: Layout
) -> None:
    # The argmax canvas changes until these steps; two repeats later the row stops.
    changes_until = {1: 2, 2: 4, 3: 10}

    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        return _sure_of([min(step + 1, changes_until[tag])] * 4)

    def run(prompts: list[list[int]]) -> tuple[list[Any], Any]:
        model = scripted(script, layout=tiny_layout, denoise_steps=16)
        sampler = _sampler(
            model,
            acceptance=EntropyBound(bound=0.1),
            stopping=StableAndConfident(threshold=0.005, patience=2),
            denoise_steps=16,
        )
        return sampler.generate(prompts, 4, [5] * len(prompts)), model

    made, model = run([[1], [2], [3]])
    assert [row.forwards for row in made] == [1 + 4 + 1, 1 + 6 + 1, 1 + 12 + 1]
    assert [row.ids for row in made] == [[2] * 4, [4] * 4, [10] * 4]
    assert made == [run([[tag]])[0][0] for tag in (1, 2, 3)]
    # A frozen row costs nothing: prefill of 3 rows, 4 steps of 3, 2 of 2, 6 of 1, encoding of 3.
    assert model.batches == [3, *[3] * 4, *[2] * 2, *[1] * 6, 3]


# BR-53
@pytest.mark.parametrize(("patience", "steps"), [(0, 1), (1, 3), (2, 4)])
def test_patience_is_counted_in_forwards(
    scripted: Any, tiny_layout: Layout, patience: int, steps: int
) -> None:
    model = scripted(
        lambda tag, start, step, noisy: _sure_of([5 if step == 0 else 6] * 4),
        layout=tiny_layout,
        denoise_steps=9,
    )
    stopping = StableAndConfident(threshold=0.005, patience=patience)
    [made] = _sampler(
        model, acceptance=EntropyBound(bound=0.1), stopping=stopping, denoise_steps=9
    ).generate([[1]], 4, [0])
    assert made.forwards == 1 + steps + 1


def test_never_takes_all_steps_whatever_the_entropy(scripted: Any, tiny_layout: Layout) -> None:
    for logits in (_sure_of([5] * 4), torch.zeros(4, 37)):
        model = scripted(lambda *_, logits=logits: logits, layout=tiny_layout, denoise_steps=7)
        [made] = _sampler(model, denoise_steps=7).generate([[1]], 8, [0])
        assert made.forwards == 1 + 2 * 8


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 1, 4, 5, 11, 12])
def test_exactly_the_asked_number_of_tokens_comes_back(
    opinionated: Any, tiny_layout: Layout, asked: int
) -> None:
    [made] = _sampler(opinionated(tiny_layout)).generate([[1, 2, 3, 4]], asked, [0])
    assert len(made.ids) == asked
    assert made.reason == "length"
    canvases = math.ceil(asked / 4)
    assert made.canvases == canvases
    assert made.forwards == (1 + canvases * 5 if asked else 0)
    assert made.encoding_forwards == (1 + canvases if asked else 0)
    assert made.token_forwards == (4 + canvases * 5 * 4 if asked else 0)


def test_fixed_schedule_gives_15_06_tokens_a_forward_at_production_canvas(scripted: Any) -> None:
    layout = Layout(canvas_tokens=256, canvases_per_window=4, vocab_size=5)
    model = scripted(lambda *_: torch.zeros(256, 5), layout=layout, denoise_steps=16)
    [made] = _sampler(model, denoise_steps=16).generate([[1]], 768, [0])
    assert made.forwards == 1 + 3 * (16 + 1)
    assert len(made.ids) / (made.forwards - made.prefill_forwards) == pytest.approx(256 / 17)
    assert round(256 / 17, 2) == 15.06


def test_text_is_cut_before_the_end_of_text_and_the_row_leaves(
    scripted: Any, tiny_layout: Layout
) -> None:
    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        ids = [10, 11, 12, 13]
        if tag == 1 and start == 5:
            ids[2] = EOT
        return _sure_of(ids)

    model = scripted(script, layout=tiny_layout, denoise_steps=2)
    made = _sampler(model, denoise_steps=2, eot_id=EOT).generate([[1], [2]], 12, [0, 1])
    assert made[0].ids == [10, 11, 12, 13, 10, 11]
    assert made[0].reason == "end_of_text"
    assert made[0].canvases == 2
    assert len(made[1].ids) == 12
    assert model.batches == [2, 2, 2, 2, 2, 2, 2, 1, 1, 1]


# BR-57
@pytest.mark.parametrize("prompt_tokens", [7, 8, 9])
def test_end_of_text_inside_the_prompt_ends_nothing(scripted: Any, prompt_tokens: int) -> None:
    layout = Layout(canvas_tokens=8, canvases_per_window=4, vocab_size=37)
    answer = [10, 11, 12, EOT, 14, 15, 16, 17]
    for ids, expected in (([10] * 8, 16), (answer, 3)):
        model = scripted(lambda *_, ids=ids: _sure_of(ids), layout=layout, denoise_steps=2)
        prompt = [1] * (prompt_tokens - 1) + [EOT]
        [made] = _sampler(model, denoise_steps=2, eot_id=EOT).generate([prompt], 16, [0])
        assert len(made.ids) == expected


def test_end_of_text_beyond_the_asked_number_does_not_count(
    scripted: Any, tiny_layout: Layout
) -> None:
    model = scripted(lambda *_: _sure_of([5, 5, 5, EOT]), layout=tiny_layout, denoise_steps=2)
    [made] = _sampler(model, denoise_steps=2, eot_id=EOT).generate([[1]], 3, [0])
    assert (made.ids, made.reason) == ([5, 5, 5], "length")


# BR-62
@pytest.mark.parametrize("prompt_tokens", [0, 3, 4, 16])
def test_without_a_number_the_text_goes_on_to_the_end_of_the_window(
    opinionated: Any, tiny_layout: Layout, prompt_tokens: int
) -> None:
    [made] = _sampler(opinionated(tiny_layout)).generate([[1] * prompt_tokens], None, [0])
    assert len(made.ids) == 16 - prompt_tokens
    assert made.reason == "window"


# --- numbers that are not finite ------------------------------------------------------------------


# BR-61
@pytest.mark.parametrize("evidence", sorted(EVIDENCES))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_row_that_turns_to_nan_is_told_and_harms_nobody(
    scripted: Any, tiny_layout: Layout, rule: str, evidence: str
) -> None:
    logits = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))

    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        broken = tag == 1 and start == 5 and step == 1
        return torch.full((4, 37), math.nan) if broken else logits

    def run(prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        model = scripted(script, layout=tiny_layout, denoise_steps=4)
        sampler = _sampler(model, acceptance=RULES[rule][0], evidence=evidence)
        return sampler.generate(prompts, 12, seeds)

    made = run([[2], [1], [3]], [0, 1, 2])
    assert [row.reason for row in made] == ["length", "not_finite", "length"]
    assert len(made[1].ids) == 4  # its first canvas, finished before
    assert made[1].forwards == 1 + 5 + 2
    assert [made[0], made[2]] == [*run([[2]], [0]), *run([[3]], [2])]


def test_numbers_of_an_accepted_position_that_are_not_finite_are_told(
    scripted: Any, tiny_layout: Layout
) -> None:
    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        logits = torch.zeros(4, 37)
        if tag == 1 and step == 2:
            logits[3] = math.nan
        return logits

    model = scripted(script, layout=tiny_layout, denoise_steps=4)
    all_at_once = Quota(threshold=0.0)
    made = _sampler(model, acceptance=all_at_once).generate([[2], [1]], 8, [0, 1])
    assert [row.reason for row in made] == ["length", "not_finite"]


# BR-61
def test_canvas_of_high_entropy_still_ends_at_the_last_step(
    scripted: Any, tiny_layout: Layout
) -> None:
    model = scripted(lambda *_: torch.zeros(4, 37), layout=tiny_layout, denoise_steps=6)
    sampler = _sampler(
        model,
        acceptance=EntropyBound(bound=0.0),
        stopping=StableAndConfident(threshold=0.005, patience=0),
        denoise_steps=6,
    )
    [made] = sampler.generate([[1]], 4, [0])
    assert (len(made.ids), made.forwards) == (4, 1 + 6 + 1)


# BR-26
def test_no_id_beyond_the_real_vocabulary_is_read_or_emitted(
    opinionated: Any, tiny_layout: Layout
) -> None:
    model = opinionated(tiny_layout, vocab_multiple=64)
    with torch.no_grad():
        model.embedding.weight[37:] = 1e3  # padded rows would win every argmax
    states: list[CanvasStep] = []
    sampler = _sampler(model, temperatures=(5.0, 5.0), on_step=states.append)
    made = sampler.generate([[1]] * 20, None, list(range(20)))
    assert all(0 <= token < 37 for row in made for token in row.ids)
    assert all(int(state.noisy.max()) < 37 for state in states)
    assert len({token for row in made for token in row.ids}) > 20


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "asked", "seeds", "message"),
    [
        ([[1, 37]], 4, [0], "prompt 0, position 1: expected an id in 0..36, got 37"),
        ([[1], [-1]], 4, [0, 1], "prompt 1, position 0"),
        ([[1], [2]], 4, [0], "seeds: expected one for each of 2 prompts, got 1"),
        ([[1] * 10], 7, [0], "trained window of 16 tokens, got 10 prompt tokens and 7 new"),
        ([[1] * 17], None, [0], "trained window of 16 tokens, got 17 prompt tokens"),
        ([[1]], -1, [0], "max_new_tokens: expected 0 or more"),
    ],
)
def test_request_that_cannot_be_met_is_refused(
    opinionated: Any,
    tiny_layout: Layout,
    prompts: list[list[int]],
    asked: int | None,
    seeds: list[int],
    message: str,
) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        _sampler(opinionated(tiny_layout)).generate(prompts, asked, seeds)


def test_prompt_of_part_canvases_is_refused_under_block_mask(
    opinionated: Any, tiny_layout: Layout
) -> None:
    sampler = _sampler(opinionated(tiny_layout, clean_mask="block"))
    with pytest.raises(InputError, match="a multiple of 4 tokens, since clean_mask is block"):
        sampler.generate([[1] * 4, [1] * 6], 4, [0, 1])
    assert len(sampler.generate([[1] * 4, []], 4, [0, 1])) == 2


def test_prompts_may_come_as_a_tensor(opinionated: Any, tiny_layout: Layout) -> None:
    sampler = _sampler(opinionated(tiny_layout))
    prompts = [[1, 2], [3, 4]]
    assert sampler.generate(torch.tensor(prompts), 4, [0, 1]) == sampler.generate(
        prompts, 4, [0, 1]
    )


# BR-61
@pytest.mark.parametrize("evidence", sorted(EVIDENCES))
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("temperatures", [(0.8, 0.4), (0.0, 0.0)])
def test_one_logit_that_is_not_finite_is_never_a_token(
    scripted: Any,
    tiny_layout: Layout,
    wrong: float,
    temperatures: tuple[float, float],
    evidence: str,
) -> None:
    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        logits = torch.zeros(4, 37)
        if tag == 1 and step == 1:
            logits[2, 30] = wrong
        return logits

    for acceptance, _ in RULES.values():
        model = scripted(script, layout=tiny_layout, denoise_steps=4)
        sampler = _sampler(
            model, acceptance=acceptance, temperatures=temperatures, evidence=evidence
        )
        made = sampler.generate([[2], [1]], 8, [0, 1])
        assert [row.reason for row in made] == ["length", "not_finite"]
        assert made[1].ids == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_shift": True},
        {"likelihood_bias": True, "noisy_input": "previous"},
        {"likelihood_bias": True, "noisy_input": "previous", "token_shift": True},
        {"tilt": 2.0},
    ],
)
@pytest.mark.parametrize("prompt", [[], [1, 2, 3]])
def test_forwards_and_their_tokens_are_counted_as_they_are(
    opinionated: Any, tiny_layout: Layout, changes: dict[str, object], prompt: list[int]
) -> None:
    model = opinionated(tiny_layout, **changes)
    with ForwardCounter(model.entrance) as counter:
        [made] = _sampler(model).generate([prompt], 9, [4])
    assert (made.forwards, made.token_forwards) == (counter.forwards, counter.tokens)
