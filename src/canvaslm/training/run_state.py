"""Where does a run live between two processes, and who may touch it?

In a folder named by the run's identity: its checkpoints, one line per optimiser step in
``steps.csv`` and ``seconds.csv``, and a lock. Both logs are flushed to the disk before each
checkpoint and cut back to it on resume, so that every step stands in them once, in order. What
steps came to is part of the run, and a log that lacks one is refused; how long they took is not,
and what is lost of it is left empty.
"""

import csv
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from canvaslm.errors import InputError
from canvaslm.reporting.files import write_csv

_LEARNED = ("step", "nats", "targets", "gradient_norm", "learning_rate", "cause")
_TIMED = ("step", "seconds")
TRACE = "nonfinite"
_LEFTOVER = re.compile(r"\.step_\d+\.(\d+\.)?(partial|removed)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimiser step came to. A skipped step has a cause and no nats or norm."""

    step: int
    nats: float | None  # summed over the step's targets
    targets: int
    gradient_norm: float | None  # before clipping
    learning_rate: float
    cause: str  # empty when the step ran


class RunState:
    """The folder of one run, open for one trainer; made by :func:`open_run`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self.trace = directory / TRACE  # of the run's first bad step, once there is one
        self._learned = _Log(directory / "steps.csv", _LEARNED)
        self._timed = _Log(directory / "seconds.csv", _TIMED)

    def record(self, record: StepRecord, *, seconds: float) -> None:
        """Append one step to both logs."""
        fields = (getattr(record, name) for name in _LEARNED)
        self._learned.append(["" if value is None else value for value in fields])
        self._timed.append([record.step, f"{seconds:.6f}"])

    def flush(self) -> None:
        """Return when all recorded steps are on the disk."""
        self._learned.flush()
        self._timed.flush()

    def digest(self, step: int) -> str:
        """The sha256 of what was recorded of all steps before ``step``."""
        rows = self._learned.rows()[:step]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def roll_back(self, step: int, *, log_sha256: str) -> int:
        """Forget what was recorded from ``step`` on, and return how many steps that were.

        Args:
            step: steps done.
            log_sha256: what the checkpoint says :meth:`digest` gave; empty when it says nothing.

        Raises:
            InputError: an earlier step is missing, damaged, or not as it was when the checkpoint
                was written, so the log cannot be that of this run.
        """
        rows = self._learned.rows()
        self._as_records(rows[:step], step)
        if log_sha256 not in ("", self.digest(step)):
            raise InputError(
                self._learned.path,
                expected=f"the record of {step} steps with sha256 {log_sha256}",
                got=self.digest(step),
                fix=f"remove {self.directory} to train from the start",
            )
        known = self._known_seconds()
        if any(str(number) not in known for number in range(step)):
            _log.warning("%s: the seconds of some steps are lost", self._timed.path)
        self._learned.rewrite(rows[:step])
        self._timed.rewrite([[number, known.get(str(number), "")] for number in range(step)])
        return len(rows) - step

    def steps(self) -> list[StepRecord]:
        """Every recorded step, in order.

        Raises:
            InputError: one is missing or damaged.
        """
        rows = self._learned.rows()
        return self._as_records(rows, len(rows))

    def seconds(self) -> list[float | None]:
        """Wall-clock seconds of every recorded step, in order; None where they are lost."""
        known = self._known_seconds()
        texts = [known.get(row[0], "") for row in self._learned.rows()]
        return [float(text) if text else None for text in texts]

    def _known_seconds(self) -> dict[str, str]:
        """By step, what can be read as seconds."""
        return {row[0]: row[1] for row in self._timed.rows() if _is_amount(row[-1])}

    def _as_records(self, rows: list[list[str]], n_steps: int) -> list[StepRecord]:
        """Read rows that must be those of the steps up to a number."""
        try:
            records = [_as_record(row) for row in rows]
        except ValueError:
            records = []
        if [record.step for record in records] != list(range(n_steps)):
            raise InputError(
                self._learned.path,
                expected=f"steps 0 to {n_steps - 1}, once each and in order",
                got=f"{len(rows)} rows that are not those",
                fix=f"remove {self.directory} to train from the start",
            )
        return records

    def close(self) -> None:
        """Close the logs."""
        self._learned.close()
        self._timed.close()


@contextmanager
def open_run(work: Path, name: str) -> Iterator[RunState]:
    """Open the folder of a run under ``work`` for this process alone.

    The lock is the operating system's, so it falls with its holder, also by ``kill -9``; the
    holder's process id and start time stand in the file for the message only.

    Raises:
        InputError: another live process trains the same run.
    """
    directory = work / name
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a+", encoding="utf-8") as lock:
        _take(lock.fileno(), directory)
        lock.truncate(0)
        started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lock.write(f"process {os.getpid()} started at {started_at}\n")
        lock.flush()
        _clear_leftovers(directory / "checkpoints")
        state = RunState(directory)
        try:
            yield state
        finally:
            state.close()
            lock.truncate(0)


def clear_runs(work: Path) -> list[Path]:
    """Remove the folders of all runs under ``work`` that no live process trains.

    A run that has ended can then not be copied out again without training, and one that was
    killed cannot go on.

    Returns:
        The folders that were removed.
    """
    removed = []
    for directory in sorted(path for path in work.glob("*") if path.is_dir()):
        try:
            with open_run(work, directory.name):
                shutil.rmtree(directory)
        except InputError as error:
            _log.warning("kept: %s", error)
        else:
            removed.append(directory)
    return removed


class _Log:
    """A CSV file that grows by a line per step and can be cut back."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._columns = list(columns)
        if not path.exists():
            write_csv(path, columns, [])
        self._open()

    def append(self, row: Sequence[object]) -> None:
        csv.writer(self._handle, lineterminator="\n").writerow(row)
        self._handle.flush()

    def flush(self) -> None:
        os.fsync(self._handle.fileno())

    def close(self) -> None:
        self._handle.close()

    def rows(self) -> list[list[str]]:
        """Whole rows, without a last one that a killed process left half-written.

        A file under another header has none, and so has one that is no CSV.
        """
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        try:
            header, *rows = list(csv.reader(whole.splitlines())) or [[]]
        except csv.Error:
            return []
        rows = [row if len(row) == len(self._columns) else [""] * len(header) for row in rows]
        return rows if header == self._columns else []

    def rewrite(self, rows: Sequence[Sequence[object]]) -> None:
        """Put other rows in place of all."""
        self.close()
        write_csv(self.path, self._columns, rows)
        self._open()

    def _open(self) -> None:
        self._handle = self.path.open("a", encoding="utf-8", newline="")


def _clear_leftovers(checkpoints: Path) -> None:
    """Remove what a killed save or removal left, and nothing that others put there."""
    for place in checkpoints.glob(".step_*"):
        if _LEFTOVER.fullmatch(place.name) and place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)


def _take(handle: int, directory: Path) -> None:
    """Lock the file or say who holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        told = (directory / "lock").read_text(encoding="utf-8", errors="replace")
        holder = told.strip() or "another process"
        raise InputError(
            directory,
            expected="to be the only trainer of this run",
            got=holder,
            fix="wait for it or end it",
        ) from None


def _as_record(row: list[str]) -> StepRecord:
    """Read one row of ``steps.csv``; anything else is a ValueError."""
    step, nats, targets, gradient_norm, learning_rate, cause = row
    for text in filter(None, (nats, gradient_norm, learning_rate)):
        if not _is_amount(text):
            raise ValueError(text)
    return StepRecord(
        step=int(step),
        nats=float(nats) if nats else None,
        targets=int(targets),
        gradient_norm=float(gradient_norm) if gradient_norm else None,
        learning_rate=float(learning_rate),
        cause=cause,
    )


def _is_amount(text: str) -> bool:
    """Whether text is a finite number that is not below 0."""
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
