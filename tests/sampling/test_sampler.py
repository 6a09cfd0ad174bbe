"""What do the steps of a canvas accept and emit, and what does a row know of its neighbours?

Letters: V vocabulary, L canvas tokens. Scripts get (row tag, start, step, noisy ids).
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from canvaslm.layout import Layout
from canvaslm.randomness import stream
from canvaslm.sampling.acceptance import EntropyBound
from canvaslm.sampling.one_pass import answer
from canvaslm.sampling.prediction import Prediction
from canvaslm.sampling.sampler import CanvasStep
from canvaslm.sampling.stopping import Never, StableAndConfident
from samplers import EVIDENCES, RULES, make_sampler, sure_of


def test_times_go_down_from_one(scripted: Any, tiny_layout: Layout) -> None:
    model = scripted(lambda *_: torch.zeros(4, 37), layout=tiny_layout, denoise_steps=4)
    make_sampler(model).generate([[1]], 8, [0])
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
    sampler = make_sampler(model, acceptance=OnlyThree(), denoise_steps=3, on_step=states.append)
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
    sampler = make_sampler(
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
        sampler = make_sampler(model, acceptance=RULES[rule][0], stopping=stopping, denoise_steps=6)
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
    sampler = make_sampler(
        model, acceptance=EntropyBound(bound=0.0), denoise_steps=3, on_step=states.append
    )
    [made] = sampler.generate([[1]], 4, [0])
    assert [state.accepted[0].nonzero().tolist() for state in states] == [[[0]], [[1]], [[2]]]
    assert [int(state.tokens[0, state.step]) for state in states] == [30, 31, 32]
    assert made.ids == [0, 0, 32, 0]


def test_self_conditioning_is_shown_the_step_before(scripted: Any, tiny_layout: Layout) -> None:
    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        return sure_of([step] * 4)

    model = scripted(script, layout=tiny_layout, denoise_steps=3, self_conditioning="output")
    make_sampler(model, denoise_steps=3).generate([[1]], 8, [0])
    assert [None if guess is None else int(guess[0, 0].argmax()) for guess in model.guesses] == [
        None, 0, 1, None, 0, 1,
    ]  # fmt: skip
    without = scripted(script, layout=tiny_layout, denoise_steps=3)
    make_sampler(without, denoise_steps=3).generate([[1]], 8, [0])
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
    [made] = make_sampler(model, temperatures=(0.0, 0.0)).generate([[1]], 4, [0])
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
    sampler = make_sampler(
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
        lambda tag, *_: sure_of([{1: 3, 2: 7}[tag]] * 4), layout=tiny_layout, denoise_steps=4
    )
    made = make_sampler(model, temperatures=(1.0, 1.0)).generate([[1], [2]], 8, [0, 0])
    assert [row.ids for row in made] == [[3] * 8, [7] * 8]


# BR-54
def test_finished_row_is_frozen_while_its_neighbour_goes_on(
    scripted: Any, tiny_layout: Layout
) -> None:
    # The argmax canvas changes until these steps; two repeats later the row stops.
    changes_until = {1: 2, 2: 4, 3: 10}

    def script(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        return sure_of([min(step + 1, changes_until[tag])] * 4)

    def run(prompts: list[list[int]]) -> tuple[list[Any], Any]:
        model = scripted(script, layout=tiny_layout, denoise_steps=16)
        sampler = make_sampler(
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
        lambda tag, start, step, noisy: sure_of([5 if step == 0 else 6] * 4),
        layout=tiny_layout,
        denoise_steps=9,
    )
    stopping = StableAndConfident(threshold=0.005, patience=patience)
    [made] = make_sampler(
        model, acceptance=EntropyBound(bound=0.1), stopping=stopping, denoise_steps=9
    ).generate([[1]], 4, [0])
    assert made.forwards == 1 + steps + 1


def test_never_takes_all_steps_whatever_the_entropy(scripted: Any, tiny_layout: Layout) -> None:
    for logits in (sure_of([5] * 4), torch.zeros(4, 37)):
        model = scripted(lambda *_, logits=logits: logits, layout=tiny_layout, denoise_steps=7)
        [made] = make_sampler(model, denoise_steps=7).generate([[1]], 8, [0])
        assert made.forwards == 1 + 2 * 8
