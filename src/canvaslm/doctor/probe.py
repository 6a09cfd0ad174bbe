"""What is a probe, what did it see, and what is to be done about it?"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from canvaslm.reporting.verdict import Verdict

if TYPE_CHECKING:
    from canvaslm.doctor.patient import Patient

_GUIDE = "docs/guides/debugging.md"
A_RUN = ("shapes_agree", "run_is_whole")  # what rests on a model that was trained


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a probe found where everything that it looks at is there.

    Attributes:
        looked_at: the files or the computation, in words.
        measured: what was found, with units.
        holds: whether it is as it should be.
        next_step: what to do when it is not.
    """

    looked_at: str
    measured: str
    holds: bool
    next_step: str


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The first test of one section of the guide, as it is tried on a run.

    Attributes:
        name: the claim in snake_case.
        section: the heading of its section.
        look: looks at one run.
        rests_on: probes that have to pass before this one says anything.
        is_shared: whether it looks at what the runs of both objectives share.
        twin: whether it concerns the autoregressive twin too.
    """

    name: str
    section: str
    look: Callable[["Patient"], Seen]
    rests_on: tuple[str, ...] = ()
    is_shared: bool = False
    twin: bool = True

    @property
    def anchor(self) -> str:
        """Where the section is, as a link from the root of the repository."""
        slug = re.sub(r"[^\w\- ]", "", self.section.lower()).replace(" ", "-")
        return f"{_GUIDE}#{slug}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the doctor's table.

    Attributes:
        probe: the name that the debugging guide gives it.
        symptom: the heading of its section there.
        anchor: where that heading is.
        objective: whose run, or empty where a probe looks at what all runs share.
        looked_at: the files or the computation, in words.
        measured: what was found, or why nothing was.
        verdict: pass, fail or not_measured.
        next_step: what to do; for what is not there, the command that makes it.
    """

    probe: str
    symptom: str
    anchor: str
    objective: str
    looked_at: str
    measured: str
    verdict: Verdict
    next_step: str


class NotThereError(Exception):
    """What a probe would look at does not exist yet."""

    def __init__(self, what: str, *, command: str) -> None:
        self.what = what
        self.command = command
        super().__init__(f"{what}; {command}")
