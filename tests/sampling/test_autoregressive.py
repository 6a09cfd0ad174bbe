import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.randomness import stream
from canvaslm.sampling.autoregressive import AutoregressiveSampler

EOT = 36


def _sampler(model: Any, *, temperature: float = 1.0, eot_id: int | None = EOT) -> Any:
    return AutoregressiveSampler(model=model, temperature=temperature, bos_id=EOT, eot_id=eot_id)


@pytest.fixture
def twin(opinionated: Any, tiny_layout: Layout) -> Any:
    return opinionated(tiny_layout, time_width=0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prompt", [[], [5], [5, 6, 7, 8, 9]])
def test_cache_changes_no_token(twin: Any, prompt: list[int], temperature: float) -> None:
    text, draws = [EOT, *prompt], stream(9, "sample")
    for _ in range(8):
        with torch.no_grad():
            logits = twin.logits(twin.encode(torch.tensor([text])).hidden[0, -1])
        if temperature:
            p = torch.softmax(logits / temperature, -1).numpy()
            text.append(int((np.cumsum(p) <= draws.random()).sum()))
        else:
            text.append(int(logits.argmax()))
    sampler = _sampler(twin, temperature=temperature, eot_id=None)
    [made] = sampler.generate([prompt], 8, [9])
    assert made.ids == text[1 + len(prompt) :]
    assert (made.forwards, made.prefill_forwards, made.encoding_forwards) == (8, 1, 8)
    assert made.token_forwards == 1 + len(prompt) + 7
    assert made.reason == "length"


@pytest.mark.parametrize("prompt", [[], [5], [5, 6, 7]])
def test_clean_stream_of_a_denoiser_reads_the_prompt_as_it_is(
    opinionated: Any, tiny_layout: Layout, prompt: list[int]
) -> None:
    model = opinionated(tiny_layout)
    text = prompt or [EOT]
    for _ in range(8):
        with torch.no_grad():
            logits = model.logits(model.encode(torch.tensor([text])).hidden[0, -1])
        text = [*text, int(logits.argmax())]
    sampler = AutoregressiveSampler(
        model=model, temperature=0.0, bos_id=EOT, eot_id=None, bos="if_empty"
    )
    [made] = sampler.generate([prompt], 8, [0])
    assert made.ids == text[len(prompt or [EOT]) :]
    assert made.token_forwards == len(prompt or [EOT]) + 7


def test_row_depends_neither_on_neighbours_nor_on_order(twin: Any) -> None:
    prompts = [[1, 2], [3], [4, 5], [1, 2], []]
    seeds = [0, 1, 2, 3, 4]
    # A text ends at an id that comes up in the first of several rows, so that the batch shrinks.
    end = _sampler(twin, eot_id=None).generate(prompts, 10, seeds)[0].ids[3]
    sampler = _sampler(twin, eot_id=end)
    together = sampler.generate(prompts, 10, seeds)
    assert together == [
        sampler.generate([p], 10, [s])[0] for p, s in zip(prompts, seeds, strict=True)
    ]
    assert sampler.generate(prompts[::-1], 10, seeds[::-1]) == together[::-1]
    assert {made.reason for made in together} == {"end_of_text", "length"}


# BR-69
def test_end_of_text_is_cut_off_and_only_generated_positions_are_scanned(
    scripted: Any, tiny_layout: Layout
) -> None:
    model = scripted(lambda *_: torch.zeros(4, 37), layout=tiny_layout, denoise_steps=1)

    def next_logits(tag: int, length: int, step: int, text: Tensor) -> Tensor:
        logits = torch.zeros(37)
        logits[EOT if tag == 1 and length == 3 + 5 else 6 + tag] = 60.0
        return logits

    model.next_logits = next_logits
    made = _sampler(model).generate([[1, EOT], [2, EOT]], 9, [0, 1])
    assert (made[0].ids, made[0].reason, made[0].forwards) == ([7] * 5, "end_of_text", 6)
    assert (made[1].ids, made[1].reason, made[1].forwards) == ([8] * 9, "length", 9)
    assert model.batches == [2] * 6 + [1] * 3


def test_row_that_turns_to_nan_is_told(scripted: Any, tiny_layout: Layout) -> None:
    model = scripted(lambda *_: torch.zeros(4, 37), layout=tiny_layout, denoise_steps=1)

    def next_logits(tag: int, length: int, step: int, text: Tensor) -> Tensor:
        return torch.full((37,), math.nan if tag == 1 and length == 4 else 0.0)

    model.next_logits = next_logits
    made = _sampler(model, eot_id=None).generate([[1], [2]], 6, [0, 1])
    assert [row.reason for row in made] == ["not_finite", "length"]
    assert [len(row.ids) for row in made] == [2, 6]


def test_without_a_number_the_text_goes_on_to_the_end_of_the_window(twin: Any) -> None:
    made = _sampler(twin, eot_id=None).generate([[1] * 3, [], [1] * 16], None, [0, 1, 2])
    assert [len(row.ids) for row in made] == [13, 16, 0]
    assert {row.reason for row in made} == {"window"}


def test_answer_beyond_the_window_is_refused(twin: Any) -> None:
    with pytest.raises(InputError, match="trained window of 16 tokens"):
        _sampler(twin).generate([[1] * 10], 7, [0])


# BR-28
def test_garbage_in_unused_cache_slots_reaches_no_token(twin: Any, caches_full: Any) -> None:
    results = []
    for is_garbage in (False, True):
        with caches_full(is_garbage=is_garbage):
            results.append(_sampler(twin, eot_id=None).generate([[1, 2], [3], []], 9, [0, 1, 2]))
    assert results[0] == results[1]
    assert all(made.reason == "length" for made in results[0])
