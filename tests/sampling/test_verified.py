"""Letters: V vocabulary, L canvas tokens. Texts are held against the model's own next-token law."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.measure import ForwardCounter
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling import drafting, one_pass, verified
from canvaslm.sampling.acceptance import EntropyBound, Quota
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.drafting import Drafter
from canvaslm.sampling.evidence import Cavity, Posterior
from canvaslm.sampling.verified import VerifiedSampler
from oracles import all_sequences, chi_square_p, own_evidence

EOT = 36


def _sampler(
    model: Any,
    *,
    temperature: float = 1.0,
    steps: int = 1,
    draft_temperature: float = 1.0,
    eot_id: int | None = None,
    **changes: Any,
) -> VerifiedSampler:
    options = {"acceptance": EntropyBound(bound=0.3), "evidence": Cavity(), "vocab_chunk": 10}
    drafter = Drafter(
        model=model, steps=steps, temperature=draft_temperature, **(options | changes)
    )
    return VerifiedSampler(drafter=drafter, temperature=temperature, bos_id=EOT, eot_id=eot_id)


def _token_by_token(model: Any, *, temperature: float, eot_id: int | None = None) -> Any:
    return AutoregressiveSampler(
        model=model, temperature=temperature, bos_id=EOT, eot_id=eot_id, bos="if_empty"
    )


# --- the law --------------------------------------------------------------------------------------

N_TEXTS = 100_000
LENGTH, TINY = 3, 4  # tokens of a text, words


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw for all rows at once, from one generator: the same laws, many times faster."""
    source = np.random.default_rng(2)

    def ids(draws: list[None], n_ids: int, vocab_size: int, device: torch.device) -> Tensor:
        return torch.from_numpy(source.integers(vocab_size, size=(len(draws), n_ids)))

    def numbers(draws: list[None], n: int, device: torch.device) -> Tensor:
        return torch.from_numpy(source.random((len(draws), n)))

    for module in (drafting, verified):
        monkeypatch.setattr(module, "uniform_numbers", numbers)
    monkeypatch.setattr(drafting, "uniform_ids", ids)
    monkeypatch.setattr(verified, "stream", lambda *_: None)
    monkeypatch.setattr(one_pass, "_ROWS", 1 << 20)
    monkeypatch.setattr(one_pass, "_BIN", TINY)


def _enumerated(model: Any, prompt: list[int], temperature: float) -> Tensor:
    """(V^LENGTH,) probability of each text behind the prompt, token by token."""
    texts = torch.from_numpy(all_sequences(TINY, LENGTH))
    read = torch.cat((torch.tensor(prompt).expand(len(texts), -1), texts[:, :-1]), 1)
    with torch.no_grad():
        logits = model.logits(model.encode(read).hidden)[:, len(prompt) - 1 :]
    law = torch.softmax(logits / temperature, -1)
    return law.gather(-1, texts[..., None])[..., 0].prod(-1)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    ("canvas_tokens", "steps", "draft_temperature"),
    [(2, 1, 1.0), (2, 3, 0.7), (5, 1, 0.0), (5, 2, 1.3)],
)
def test_texts_follow_the_enumerated_law_of_the_next_token(
    opinionated: Any, canvas_tokens: int, steps: int, draft_temperature: float
) -> None:
    layout = Layout(canvas_tokens=canvas_tokens, canvases_per_window=4, vocab_size=TINY)
    model = opinionated(layout, n_layers=1, self_conditioning="output")
    sampler = _sampler(model, temperature=1.5, steps=steps, draft_temperature=draft_temperature)
    made = sampler.generate([[1, 2]] * N_TEXTS, LENGTH, range(N_TEXTS))
    texts = torch.tensor([row.ids for row in made])
    law = _enumerated(model, [1, 2], 1.5)
    assert 0.05 < law.max() < 0.5  # neither certain nor flat
    assert chi_square_p(texts, law, vocab_size=TINY) > 0.01
    kept = sum(row.accepted for row in made) / sum(row.canvases for row in made)
    assert kept > 0.1  # drafts pass, and some do not
    assert sum(row.canvases for row in made) > N_TEXTS


# --- one token after the other --------------------------------------------------------------------


@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("site", ["off", "input", "output"])
def test_at_temperature_zero_it_is_greedy_decoding_token_for_token(
    opinionated: Any, tiny_layout: Layout, site: str, steps: int, draft_temperature: float
) -> None:
    model = opinionated(tiny_layout, self_conditioning=site)
    prompts = [[], [5], [5, 6], [7, 8, 9, 10, 11], [1] * 15]
    for prompt in prompts:
        n_tokens = 16 - len(prompt)
        [expected] = _token_by_token(model, temperature=0.0).generate([prompt], n_tokens, [0])
        sampler = _sampler(model, temperature=0.0, steps=steps, draft_temperature=draft_temperature)
        [made] = sampler.generate([prompt], n_tokens, [3])
        assert made.ids == expected.ids


