"""Was the learning rate applied, and was it that of the plan?

The plan is stated here once more, from the knobs alone. What was applied is read off the updates.
"""

import math
from collections.abc import Sequence

from canvaslm.run_audit.applied import Rate
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.definitions import Rule, highest_rate
from canvaslm.run_audit.digest import Digest
from canvaslm.run_audit.reading import fresh_model
from canvaslm.run_audit.subject import Subject
from canvaslm.training.plan import PretrainParams

_LARGEST_GAP = 0.01  # of a rate read off an update, which float32 rounds
_LARGEST_LOGGED_GAP = 1e-9  # of a rate that was written down
_APPLIED = (
    "python -m pytest -q tests/training/test_optimizer.py::test_first_update_equals_adamw_by_hand"
)
_PLAN = (
    "python -m pytest -q "
    "tests/training/test_plan.py::test_schedule_counts_optimiser_steps_whatever_the_micro_batch"
)
_ONE_RATE = (
    "python -m pytest -q "
    "tests/training/test_run.py::test_the_optimiser_uses_one_rate_a_step_however_the_step_is_cut"
)


def due_rate(step: int, params: PretrainParams, *, rule: Rule = "adamw") -> float:
    """The learning rate of optimiser step ``step``, counted from 0, as the knobs define it.

    A straight line up over the warm-up, whose last step has the whole rate; then half a cosine down
    to the final share on the last step, or the whole rate up to a straight line down over the last
    ``decay_steps``. Each rule has a highest rate of its own, and the same shape.
    """
    high = highest_rate(rule, params)
    low = high * params.final_learning_rate_share
    done = step + 1
    if done <= params.warmup_steps:
        return high * done / params.warmup_steps
    if params.schedule == "cosine":
        angle = math.pi * (done - params.warmup_steps) / (params.steps - params.warmup_steps)
        return low + (high - low) * 0.5 * (1.0 + math.cos(angle))
    left = params.steps - done
    if left >= params.decay_steps:
        return high
    return low + (high - low) * left / params.decay_steps


def check_applied(subject: Subject, steps: Sequence[Digest], name: str) -> Check:
    """Updates have a length, and the finished weights are not those of the start.

    Args:
        subject: the run.
        steps: drilled steps of fresh weights.
        name: of the check.
    """
    params = subject.recipe.pretrain
    rates: list[tuple[Rule, Rate]] = [pair for step in steps for pair in step.rates.items()]
    has_rates = all(rate.value > 1e-6 * highest_rate(rule, params) for rule, rate in rates)
    moved = _moved_share(subject)
    is_same = moved == 0 and _has_updates(subject) and subject.state.identity.parent is None
    return decide(
        "updates",
        name,
        holds=has_rates and not is_same,
        measured=f"rates read off {len(steps)} updates: {_listed(rates)}; {moved:.1%} of the "
        "finished weights differ from the initial draw of the seed",
        expected="every update has a rate above 0, and the finished weights have moved",
        first_test=_APPLIED,
    )


def check_schedule(
    subject: Subject, whole: Sequence[Digest], cut: Sequence[Digest], name: str
) -> Check:
    """Each logged rate is the plan's, and so is each applied one, however a step is cut.

    Args:
        subject: the run.
        whole: drilled steps of one pass each.
        cut: the same steps of many passes each.
        name: of the check.
    """
    params = subject.recipe.pretrain
    off = [row for row in subject.loss_rows if not _is_due(row, params)]
    drilled = [*whole, *cut]
    wrong: list[tuple[Digest, Rule]] = [
        (step, rule) for step in drilled for rule in _off_plan(step, params)
    ]
    n_wrong = len({id(step) for step, _ in wrong})
    told = f"{len(subject.loss_rows) - len(off)} of {len(subject.loss_rows)} rows of loss.csv"
    if off:
        step = int(off[0]["step"]) - 1
        told += f" (step {step}: {off[0]['learning_rate']}, not {due_rate(step, params):.6g})"
    told += f"; {len(drilled) - n_wrong} of {len(drilled)} drilled updates, cut and whole"
    if wrong:
        first, rule = wrong[0]
        step = first.record.step
        due = due_rate(step, params, rule=rule)
        told += f" (step {step}{_of(rule)}: {_told(first.rates[rule])}, not {due:.6g})"
    return decide(
        "updates",
        name,
        holds=not off and not wrong,
        measured=f"on the schedule: {told}",
        expected=f"all, by optimiser step: {params.warmup_steps} steps up to "
        f"{params.learning_rate:g}, {params.schedule} to "
        f"{params.learning_rate * params.final_learning_rate_share:g} at step {params.steps - 1}"
        + (f", and {_share(params):g} times that for Muon" if params.optimizer == "muon" else ""),
        first_test=_ONE_RATE if wrong else _PLAN,
    )


def _moved_share(subject: Subject) -> float:
    """Share of all weights that are another number than at the start."""
    fresh = {name: p.detach() for name, p in fresh_model(subject).named_parameters()}
    finished = {name: p.detach().cpu() for name, p in subject.model.named_parameters()}
    moved = sum(int((finished[name] != value).sum()) for name, value in fresh.items())
    return moved / sum(value.numel() for value in fresh.values())


def _has_updates(subject: Subject) -> bool:
    progress = subject.state.progress
    return progress.step > len(progress.skipped)


def _is_due(row: dict[str, str], params: PretrainParams) -> bool:
    """Whether the rate of a row is that of its own step, the last of those it stands for."""
    due = due_rate(int(row["step"]) - 1, params)
    return _close(float(row["learning_rate"]), due, _LARGEST_LOGGED_GAP)


def _off_plan(step: Digest, params: PretrainParams) -> list[Rule]:
    """The rules whose rate is not the plan's, as far as float32 tells; NaN is on no plan."""
    off: list[Rule] = []
    for rule, rate in step.rates.items():
        due = due_rate(step.record.step, params, rule=rule)
        if not abs(rate.value - due) <= _LARGEST_GAP * due + rate.slack:
            off.append(rule)
    return off


def _close(found: float, due: float, share: float) -> bool:
    """NaN is close to nothing."""
    return abs(found - due) <= share * due + 1e-15


def _listed(rates: Sequence[tuple[Rule, Rate]]) -> str:
    return ", ".join(_told(rate) + _of(rule) for rule, rate in rates)


def _told(rate: Rate) -> str:
    return f"{rate.value:.6g}" if math.isfinite(rate.value) else "no update"


def _of(rule: Rule) -> str:
    """Whose rate it is, where that is not plain."""
    return " of Muon" if rule == "muon" else ""


def _share(params: PretrainParams) -> float:
    return params.muon_learning_rate / params.learning_rate
