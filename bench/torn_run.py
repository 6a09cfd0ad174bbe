"""How is a training under DVC killed at a chosen moment, and where did the kill land?

A moment is seen in the files that DVC and the trainer write, looked at every millisecond, and a
random delay is added. Where a kill landed is read from what it has left on the disk, not from what
was aimed at.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Who = Literal["trainer", "dvc", "both"]
MOMENTS = ("start", "import", "step", "save", "prune", "copy out", "commit", "lock file")
# Before the trainer is there and after it has gone, there is no trainer to kill.
_WITHOUT_TRAINER = {"start", "commit", "lock file"}
_POLL_S = 0.001
_LEASH_S = 20.0  # a trainer whose DVC has died is gone long before
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: who, aimed at which moment, and where it landed."""

    who: Who
    aim: str
    step: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """A checkout in which one objective is trained, and the command that trains it."""

    root: Path
    objective: str
    steps: int
    keep_last: int
    command: tuple[str, ...]
    environment: dict[str, str]
    others: frozenset[str] = frozenset()  # folders of other runs

    @property
    def outs(self) -> list[Path]:
        """Where checkpoints/ may lie: here, or in the checkouts of temporary experiments."""
        return [self.root, *(self.root / ".dvc/tmp/exps/standalone").glob("tmp*")]

    def saves(self) -> list[Path]:
        """What lies in the folder of this run's checkpoints."""
        found = self.root.glob(".work/pretrain/*/checkpoints/*")
        return sorted(path for path in found if path.parts[-3] not in self.others)

    def steps_saved(self) -> list[int]:
        """The numbers of the checkpoints that have taken their names."""
        return sorted(int(path.name[5:]) for path in self.saves() if path.name[0] != ".")