def test_drafts_of_a_rule_that_takes_nothing_back_follow_the_law_too(
    opinionated: Any, tiny_layout: Layout
) -> None:
    model = opinionated(tiny_layout)
    [expected] = _token_by_token(model, temperature=0.0).generate([[3]], 12, [0])
    for draft_temperature in (0.0, 1.0):
        sampler = _sampler(
            model,
            temperature=0.0,
            steps=4,
            draft_temperature=draft_temperature,
            acceptance=Quota(threshold=0.5),
            evidence=Posterior(),
        )
        assert sampler.generate([[3]], 12, [1])[0].ids == expected.ids


@pytest.mark.parametrize("canvas_tokens", [1, 3, 16])
def test_the_asked_number_of_tokens_comes_whatever_a_canvas_holds(
    opinionated: Any, canvas_tokens: int
) -> None:
    layout = Layout(canvas_tokens=canvas_tokens, canvases_per_window=16, vocab_size=37)
    model = opinionated(layout)
    for n_tokens in (1, 2, 3, 7):
        made = _sampler(model, steps=2).generate([[1, 2], [3], []], n_tokens, [0, 1, 2])
        assert [(len(row.ids), row.reason) for row in made] == [(n_tokens, "length")] * 3
    assert _sampler(model).generate([[1]], 0, [0])[0].forwards == 0


def test_without_a_number_the_text_goes_on_to_the_end_of_the_window(
    opinionated: Any, tiny_layout: Layout
) -> None:
    made = _sampler(opinionated(tiny_layout)).generate([[1] * 3, [], [1] * 16], None, [0, 1, 2])
    assert [(len(row.ids), row.reason) for row in made] == [(n, "window") for n in (13, 16, 0)]


def test_row_depends_neither_on_neighbours_nor_on_order(
    opinionated: Any, tiny_layout: Layout
) -> None:
    model = opinionated(tiny_layout)
    prompts, seeds = [[1, 2], [3], [4, 5], [1, 2], []], [0, 1, 2, 3, 4]
    end = _sampler(model, steps=2).generate(prompts, 10, seeds)[0].ids[3]
    sampler = _sampler(model, steps=2, eot_id=end)
    together = sampler.generate(prompts, 10, seeds)
    assert together == [
        sampler.generate([p], 10, [s])[0] for p, s in zip(prompts, seeds, strict=True)
    ]
    assert sampler.generate(prompts[::-1], 10, seeds[::-1]) == together[::-1]
    assert {made.reason for made in together} == {"end_of_text", "length"}
    assert together[0] != together[3]  # one prompt, two seeds


# --- end of text, counts, cache -------------------------------------------------------------------


def _agreeing(scripted: Any, layout: Layout, text: list[int]) -> Any:
    """A model whose drafts and next tokens both spell ``text`` behind a prompt of two tokens."""

    def sure(place: int) -> Tensor:
        logits = torch.zeros(layout.vocab_size)
        logits[text[place - 2] if place - 2 < len(text) else 0] = 60.0
        return logits

    model = scripted(
        lambda tag, start, step, noisy: torch.stack([sure(start + i) for i in range(len(noisy))]),
        layout=layout,
        denoise_steps=1,
    )
    model.next_logits = lambda tag, length, step, text: sure(length)
    return model


def test_drafts_that_pass_make_a_canvas_and_one_token_in_two_forwards(
    scripted: Any, tiny_layout: Layout
) -> None:
    text = list(range(10, 22))
    model = _agreeing(scripted, tiny_layout, text)
    [made] = _sampler(model).generate([[1, 2]], 12, [0])
    # 5, 5 and, with a draft of one, 2 tokens.
    assert made.ids == text
    assert (made.verifications, made.canvases, made.accepted) == (3, 3, 4 + 4 + 1)
    assert (made.forwards, made.prefill_forwards, made.encoding_forwards) == (1 + 6, 1, 1 + 6)
    assert made.token_forwards == 1 + 3 * (1 + 4) + 4 + 4 + 1


