"""What does one check say: what was measured, what was expected, and what to look at first?"""

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
