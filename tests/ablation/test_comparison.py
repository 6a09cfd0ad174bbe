import math
from typing import Any

import numpy as np
import pytest

from canvaslm.ablation.arms import Trial
from canvaslm.ablation.comparison import at_cost, compare, judge
from canvaslm.ablation.interval import Interval
from canvaslm.ablation.rows import Row
from canvaslm.ablation.spec import Decision, Spec

TOKENS = np.array([10.0, 20.0, 30.0])
RULE = Decision(paired_interval_excludes=0.1, confidence=0.95)
SPEC = Spec.model_validate(
    {
        "id": "x", "question": "?", "hypothesis": "!", "profile": "ci", "overrides": {},
        "varies": "model.width", "arms": {"plain": {}, "other": {"model.width": 64}},
        "baseline": "plain", "seeds": [1, 2], "does_not_establish": ["more"],
        "reference_lengths": {"half": {"pretrain.steps": 50}, "twice": {"pretrain.steps": 200}},
        "decision": RULE.model_dump(), "timing": {"steps": 1, "rounds": 1, "warmup_rounds": 0},
    }
)  # fmt: skip
# The baseline loses 0.5 nats with each doubling.
LEVELS = {"half": (50, 5.5), "plain": (100, 5.0), "twice": (200, 4.5)}


def row(arm: str, seed: int, level: float, steps: int, flops: float) -> Row:
    nats = (level + 0.001 * seed) * TOKENS
    return Row(
        trial=Trial(arm=arm, seed=seed, name=f"x-{arm}-s{seed}", params={}),
        rev="r",
        figures=(float(nats.sum() / TOKENS.sum()),),
        documents=np.arange(3),
        tokens=TOKENS,
        amounts=nats,
        steps=steps,
        flops=flops,
        model_sha256=f"{arm}{seed}",
    )


def compared(level: float, *, flops: float, seconds: float | None, spec: Spec = SPEC) -> Any:
    """The arm `other`, as many steps as the baseline, at so many times its operations."""
    rows = [row(arm, seed, x, steps, 1e6 * steps) for arm, (steps, x) in LEVELS.items()
            for seed in spec.seeds if arm in (*spec.arms, *spec.reference_lengths)]  # fmt: skip
    rows += [row("other", seed, level, 100, 1e8 * flops) for seed in spec.seeds]
    step_seconds = dict.fromkeys(LEVELS, 0.2) | ({"other": 0.2 * seconds} if seconds else {})
    return compare(spec, rows, step_seconds)["other"]


def test_a_curve_is_straight_over_the_logarithm_of_cost() -> None:
    curve = [(100.0, np.array([[5.0]])), (50.0, np.array([[5.5]])), (200.0, np.array([[4.5]]))]
    for cost, level in ((50, 5.5), (100 * math.sqrt(2), 4.75), (75, 5.5 - 0.5 * math.log2(1.5))):
        found = at_cost(curve, cost)
        assert found is not None
        assert found.item() == pytest.approx(level)


def test_beyond_the_ends_of_a_curve_nothing_is_measured() -> None:
    curve = [(50.0, np.zeros((1, 1))), (100.0, np.ones((1, 1)))]
    assert at_cost(curve, 49) is None
    assert at_cost(curve, 102) is None
    for cost in (49.6, 100.9):  # within a percent, which is as well as seconds are known
        assert at_cost(curve, cost) is not None


@pytest.mark.parametrize(
    ("low", "high", "lower_is_better", "higher_is_better"),
    [(-0.3, -0.2, "better", "worse"), (0.2, 0.3, "worse", "better"),
     (-0.3, -0.05, "undecided", "undecided"), (-0.05, 0.05, "same", "same"),
     (-0.3, 0.3, "undecided", "undecided"), (math.nan, math.nan, "undecided", "undecided")],
)  # fmt: skip
def test_a_difference_counts_where_its_interval_lies_beyond_the_margin(
    low: float, high: float, lower_is_better: str, higher_is_better: str
) -> None:
    found = Interval(difference=(low + high) / 2, low=low, high=high, n_seeds=2)
    assert judge(found, RULE, "lower") == lower_is_better
    assert judge(found, RULE, "higher") == higher_is_better


def test_one_seed_decides_nothing() -> None:
    sure = Interval(difference=-9.0, low=-9.1, high=-8.9, n_seeds=1)
    assert judge(sure, RULE, "lower") == "undecided"


def test_a_gain_counts_where_it_holds_on_all_three_axes() -> None:
    found = compared(4.0, flops=2.0, seconds=1.5)
    assert found.judgement == "better"
    differences = {axis: x.interval.difference for axis, x in found.against.items()}
    expected = {"steps": -1.0, "seconds": -1.0 + 0.5 * math.log2(1.5), "flops": -0.5}
    assert differences == pytest.approx(expected)
    assert found.costs == pytest.approx({"steps": 100, "seconds": 30, "flops": 2e8})


def test_what_wins_by_steps_and_not_by_operations_is_no_gain() -> None:
    found = compared(4.5, flops=2.0, seconds=1.5)
    assert {axis: x.judgement for axis, x in found.against.items()} == {
        "steps": "better", "seconds": "better", "flops": "same"}  # fmt: skip
    assert found.judgement == "undecided"


def test_where_one_axis_was_not_measured_no_gain_counts() -> None:
    for found in (compared(4.0, flops=3.0, seconds=1.0), compared(4.0, flops=1.0, seconds=None)):
        judged = [x.judgement for x in found.against.values()]
        assert sorted(judged) == ["better", "better", "not_measured"]
        assert found.judgement == "not_measured"


def test_an_arm_of_other_length_is_held_against_the_baseline_of_its_own() -> None:
    """Half of the steps: a longer baseline would make it look bad, its own length does not."""
    rows = [row(arm, seed, x, steps, 1e6 * steps) for arm, (steps, x) in LEVELS.items()
            for seed in SPEC.seeds]  # fmt: skip
    rows += [row("other", seed, 5.2, 50, 1e6 * 50) for seed in SPEC.seeds]
    found = compare(SPEC, rows, dict.fromkeys((*LEVELS, "other"), 0.2))["other"]
    assert found.judgement == "better"
    assert found.as_run is not None
    assert found.as_run.difference == pytest.approx(0.2)


def test_the_baseline_and_its_lengths_are_shown_and_not_judged() -> None:
    rows = [row(arm, seed, x, steps, 1e6 * steps) for arm, (steps, x) in LEVELS.items()
            for seed in SPEC.seeds]  # fmt: skip
    found = compare(SPEC, rows, {})
    assert {result.judgement for result in found.values()} == {None}
    assert found["plain"].mean == pytest.approx(5.0015)
    assert found["plain"].spread == pytest.approx(0.001 / math.sqrt(2))
