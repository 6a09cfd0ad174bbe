"""Is a step that may not run told from one that may, and a run that cannot go on noticed?"""

import math

import pytest
import torch

from canvaslm.checkpoint_state import SkippedStep
from canvaslm.training.guard import MARKED, NO_TARGETS, damage, fault, is_bad, streak


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


@pytest.mark.parametrize(
    ("steps", "done", "found"),
    [
        ((5, 6, 7), 8, (5, 3, 4)),
        ((5, 6, 7), 9, (None, 0, 8)),  # a good step since
        ((1, 2, 6, 7), 8, (6, 2, 5)),  # a good step between
        ((0, 1), 2, (0, 2, None)),  # none before
        ((), 3, (None, 0, 2)),
        ((), 0, (None, 0, None)),
    ],
)
def test_a_streak_goes_back_to_the_latest_update(steps, done, found):
    seen = streak(skipped(*steps), steps_done=done)
    assert (seen.first_bad, seen.n_bad, seen.last_update) == found


def test_what_is_skipped_on_purpose_is_no_bad_step_and_ends_no_streak():
    causes = {4: "loss is nan", 5: MARKED, 6: NO_TARGETS, 7: "gradient norm is inf"}
    items = [
        SkippedStep(step=step, first_window=4 * step, last_window=4 * step + 3, cause=cause)
        for step, cause in causes.items()
    ]
    seen = streak(items, steps_done=8)
    assert (seen.first_bad, seen.n_bad, seen.last_update) == (4, 2, 3)
    assert not any(is_bad(cause) for cause in ("", MARKED, NO_TARGETS))


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq", "ema"])
def test_damage_is_named_by_tensor(kind):
    """Whatever state there is, an average among it."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["ema"] = parameter.detach().clone()
    assert damage(model, optimizer) is None
    broken = model.bias if kind == "weight" else optimizer.state[model.bias][kind]
    with torch.no_grad():
        broken[1] = math.inf
    assert damage(model, optimizer) == f"{kind} of bias is not finite"
