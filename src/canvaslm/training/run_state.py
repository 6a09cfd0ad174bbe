"""Where does a run live between two processes, and who may touch it?

In a folder named by the run's identity: its checkpoints, one line per optimiser step in
``steps.csv`` and ``seconds.csv``, and a lock. Both logs are flushed to the disk before each
checkpoint and cut back to it on resume, so that every step stands in them once, in order.
"""

import csv
import fcntl
import logging
import os
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

    def roll_back(self, step: int) -> None:
        """Forget what was recorded from ``step`` on.

        Raises:
            InputError: an earlier step is missing, so the log cannot be that of this run.
        """
        self._learned.roll_back(step)
        self._timed.roll_back(step)

    def steps(self) -> list[StepRecord]:
        """Every recorded step, in order."""
        return [_as_record(row) for row in self._learned.rows()]

    def seconds(self) -> list[float]:
        """Wall-clock seconds of every recorded step, in order."""
        return [float(row[1]) for row in self._timed.rows()]

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
        for leftover in (directory / "checkpoints").glob(".*"):
            shutil.rmtree(leftover)  # what a killed save or removal left
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
        self._path = path
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
        with self._path.open(encoding="utf-8", newline="") as handle:
            header, *rows = csv.reader(handle)
        assert header == self._columns, f"{self._path}: {header}"
        return rows

    def roll_back(self, step: int) -> None:
        rows = self._whole_rows()
        kept, dropped = rows[:step], rows[step:]
        if [row[0] for row in kept] != [str(number) for number in range(step)]:
            raise InputError(
                self._path,
                expected=f"steps 0 to {step - 1}, once each and in order",
                got=f"{len(kept)} rows that are not those",
                fix=f"remove {self._path.parent} to train from the start",
            )
        if dropped:
            _log.info("%s: %d rows after step %d dropped", self._path.name, len(dropped), step)
        self.close()
        write_csv(self._path, self._columns, kept)
        self._open()

    def _open(self) -> None:
        self._handle = self._path.open("a", encoding="utf-8", newline="")

    def _whole_rows(self) -> list[list[str]]:
        """Rows up to the first that a killed process left half-written."""
        text = self._path.read_bytes().decode("utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        header, *rows = list(csv.reader(whole.splitlines())) or [[]]
        return rows if header == self._columns else []


def _take(handle: int, directory: Path) -> None:
    """Lock the file or say who holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = (directory / "lock").read_text(encoding="utf-8").strip() or "another process"
        raise InputError(
            directory,
            expected="to be the only trainer of this run",
            got=holder,
            fix="wait for it or end it",
        ) from None


def _as_record(row: list[str]) -> StepRecord:
    step, nats, targets, gradient_norm, learning_rate, cause = row
    return StepRecord(
        step=int(step),
        nats=float(nats) if nats else None,
        targets=int(targets),
        gradient_norm=float(gradient_norm) if gradient_norm else None,
        learning_rate=float(learning_rate),
        cause=cause,
    )
