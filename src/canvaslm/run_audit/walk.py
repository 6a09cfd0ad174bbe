"""What is the first thing that is wrong with a finished run?

The groups are walked in the order in which one causes the next, so that a later symptom is not
taken for the first cause. All of them are walked, whatever fails; what failed first stands on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvaslm.checkpoint_state import TENSOR_FILES
from canvaslm.errors import GateClosedError
from canvaslm.reporting.files import to_json, write_files
from canvaslm.reporting.verdict import Verdict
from canvaslm.run_audit.check import Check, Group, attempt_all
from canvaslm.run_audit.data import check_data
from canvaslm.run_audit.flow import check_flow
from canvaslm.run_audit.page import render_audit
from canvaslm.run_audit.state import check_state
from canvaslm.run_audit.subject import Subject
from canvaslm.run_audit.updates import check_updates
from canvaslm.run_audit.values import check_values

_GROUPS: tuple[tuple[Group, Callable[[Subject], list[Check]]], ...] = (
    ("data", check_data),
    ("flow", check_flow),
    ("values", check_values),
    ("updates", check_updates),
    ("state", check_state),
)


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """All checks of one run, in the order of the walk."""

    objective: str
    checks: Sequence[Check]

    @property
    def failures(self) -> list[Check]:
        """The checks that failed, first cause first."""
        return [check for check in self.checks if check.verdict == "fail"]

    @property
    def verdict(self) -> Verdict:
        """Fail when one check does; what was not measured closes no gate."""
        return "fail" if self.failures else "pass"

    @property
    def verdict_reason(self) -> str:
        """The first failure, or how many checks passed."""
        if self.failures:
            first, *later = self.failures
            more = f" ({len(later)} more after it)" if later else ""
            return f"{first.name}: {first.measured}{more}"
        missing = [check.name for check in self.checks if check.verdict == "not_measured"]
        told = f"{len(self.checks) - len(missing)} checks pass"
        return f"{told}; not measured: {', '.join(missing)}" if missing else told

    def metrics(self) -> dict[str, Any]:
        """What ``metrics.json`` holds; checks are a list, since their order says something."""
        return {
            "checks": [vars(check) for check in self.checks],
            "first_failure": self.failures[0].name if self.failures else None,
            "n_checks": len(self.checks),
            "n_failed": len(self.failures),
            "n_not_measured": sum(check.verdict == "not_measured" for check in self.checks),
            "objective": self.objective,
            "verdict": self.verdict,
            "verdict_reason": self.verdict_reason,
        }


def audit_run(subject: Subject, *, out: Path) -> None:
    """Audit a finished run and write the page and its figures under ``out``.

    Raises:
        GateClosedError: a check failed; both files are written.
    """
    audit = walk(subject)
    about = {"trained_model_sha256": subject.state.files[TENSOR_FILES[0]]}
    write_files(
        {
            out / "metrics.json": to_json(audit.metrics() | about).encode(),
            out / "index.html": render_audit(subject, audit.checks).encode(),
        }
    )
    if audit.failures:
        first = audit.failures[0]
        raise GateClosedError(
            f"audit_run: {audit.verdict_reason}; expected {first.expected}; {first.first_test}; "
            f"see {out / 'index.html'}"
        )


def walk(subject: Subject) -> RunAudit:
    """Carry out every check of every group."""
    checks = []
    groups = subject.track(_GROUPS, total=len(_GROUPS), label="audit_run")
    for group, check_group in groups:
        checks += attempt_all(group, lambda check=check_group: check(subject))
    names = [check.name for check in checks]
    assert len(set(names)) == len(names), "a name stands for one check"
    return RunAudit(objective=subject.recipe.objective, checks=checks)
