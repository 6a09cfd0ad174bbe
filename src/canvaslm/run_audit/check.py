"""What does one check say: what was measured, what was expected, and what to look at first?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from canvaslm.reporting.verdict import Verdict

Group = Literal["data", "flow", "values", "updates", "state"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One sentence that was held against a run.

    Attributes:
        group: where it stands in the order of the walk.
        name: the claim in snake_case, unique over all groups.
        measured: what was found, in words with units; finite figures only.
        expected: what should be found.
        verdict: pass, fail, or not measured; then ``measured`` says why.
        first_test: for a failure, the first test that tells its causes apart.
    """

    group: Group
    name: str
    measured: str
    expected: str
    verdict: Verdict
    first_test: str


def decide(
    group: Group, name: str, *, holds: bool, measured: str, expected: str, first_test: str
) -> Check:
    """A check that passes when its claim holds, and fails when it does not."""
    return Check(
        group=group,
        name=name,
        measured=measured,
        expected=expected,
        verdict="pass" if holds else "fail",
        first_test=first_test,
    )


def attempt(group: Group, name: str, make: Callable[[], Check]) -> Check:
    """Carry out one check; one that breaks on the way has failed, with the error's text."""
    try:
        return make()
    except Exception as error:  # whatever breaks, the other checks still count
        return _broken(group, name, error)


def attempt_all(group: Group, make: Callable[[], list[Check]]) -> list[Check]:
    """Carry out a group of checks; one failed check stands for a group that breaks on the way."""
    try:
        return make()
    except Exception as error:  # as above
        return [_broken(group, f"{group}_can_be_checked", error)]


def _broken(group: Group, name: str, error: Exception) -> Check:
    return Check(
        group=group,
        name=name,
        measured=" ".join(f"{type(error).__name__}: {error}".split()),
        expected="a check that can be carried out",
        verdict="fail",
        first_test="see whether the checkpoint, the shards and the reports are of one run",
    )
