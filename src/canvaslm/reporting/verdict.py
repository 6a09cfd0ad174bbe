"""What may a report say of a number that it judges?"""

from typing import Literal

Verdict = Literal["pass", "fail", "not_measured"]
