"""How is a revision of this project run from scratch, beside another one?"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import refuse

from scratch_copy import call, environment

ROOT = Path(__file__).resolve().parent.parent
_RUNNING = "Running stage '"  # what DVC says before it starts one


def clone(revision: str, place: Path, *, profile: str) -> Path:
    """Lay down a revision with the tools of this checkout and the params of a profile.

    Args:
        revision: whatever git knows it by in this checkout.
        place: the folder to make.
        profile: whose params the clone gets.
    """
    commit = _commit_of(revision)
    call(place.parent, "git", "clone", "--quiet", "--no-checkout", str(ROOT), place.name)
    call(place, "git", "checkout", "--quiet", "--detach", commit)
    (place / ".venv").symlink_to(ROOT / ".venv")
    call(place, sys.executable, "stages/compose_profile.py", "--name", profile)
    return place


def _commit_of(revision: str) -> str:
    words = ["git", "rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        refuse(
            f"{revision}: expected a revision of {ROOT}, got none that git knows there; "
            "name another one, or run `git fetch --unshallow` in a clone without its history"
        )
    return found.stdout.strip()


class Repro:
    """A ``dvc repro`` that stands still at the border of each stage, until it is its turn again.

    Args:
        place: the clone that it runs in.
        words: the command.
        threads: of one operation, in its stages.
        more: further environment variables.
    """

    def __init__(
        self,
        place: Path,
        words: Sequence[str],
        *,
        threads: int,
        more: dict[str, str] | None = None,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.said: list[str] = []
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self._stage = "start of DVC"
        self._started_at = time.perf_counter()
        self._process = subprocess.Popen(
            words,
            cwd=place,
            env=environment() | own | (more or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._is_ended = False
        self._take_turn()

    @property
    def next_stage(self) -> str | None:
        """The stage whose turn would come now; None when all have run."""
        return None if self._is_ended else self._stage

    def run_stage(self) -> None:
        """Go on to the border of the stage after this one, or to the end."""
        self._started_at = time.perf_counter()
        self._signal(signal.SIGCONT)
        self._take_turn()

    def end(self) -> None:
        """Leave no process behind, wherever it stands."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._output.close()

    def _take_turn(self) -> None:
        """Read what it says until it is about to start a stage, and stop it there."""
        for line in self._output:
            self.said.append(line)
            if line.startswith(_RUNNING):
                self._signal(signal.SIGSTOP)
                self._note(line.removeprefix(_RUNNING).split("'")[0])
                return
        status = self._process.wait()
        self._output.close()
        self._note("")
        self._is_ended = True
        if status:
            said = [line for line in self.said if not line.startswith("import time:")]
            sys.exit(f"dvc repro ended with {status}:\n{''.join(said[-40:])}")

    def _note(self, following: str) -> None:
        self.seconds[self._stage] = time.perf_counter() - self._started_at
        self._stage = following

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