# BR-69
def test_end_of_text_is_cut_off_and_what_was_drafted_behind_it_counts_for_nobody(
    scripted: Any, tiny_layout: Layout
) -> None:
    text = [10, 11, 12, 13, 14, EOT, 16, 17, 18, 19, 20, 21]
    model = _agreeing(scripted, tiny_layout, text)
    [made] = _sampler(model, eot_id=EOT).generate([[1, EOT]], 12, [0])
    assert (made.ids, made.reason) == (text[:5], "end_of_text")
    assert (made.accepted, made.verifications) == (4, 2)  # the fifth token came with the ruling
    [whole] = _sampler(model, eot_id=None).generate([[1, EOT]], 12, [0])
    assert whole.ids == text


@pytest.mark.parametrize(
    "changes",
    [{}, {"likelihood_bias": True, "noisy_input": "previous", "token_shift": True}, {"tilt": 2.0}],
)
def test_forwards_are_counted_as_they_are(
    opinionated: Any, tiny_layout: Layout, changes: dict[str, object]
) -> None:
    model = opinionated(tiny_layout, **changes)
    for steps in (1, 3):
        sampler = _sampler(model, steps=steps)
        with ForwardCounter(model.entrance) as counter:
            [made] = sampler.generate([[1, 2, 3]], 11, [4])
        assert (made.forwards, made.token_forwards) == (counter.forwards, counter.tokens)
        n_single = made.forwards - 1 - made.canvases * (steps + 1)
        assert n_single in (0, 1)  # a last token needs no draft
        assert made.encoding_forwards == 1 + 2 * made.canvases + n_single
        assert len(made.ids) == made.accepted + made.verifications + n_single


