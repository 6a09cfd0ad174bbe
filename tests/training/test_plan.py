"""Does the plan refuse nonsense, and is the learning rate a function of the step alone?"""

import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from canvaslm.training.plan import learning_rate


def rates(params):
    return [learning_rate(step, params) for step in range(params.steps)]


def test_warmup_rises_linearly_to_the_highest_rate(tiny_recipe):
    params = tiny_recipe(steps=10, warmup_steps=4, learning_rate=0.4).pretrain
    assert rates(params)[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_cosine_is_halfway_in_the_middle_and_ends_at_the_final_share(tiny_recipe):
    params = tiny_recipe(steps=14, warmup_steps=4, learning_rate=1.0).pretrain
    assert learning_rate(8, params) == pytest.approx(0.1 + 0.9 / 2)  # 5 of 10 steps done
    assert learning_rate(13, params) == pytest.approx(0.1)
    assert rates(params)[3:] == sorted(rates(params)[3:], reverse=True)


def test_stable_schedule_stays_high_then_falls_linearly(tiny_recipe):
    params = tiny_recipe(
        schedule="warmup_stable_decay",
        steps=10,
        warmup_steps=2,
        decay_steps=4,
        learning_rate=1.0,
        final_learning_rate_share=0.2,
    ).pretrain
    expected = [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates(params) == pytest.approx(expected)


def test_schedule_counts_optimiser_steps_whatever_the_micro_batch(tiny_recipe):
    """With accumulation over 4 the list is the same ten rates as without (BR-36)."""
    whole = tiny_recipe(steps=10, windows_per_step=8, micro_batch_windows=8).pretrain
    cut = tiny_recipe(steps=10, windows_per_step=8, micro_batch_windows=2).pretrain
    assert rates(whole) == rates(cut)
    assert len(rates(cut)) == 10


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay"])
@pytest.mark.parametrize("warmup", [0, 1, 6])
def test_every_schedule_is_positive_and_bounded_by_the_highest_rate(tiny_recipe, schedule, warmup):
    params = tiny_recipe(schedule=schedule, steps=6, warmup_steps=warmup, decay_steps=0).pretrain
    assert all(0 < rate <= params.learning_rate * (1 + 1e-12) for rate in rates(params))
    assert max(rates(params)) > 0.9 * params.learning_rate


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"micro_batch_windows": 5}, "micro_batch_windows (5) at most windows_per_step (4)"),
        ({"warmup_steps": 16}, "warmup_steps (16) and decay_steps (0) to fit in steps (15)"),
        (
            {"schedule": "warmup_stable_decay", "warmup_steps": 10, "decay_steps": 6},
            "warmup_steps (10) and decay_steps (6) to fit in steps (15)",
        ),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": -1}, "keep_last"),
        ({"beta2": 1.0}, "beta2"),
        ({"steps": 0}, "steps"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(tiny_recipe, wrong, told):
    with pytest.raises(ValidationError, match=re.escape(told)):
        tiny_recipe(**wrong)


def test_the_plan_imports_no_torch():
    code = "import sys, canvaslm.training.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_twin_has_one_token_per_canvas_and_no_corruption(tiny_recipe):
    twin = tiny_recipe("autoregressive")
    assert (twin.layout.canvas_tokens, twin.layout.window_tokens) == (1, 16)
    assert (twin.model.time_width, twin.model.self_conditioning) == (0, "off")
    assert twin.diffusion is None
