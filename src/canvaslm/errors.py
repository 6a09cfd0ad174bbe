"""What can a user put right, and how is it told?"""

from pathlib import Path


class InputError(Exception):
    """Input that its owner can put right: one line that says where, expected, got, what to do."""

    def __init__(self, where: str | Path, *, expected: str, got: str, fix: str) -> None:
        self.where = str(where)
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(f"{where}: expected {expected}, got {got}; {fix}")


class GateClosedError(Exception):
    """A stage finished and wrote its report, and what it found must stop the pipeline (exit 1)."""
