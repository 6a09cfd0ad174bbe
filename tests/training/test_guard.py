"""Is a step that may not run told from one that may, and does a hopeless run end?"""

import math

import pytest

from canvaslm.checkpoint_state import SkippedStep
from canvaslm.errors import GateClosedError
from canvaslm.training.guard import NO_TARGETS, fault, stop_after_too_many


def skipped(*steps):
    return [
        SkippedStep(step=step, first_window=4 * step, last_window=4 * step + 3, cause="loss is nan")
        for step in steps
    ]


def test_a_finite_step_may_run():
    assert fault(nats=3.0, n_targets=2, gradient_norm=1.0) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_value_that_is_not_finite_is_a_fault_with_its_value(value):
    assert fault(nats=value, n_targets=2, gradient_norm=1.0) == f"loss is {value}"
    assert fault(nats=1.0, n_targets=2, gradient_norm=value) == f"gradient norm is {value}"


def test_no_targets_is_its_own_case():
    assert fault(nats=0.0, n_targets=0, gradient_norm=0.0) == NO_TARGETS


def test_the_run_ends_at_the_limit_and_names_windows_and_cause():
    with pytest.raises(GateClosedError, match=r"3 steps in a row .*loss is nan.* 20 to 31"):
        stop_after_too_many(skipped(1, 5, 6, 7), steps_done=8, limit=3)


@pytest.mark.parametrize(
    ("steps", "done"),
    [
        ((5, 6, 7), 9),  # a good step since
        ((1, 2, 6, 7), 8),  # a good step between
        ((), 3),
    ],
)
def test_good_steps_between_keep_the_run_alive(steps, done):
    stop_after_too_many(skipped(*steps), steps_done=done, limit=3)