def test_cache_holds_the_accepted_tokens_and_nothing_else(
    opinionated: Any, tiny_layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opinionated(tiny_layout)
    prompt, split = [1, 2, 3], verified._Batch.split
    kept: list[int] = []

    def watched(batch: Any, ruling: Any, n_read: int) -> Any:
        parts = split(batch, ruling, n_read)
        for part in parts:
            for place, row in enumerate(part.rows):
                whole = model.encode(torch.tensor([prompt + row.ids]))
                assert part.last[place].tolist() == row.ids[-1:]
                assert part.cache.length == 3 + len(row.ids) - 1
                for layer in range(model.params.n_layers):
                    for cached, expected in zip(
                        part.cache.keys_values(layer), whole.keys_values(layer), strict=True
                    ):
                        gap = cached[place] - expected[0, :, : part.cache.length]
                        assert gap.abs().max() < 1e-12
                kept.append(len(row.ids))
        return parts

    monkeypatch.setattr(verified._Batch, "split", watched)
    _sampler(model, steps=2).generate([prompt] * 6, 12, range(6))
    assert len(set(kept)) > 3  # rows went on from many lengths


# BR-28
@pytest.mark.parametrize("changes", [{}, {"likelihood_bias": True, "noisy_input": "previous"}])
def test_garbage_in_unused_cache_slots_reaches_no_token(
    opinionated: Any, tiny_layout: Layout, changes: dict[str, object], caches_full: Any
) -> None:
    model = opinionated(tiny_layout, **changes)
    results = []
    for is_garbage in (False, True):
        with caches_full(is_garbage=is_garbage):
            results.append(_sampler(model).generate([[1, 2], [3], [4, 5]], 9, [0, 1, 2]))
    assert results[0] == results[1]
    assert all(made.reason == "length" for made in results[0])


@pytest.mark.parametrize("wrong", ["draft", "law"])
def test_row_that_turns_to_nan_is_told_and_harms_nobody(
    scripted: Any, tiny_layout: Layout, wrong: str
) -> None:
    model = _agreeing(scripted, tiny_layout, list(range(10, 22)))
    script, next_logits = model.script, model.next_logits

    def broken_draft(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        return script(tag, start, step, noisy) * (math.nan if tag == 1 and start > 4 else 1.0)

    def broken_law(tag: int, length: int, step: int, text: Tensor) -> Tensor:
        return next_logits(tag, length, step, text) * (math.nan if tag == 3 and length > 7 else 1.0)

    if wrong == "draft":
        model.script = broken_draft
    else:
        model.next_logits = broken_law
    for temperature in (0.0, 1.0):
        sampler = _sampler(model, temperature=temperature, draft_temperature=temperature)
        made = sampler.generate([[1, 3], [2, 4]], 12, [0, 1])
        assert [row.reason for row in made] == ["not_finite", "length"]
        assert [len(row.ids) for row in made] == [5, 12]


def test_clean_stream_that_sees_ahead_is_refused(opinionated: Any, tiny_layout: Layout) -> None:
    model = opinionated(tiny_layout, clean_mask="block")
    with pytest.raises(InputError, match=r"model\.clean_mask: expected causal"):
        _sampler(model).generate([[1] * 4], 4, [0])


def test_answer_beyond_the_window_is_refused(opinionated: Any, tiny_layout: Layout) -> None:
    with pytest.raises(InputError, match="trained window of 16 tokens"):
        _sampler(opinionated(tiny_layout)).generate([[1] * 10], 7, [0])


def test_weights_in_bfloat16_decode(opinionated: Any, tiny_layout: Layout) -> None:
    model = opinionated(tiny_layout, dtype=torch.bfloat16, self_conditioning="input")
    made = _sampler(model, steps=2).generate([[1, 2], [3, 4]], 8, [0, 1])
    assert [(len(row.ids), row.reason) for row in made] == [(8, "length")] * 2


# --- the draft ------------------------------------------------------------------------------------


@pytest.mark.parametrize("evidence", [Posterior(), Cavity()])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_law_of_a_draft_is_that_of_its_last_step(
    opinionated: Any, tiny_layout: Layout, steps: int, evidence: Any
) -> None:
    model = opinionated(tiny_layout, self_conditioning="output")
    seen: list[dict[str, Any]] = []
    denoise = model.denoise

    def watched(noisy: Tensor, times: Tensor, **options: Any) -> Tensor:
        hidden = denoise(noisy, times, **options)
        seen.append({"noisy": noisy, "times": times, "hidden": hidden} | options)
        return hidden

    model.__dict__["denoise"] = watched
    accepted = torch.tensor([[True, False, True, False]])

    class Two:
        is_monotone = False

        def accept(self, *_: Any) -> Tensor:
            return accepted

    drafter = _sampler(
        model, steps=steps, draft_temperature=0.7, acceptance=Two(), evidence=evidence
    ).drafter
    cache = KVCache.for_model(model, 1, 16)
    model.encode(torch.tensor([[4, 5, 6]]), cache=cache)
    draft = drafter.draft(torch.tensor([[7]]), cache, [stream(0, "draft")], n_tokens=3)
    assert cache.length == 4
    assert draft.law.shape == (1, 3, 37)
    assert (draft.law.sum(-1) - 1.0).abs().max() < 1e-12
    assert (
        draft.before - model.encode(torch.tensor([[4, 5, 6, 7]])).hidden[:, -1]
    ).abs().max() < 1e-12
    if steps == 1:
        assert seen == []  # the only step went with the token that was read
        return
    [last] = seen
    assert last["times"].tolist() == [[0.5]]
    assert last["guess"] is not None
    logits = model.logits(last["hidden"])[:, :3]
    if isinstance(evidence, Cavity):
        excess = own_evidence(1, n_times=2, vocab_size=37)
        for place in (0, 1, 2):
            if not accepted[0, place]:
                logits[0, place, last["noisy"][0, place]] -= excess
    assert (draft.law - torch.softmax(logits / 0.7, -1)).abs().max() < 1e-12


@pytest.mark.parametrize("is_monotone", [True, False])
def test_between_the_steps_of_a_draft_a_rule_keeps_its_tokens_or_the_newest(
    opinionated: Any, tiny_layout: Layout, is_monotone: bool
) -> None:
    model = opinionated(tiny_layout)
    read: list[Tensor] = []
    denoise = model.denoise

    def watched(noisy: Tensor, times: Tensor, **options: Any) -> Tensor:
        read.append(noisy)
        return denoise(noisy, times, **options)

    model.__dict__["denoise"] = watched

    class Two:
        def __init__(self) -> None:
            self.is_monotone = is_monotone

        def accept(self, now: Any, before: Any, accepted: Tensor) -> Tensor:
            return torch.arange(4).expand(20, 4) < 2

    drafter = _sampler(model, steps=4, draft_temperature=5.0, acceptance=Two()).drafter
    cache = KVCache.for_model(model, 20, 16)
    draws = [stream(i, "draft") for i in range(20)]
    drafter.draft(torch.full((20, 1), 7), cache, draws, n_tokens=4)
    stays = [bool((a[:, :2] == b[:, :2]).all()) for a, b in itertools.pairwise(read)]
    assert stays == [is_monotone] * 2
    assert all((a[:, 2:] != b[:, 2:]).any() for a, b in itertools.pairwise(read))


def test_draft_at_temperature_zero_is_certain_of_its_tokens(
    opinionated: Any, tiny_layout: Layout
) -> None:
    model = opinionated(tiny_layout)
    drafter = _sampler(model, draft_temperature=0.0).drafter
    cache = KVCache.for_model(model, 2, 16)
    draft = drafter.draft(
        torch.tensor([[7], [8]]), cache, [stream(i, "draft") for i in range(2)], n_tokens=4
    )
    assert torch.equal(draft.law, functional.one_hot(draft.tokens, 37).double())
