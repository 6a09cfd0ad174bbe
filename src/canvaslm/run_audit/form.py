"""Is an update that of its definition, in its direction and in its decay?"""

from canvaslm.run_audit.applied import (
    Rate,
    applied_decay,
    applied_rate,
    unexplained,
)
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.definitions import Rule, due_decay, due_rule, rule_found
from canvaslm.run_audit.drill import StepSeen
from canvaslm.run_audit.subject import Subject
from canvaslm.training.plan import PretrainParams

_UPDATE_GAP = 0.01  # of the rate, between an update and the definition
_DECAY_GAP = 0.25  # of the decay, that is left to rounding, and as much again to be told
_SOME_DECAY = 0.01  # that would be told where none is due
_SHOWN = 4
_FIRST: dict[Rule, str] = {
    "adamw": "python -m pytest -q "
    "tests/training/test_optimizer.py::test_first_update_equals_adamw_by_hand",
    "muon": "python -m pytest -q "
    "tests/training/test_optimizer.py::test_updates_of_muon_are_those_of_its_definition",
}
_DECAY = (
    "python -m pytest -q tests/training/test_optimizer.py::test_matrices_decay_and_nothing_else"
)
_SPLIT = (
    "python -m pytest -q tests/training/test_optimizer.py::"
    "test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest"
)
_NAMES: dict[Rule, str] = {"adamw": "AdamW", "muon": "Muon"}


def check_form(subject: Subject, seen: StepSeen, name: str, rule: Rule) -> Check:
    """The update of the parameters of one rule, against its definition; and its size, to be read.

    Args:
        subject: the run.
        seen: a step from the finished state.
        name: of the check.
        rule: whose parameters.
    """
    params = subject.recipe.pretrain
    due = [key for key, weight in seen.before.items() if due_rule(key, weight, params) == rule]
    other = [key for key in due if key in seen.moments_after and rule_found(seen, key) != rule]
    if other:
        return _of_another_rule(name, rule, other)
    applied = applied_rate(seen, params, rule=rule)
    rate = applied.value
    if not rate > 0:
        return _without_rate(name, rule)
    off = {key: unexplained(seen, key, rate, params) for key in due}
    worst = max(off, key=off.__getitem__)
    decays, n_told = _wrong_decays(seen, due, applied, params)
    told = (
        f"off by up to {off[worst]:.2g} of the rate beyond what float32 rounds ({worst}); the "
        f"decay can be told of {n_told} of {len(due)} parameters; {_ratios(seen, due)}"
    )
    if decays:
        told += f"; another decay: {', '.join(decays[:_SHOWN])}"
    return decide(
        "updates",
        name,
        holds=off[worst] <= _UPDATE_GAP and not decays,
        measured=told,
        expected=f"a step of {_NAMES[rule]} in float64 within {_UPDATE_GAP:g} of the rate "
        f"{rate:.4g}, with decay {params.weight_decay:g} on matrices alone",
        first_test=_DECAY if decays else _FIRST[rule],
    )


def _of_another_rule(name: str, rule: Rule, other: list[str]) -> Check:
    """Parameters with moments of another rule have no update of this one."""
    return decide(
        "updates",
        name,
        holds=False,
        measured=f"{len(other)} parameters are moved otherwise: {', '.join(other[:_SHOWN])}",
        expected=f"the moments of {_NAMES[rule]}",
        first_test=_SPLIT,
    )


def _without_rate(name: str, rule: Rule) -> Check:
    """An update of no length says nothing about its form."""
    return decide(
        "updates",
        name,
        holds=False,
        measured="the update has no length",
        expected="an update, whose form can be looked at",
        first_test=_FIRST[rule],
    )


def _wrong_decays(
    seen: StepSeen, names: list[str], rate: Rate, params: PretrainParams
) -> tuple[list[str], int]:
    """Parameters whose update along themselves is not that of their decay, and how many tell it.

    Where rounding could feign a large part of the decay, or hide it, nothing is said.
    """
    wrong, n_told = [], 0
    gap = _DECAY_GAP * (params.weight_decay or _SOME_DECAY)
    for name in names:
        found = applied_decay(seen, name, rate, params)
        if not found.slack <= gap:
            continue
        n_told += 1
        due = due_decay(name, seen.before[name], params)
        if abs(found.value - due) > gap + found.slack:
            wrong.append(f"{name} {found.value:.3g}")
    return wrong, n_told


def _ratios(seen: StepSeen, names: list[str]) -> str:
    """The smallest and the largest update as a share of its weights."""
    ratios = []
    for name in names:
        before = seen.before[name]
        length = float(before.double().norm())
        if length > 0:
            ratios.append(float((seen.after[name] - before).double().norm()) / length)
    return f"updates are {min(ratios):.2g} to {max(ratios):.2g} of their weights"