class Attempt:
    """The command, started once, in a process group of its own."""

    def __init__(self, place: Place, log: Path) -> None:
        self.place = place
        self.log = log
        self.started_at = time.monotonic()
        self.saved_before = max(place.steps_saved(), default=0)
        self.lock_before = _size(place.root / "dvc.lock")
        self.trainer: int | None = None
        self.trainer_at = 0.0
        with log.open("wb") as out:
            self.dvc = subprocess.Popen(
                place.command,
                cwd=place.root,
                env=place.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def look(self) -> None:
        """Note the trainer when it is there for the first time."""
        if self.trainer is None:
            for pid in _children(self.dvc.pid):
                if b"stages/pretrain.py" in _words(pid):
                    self.trainer, self.trainer_at = pid, time.monotonic()

    def trains(self) -> bool:
        """Whether the trainer lives."""
        return self.trainer is not None and b"stages/pretrain.py" in _words(self.trainer)

    def kill(self, who: Who) -> None:
        """Kill, and return when what must end has ended.

        Raises:
            RuntimeError: a trainer outlived its DVC.
        """
        if who == "both":
            os.killpg(self.dvc.pid, signal.SIGKILL)
        elif who == "dvc":
            self.dvc.kill()
        elif self.trainer is not None:
            os.kill(self.trainer, signal.SIGKILL)
        self.dvc.wait()
        until = time.monotonic() + _LEASH_S
        while self.trains():
            if time.monotonic() > until:
                os.killpg(self.dvc.pid, signal.SIGKILL)
                raise RuntimeError("the trainer has outlived its DVC")
            time.sleep(_POLL_S)


def end_processes() -> None:
    """Kill all that this process has started, groups and all, and wait until it has ended.

    Whoever has lost its parent is still in the group of the command that was started here.
    """
    known = set(_children(os.getpid()))
    until = time.monotonic() + _LEASH_S
    while time.monotonic() < until:
        for pid in known:
            _end(pid)
        known |= set(_children(os.getpid()))
        if not any(map(_lives, known)):
            return
        time.sleep(_POLL_S)


def _end(pid: int) -> None:
    """Kill a process, and the group that it leads."""
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def kill_at(attempt: Attempt, aim: str, draws: random.Random) -> Kill | None:
    """Wait for a moment and kill; None when the command came to its end first."""
    seen, delay_s = _seen(attempt, aim, is_first=draws.random() < 0.5), _delay_s(aim, draws)
    seen_at = None
    while attempt.dvc.poll() is None:
        attempt.look()
        now = time.monotonic()
        if seen_at is None and seen():
            seen_at = now
        if seen_at is not None and now >= seen_at + delay_s:
            choices: list[Who] = ["dvc", "both"]
            if aim not in _WITHOUT_TRAINER and attempt.trains():
                choices.append("trainer")
            who = draws.choice(choices)
            trained = attempt.trains()
            attempt.kill(who)
            return Kill(
                who=who,
                aim=aim,
                step=max(attempt.place.steps_saved(), default=0),
                phase=_landed(attempt, trained),
            )
        if aim not in ("prune", "lock file"):
            time.sleep(_POLL_S)
    return None


def _delay_s(aim: str, draws: random.Random) -> float:
    """A random time after the moment was seen: of the length that the phase has."""
    longest = {
        "start": 1.2,
        "import": 1.5,
        "step": 0.4,
        "save": 0.006,
        "prune": 0.0,
        "copy out": 0.05,
        "commit": 0.3,
        "lock file": 0.02,
    }
    return draws.uniform(0.0, longest[aim])


def _seen(attempt: Attempt, aim: str, *, is_first: bool) -> Callable[[], bool]:
    """What tells that a moment has come; a save is the trainer's first, or a later one."""
    place, lock = attempt.place, attempt.place.root / "dvc.lock"

    def has_saved() -> bool:
        return max(place.steps_saved(), default=0) > attempt.saved_before

    def saves() -> bool:
        half = any(path.name.endswith(".partial") for path in place.saves())
        return half and (is_first or has_saved())

    return {
        "start": lambda: True,
        "import": lambda: attempt.trainer is not None,
        "step": has_saved,
        "save": saves,
        "prune": lambda: len(place.steps_saved()) > place.keep_last,
        "copy out": lambda: any(_copies(place)) or place.steps in place.steps_saved(),
        "commit": lambda: attempt.trainer is not None and not attempt.trains(),
        "lock file": lambda: _size(lock) < attempt.lock_before,
    }[aim]


def _landed(attempt: Attempt, trained: bool) -> str:
    """Read from the disk what the kill has interrupted."""
    place = attempt.place
    half = [path for path in place.saves() if path.name.endswith(".partial")]
    if half:
        files = sorted(path.name for path in half[-1].iterdir())
        return f"in a save, {len(files)} files begun"
    if any(path.name.endswith(".removed") for path in place.saves()):
        return "after a save, while the oldest was removed"
    if len(place.steps_saved()) > place.keep_last:
        return "after a save, before the oldest was removed"
    copies = list(_copies(place))
    if copies:
        return "in the copying out"
    if trained:
        return _landed_in_training(attempt)
    if _size(place.root / "dvc.lock") < attempt.lock_before:
        return f"in the writing of dvc.lock, {_size(place.root / 'dvc.lock')} bytes there"
    if (place.root / ".git/index.lock").exists():
        return "in the writing of Git's index"
    if b"is cached - skipping run" in attempt.log.read_bytes():
        return "in DVC, while outs come from its run cache"
    if attempt.trainer is None:
        return "before the trainer"
    return "in DVC, after the trainer's end"


def _landed_in_training(attempt: Attempt) -> str:
    place = attempt.place
    saved = max(place.steps_saved(), default=0)
    if saved == place.steps:
        out = any((root / "checkpoints" / place.objective).is_dir() for root in place.outs)
        return "after the copying out of weights" if out else "after the last save"
    if saved == attempt.saved_before:
        resumed = b"estimated peak memory" in attempt.log.read_bytes()
        return "in steps before the first save" if resumed else "in the trainer's start"
    return "in steps"


def _copies(place: Place) -> Iterator[Path]:
    """Copies of the final checkpoint that have not yet taken its name."""
    for root in place.outs:
        yield from root.glob(f"checkpoints/.{place.objective}.*")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _children(pid: int) -> Iterator[int]:
    """All processes under one."""
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _children(int(child))
    except OSError:
        return


def _lives(pid: int) -> bool:
    """Whether a process is there and no zombie; its command line is empty while it changes."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _words(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
