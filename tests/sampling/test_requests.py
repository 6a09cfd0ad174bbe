"""How many tokens come back, what ends a text, and what is refused?

Scripts get (row tag, start, step, noisy ids).
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.measure import ForwardCounter
from canvaslm.sampling.acceptance import EntropyBound, Quota
from canvaslm.sampling.sampler import CanvasStep
from canvaslm.sampling.stopping import StableAndConfident
from samplers import EOT, EVIDENCES, RULES, make_sampler, sure_of


@pytest.mark.parametrize("asked", [0, 1, 4, 5, 11, 12])
def test_exactly_the_asked_number_of_tokens_comes_back(
    opinionated: Any, tiny_layout: Layout, asked: int
) -> None:
    [made] = make_sampler(opinionated(tiny_layout)).generate([[1, 2, 3, 4]], asked, [0])
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
    [made] = make_sampler(model, denoise_steps=16).generate([[1]], 768, [0])
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
        return sure_of(ids)

    model = scripted(script, layout=tiny_layout, denoise_steps=2)
    made = make_sampler(model, denoise_steps=2, eot_id=EOT).generate([[1], [2]], 12, [0, 1])
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
        model = scripted(lambda *_, ids=ids: sure_of(ids), layout=layout, denoise_steps=2)
        prompt = [1] * (prompt_tokens - 1) + [EOT]
        [made] = make_sampler(model, denoise_steps=2, eot_id=EOT).generate([prompt], 16, [0])
        assert len(made.ids) == expected


def test_end_of_text_beyond_the_asked_number_does_not_count(
    scripted: Any, tiny_layout: Layout
) -> None:
    model = scripted(lambda *_: sure_of([5, 5, 5, EOT]), layout=tiny_layout, denoise_steps=2)
    [made] = make_sampler(model, denoise_steps=2, eot_id=EOT).generate([[1]], 3, [0])
    assert (made.ids, made.reason) == ([5, 5, 5], "length")


# BR-62
@pytest.mark.parametrize("prompt_tokens", [0, 3, 4, 16])
def test_without_a_number_the_text_goes_on_to_the_end_of_the_window(
    opinionated: Any, tiny_layout: Layout, prompt_tokens: int
) -> None:
    [made] = make_sampler(opinionated(tiny_layout)).generate([[1] * prompt_tokens], None, [0])
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
        sampler = make_sampler(model, acceptance=RULES[rule][0], evidence=evidence)
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
    made = make_sampler(model, acceptance=all_at_once).generate([[2], [1]], 8, [0, 1])
    assert [row.reason for row in made] == ["length", "not_finite"]


# BR-61
def test_canvas_of_high_entropy_still_ends_at_the_last_step(
    scripted: Any, tiny_layout: Layout
) -> None:
    model = scripted(lambda *_: torch.zeros(4, 37), layout=tiny_layout, denoise_steps=6)
    sampler = make_sampler(
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
    sampler = make_sampler(model, temperatures=(5.0, 5.0), on_step=states.append)
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
        make_sampler(opinionated(tiny_layout)).generate(prompts, asked, seeds)


def test_prompt_of_part_canvases_is_refused_under_block_mask(
    opinionated: Any, tiny_layout: Layout
) -> None:
    sampler = make_sampler(opinionated(tiny_layout, clean_mask="block"))
    with pytest.raises(InputError, match="a multiple of 4 tokens, since clean_mask is block"):
        sampler.generate([[1] * 4, [1] * 6], 4, [0, 1])
    assert len(sampler.generate([[1] * 4, []], 4, [0, 1])) == 2


def test_prompts_may_come_as_a_tensor(opinionated: Any, tiny_layout: Layout) -> None:
    sampler = make_sampler(opinionated(tiny_layout))
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
        sampler = make_sampler(
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
        [made] = make_sampler(model).generate([prompt], 9, [4])
    assert (made.forwards, made.token_forwards) == (counter.forwards, counter.tokens)
