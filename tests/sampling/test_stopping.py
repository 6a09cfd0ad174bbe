import math

import pytest
import torch

from canvaslm.sampling.prediction import Prediction
from canvaslm.sampling.stopping import MeanEntropy, Never, StableAndConfident, Stopping


def _step(number: int, argmax: list[list[int]], entropy: list[float]) -> Prediction:
    ids = torch.tensor(argmax)
    nats = torch.tensor(entropy, dtype=torch.float64)[:, None].expand(ids.shape)
    return Prediction(
        step=number,
        n_steps=100,
        candidates=ids,
        argmax=ids,
        confidence=torch.ones(ids.shape, dtype=torch.float64),
        entropy=nats,
    )


def _first_stop(rule: Stopping, steps: list[Prediction]) -> list[int | None]:
    """The step, counted from 1, at which each row stops."""
    n_rows = steps[0].argmax.shape[0]
    streak = torch.zeros(n_rows, dtype=torch.int64)
    stopped: list[int | None] = [None] * n_rows
    before = None
    for number, now in enumerate(steps, start=1):
        streak = rule.extend(streak, now, before)
        for row, is_done in enumerate(rule.is_done(streak, now).tolist()):
            if is_done and stopped[row] is None:
                stopped[row] = number
        before = now
    return stopped


def _story(canvases: str, entropy: list[float]) -> list[Prediction]:
    return [
        _step(number, [[ord(letter), 7]], [nats])
        for number, (letter, nats) in enumerate(zip(canvases, entropy, strict=True))
    ]


# BR-53
@pytest.mark.parametrize(("patience", "stops_at"), [(0, 1), (1, 3), (2, 4)])
def test_patience_counts_extra_repeats(patience: int, stops_at: int) -> None:
    rule = StableAndConfident(threshold=0.005, patience=patience)
    assert _first_stop(rule, _story("ABBBBB", [0.001] * 6)) == [stops_at]


def test_stable_canvas_waits_for_confidence_and_confident_canvas_for_stability() -> None:
    rule = StableAndConfident(threshold=0.005, patience=1)
    assert _first_stop(rule, _story("AAAAA", [1.0, 1.0, 1.0, 0.001, 1.0])) == [4]
    assert _first_stop(rule, _story("ABABA", [0.001] * 5)) == [None]
    assert _first_stop(rule, _story("AAA", [0.005] * 3)) == [None]


def test_mean_entropy_wants_consecutive_steps_below_the_threshold() -> None:
    low, high = 0.01, 0.5
    story = _story("ABCDEF", [low, high, low, low, low, low])
    assert _first_stop(MeanEntropy(threshold=0.1, patience=1), story) == [1]
    assert _first_stop(MeanEntropy(threshold=0.1, patience=2), story) == [4]
    assert _first_stop(MeanEntropy(threshold=0.1, patience=5), story) == [None]


def test_never_ignores_entropy_altogether() -> None:
    assert _first_stop(Never(), _story("AAAA", [0.0] * 4)) == [None]


# BR-54
def test_rows_stop_on_their_own() -> None:
    steps = [
        _step(number, [[5, 5], [number if number < 3 else 3, 0]], [0.001, 0.001])
        for number in range(6)
    ]
    assert _first_stop(StableAndConfident(threshold=0.005, patience=1), steps) == [2, 5]


# BR-61
def test_entropy_that_is_not_finite_is_never_low() -> None:
    story = _story("AAAA", [math.nan] * 4)
    for rule in (
        MeanEntropy(threshold=9.0, patience=1),
        StableAndConfident(threshold=9.0, patience=0),
    ):
        assert _first_stop(rule, story) == [None]
