"""Is an arm better than the baseline, and is it still when both have had the same seconds?

What wins per step need not win per second. The baseline trained for fewer and for more steps gives
a curve of its figure over cost; an arm is held against that curve at its own steps, seconds and
floating-point operations, and counts as better only where it is better on all three.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from canvaslm.ablation.interval import Interval, paired_interval
from canvaslm.ablation.rows import Row
from canvaslm.ablation.spec import Decision, Spec

Axis = Literal["steps", "seconds", "flops"]
AXES: tuple[Axis, ...] = get_args(Axis)
Judgement = Literal["better", "worse", "same", "undecided", "not_measured"]

_SAME_COST = 0.01  # two costs this near are one: seconds of a step are not known better


@dataclass(frozen=True, kw_only=True)
class Against:
    """An arm against the baseline at one and the same cost.

    Attributes:
        cost: of the arm; None where it was not measured.
        baseline: figure of the baseline at that cost; None where no length of it comes near.
        interval: of the difference, None as well then.
        judgement: what the rule says.
    """

    cost: float | None
    baseline: float | None
    interval: Interval | None
    judgement: Judgement


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one setting.

    Attributes:
        name: the arm's.
        by_seed: the figure of each seed.
        also: mean over seeds of what is shown beside it.
        costs: of one training.
        as_run: the difference to the baseline whatever either cost; None for the baseline.
        against: the comparison at equal cost, by axis; empty for the baseline and its lengths.
        judgement: what the rule says of all axes together; None where nothing is judged.
    """

    name: str
    by_seed: tuple[float, ...]
    also: tuple[float, ...]
    costs: Mapping[Axis, float | None]
    as_run: Interval | None
    against: Mapping[Axis, Against]
    judgement: Judgement | None

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return math.fsum(self.by_seed) / len(self.by_seed)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; NaN with a single one."""
        return float(np.std(self.by_seed, ddof=1)) if len(self.by_seed) > 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """The rows of one arm in the order of the seeds, and what one training of it cost."""

    amounts: np.ndarray  # (S, G)
    costs: Mapping[Axis, float | None]


def compare(
    spec: Spec, rows: Sequence[Row], step_seconds: Mapping[str, float]
) -> dict[str, Result]:
    """Hold every arm against the baseline.

    Args:
        spec: the ablation.
        rows: of every arm and length with every seed, scored on the same documents.
        step_seconds: of one optimiser step, by arm; without an arm its seconds are not measured.
    """
    by_arm: dict[str, list[Row]] = {}
    for row in rows:
        by_arm.setdefault(row.trial.arm, []).append(row)
    settings = {name: _setting(name, mine, step_seconds) for name, mine in by_arm.items()}
    tokens = rows[0].tokens
    lengths = [settings[name] for name in (spec.baseline, *spec.reference_lengths)]
    results = {}
    for name, mine in by_arm.items():
        is_judged = name in spec.arms and name != spec.baseline
        against: dict[Axis, Against] = {
            axis: _against(settings[name], lengths, axis, tokens, spec)
            for axis in (AXES if is_judged else ())
        }
        results[name] = Result(
            name=name,
            by_seed=tuple(row.figures[0] for row in mine),
            also=tuple(np.mean([row.figures[1:] for row in mine], axis=0).tolist()),
            costs=settings[name].costs,
            as_run=None
            if name == spec.baseline
            else _difference(settings[name], lengths[0].amounts, tokens, spec.decision),
            against=against,
            judgement=_together([x.judgement for x in against.values()]) if against else None,
        )
    return results


def judge(interval: Interval, decision: Decision, better: Literal["lower", "higher"]) -> Judgement:
    """What the rule says of a difference; one seed decides nothing about the next."""
    if interval.n_seeds < 2 or not math.isfinite(interval.low):
        return "undecided"
    margin = decision.paired_interval_excludes
    least, most = interval.low, interval.high
    if better == "lower":
        least, most = -most, -least  # of the gain
    if least > margin:
        return "better"
    if most < -margin:
        return "worse"
    return "same" if -margin <= least and most <= margin else "undecided"


def at_cost(curve: Sequence[tuple[float, np.ndarray]], cost: float) -> np.ndarray | None:
    """The amounts of the baseline at a cost, linear in its logarithm between two lengths.

    Args:
        curve: (cost, amounts) of each length.
        cost: where to read it.

    Returns:
        The amounts, or None outside of what was run.
    """
    points = sorted(curve, key=lambda point: point[0])
    for known, amounts in points:
        if abs(cost / known - 1) <= _SAME_COST:
            return amounts
    for (low, before), (high, after) in itertools.pairwise(points):
        if low < cost < high:
            share = math.log(cost / low) / math.log(high / low)
            return (1 - share) * before + share * after
    return None


def _setting(name: str, rows: Sequence[Row], step_seconds: Mapping[str, float]) -> _Setting:
    steps = float(rows[0].steps)
    seconds = steps * step_seconds[name] if name in step_seconds else None
    return _Setting(
        amounts=np.stack([row.amounts for row in rows]),
        costs={"steps": steps, "seconds": seconds, "flops": rows[0].flops},
    )


def _against(
    arm: _Setting, lengths: Sequence[_Setting], axis: Axis, tokens: np.ndarray, spec: Spec
) -> Against:
    cost = arm.costs[axis]
    curve = [(x, length.amounts) for length in lengths if (x := length.costs[axis]) is not None]
    found = None if cost is None else at_cost(curve, cost)
    if found is None:
        return Against(cost=cost, baseline=None, interval=None, judgement="not_measured")
    interval = _difference(arm, found, tokens, spec.decision)
    return Against(
        cost=cost,
        baseline=float((found.sum(axis=1) / tokens.sum()).mean()),
        interval=interval,
        judgement=judge(interval, spec.decision, spec.measure.better),
    )


def _difference(
    arm: _Setting, baseline: np.ndarray, tokens: np.ndarray, decision: Decision
) -> Interval:
    return paired_interval(arm.amounts, baseline, tokens, confidence=decision.confidence)


def _together(judgements: Sequence[Judgement]) -> Judgement:
    """A gain counts where it holds on every axis, and so does a loss."""
    if len(set(judgements)) == 1:
        return judgements[0]
    return "not_measured" if "not_measured" in judgements else "undecided"
