"""Does a training that is killed again and again end with the bytes of one that was left alone?

In a scratch clone of the checkout, both objectives are trained straight in one copy and torn in
another: the same command, started again after each kill with -9 of the trainer, of DVC, or of both,
at random moments of all phases. Prints a line for each kill, then the hashes of both; exit 0 only
when they are identical.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from canvaslm.reporting.files import write_json
from scratch_copy import (
    KEEP_LAST,
    call,
    change,
    choose_cadence,
    environment,
    hashes,
    hashes_of_experiment,
)
from torn_run import MOMENTS, Attempt, Kill, Place, end_processes, kill_at

OBJECTIVES = ("diffusion", "autoregressive")
LIVES = 4  # trainings that may come to their end before one moment is hit
MAX_DOCUMENTS = 6  # so few that a training of seconds has epochs
# Where a few kills go: what is hardest to survive first, then the rest.
FIRST = ("save", "commit", "step", "copy out", "import", "lock file", "prune", "start")
MEND = (sys.executable, "stages/mend.py")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one objective came to: hashes by file, straight and torn."""

    objective: str
    straight: dict[str, str]
    torn: dict[str, str]

    @property
    def identical(self) -> bool:
        """Whether the torn run ended with the straight run's bytes."""
        return self.straight == self.torn


class _EndedError(BaseException):
    """This test was told to end; no part of it is to catch that."""


def main() -> int:
    """Run the test; when it is told to end, leave no process and no file, and say so in a line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        return _test()
    except _EndedError as ended:
        name = signal.Signals(ended.args[0]).name
        print(f"ended by {name}; its processes and its scratch folder are gone", file=sys.stderr)
        return 128 + ended.args[0]


def _end(number: int, frame: FrameType | None) -> None:
    """End all processes, then this one by way of everything that puts things in order."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    end_processes()
    raise _EndedError(number)


def _test() -> int:
    """Prepare the copies, kill, compare, print and write; 1 when bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="in all, over the objectives")
    parser.add_argument("--temp", action="store_true", help="through dvc exp run --temp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", default="ci")
    parser.add_argument("--objective", choices=OBJECTIVES, action="append")
    parser.add_argument("--out", type=Path, default=Path("reports/bench/kill_test.json"))
    options = parser.parse_args()
    objectives = options.objective or OBJECTIVES
    shares = _share(options.kills, len(objectives), temp=options.temp)
    progress = Progress(console=Console(stderr=True))
    with tempfile.TemporaryDirectory(prefix="kill_test.") as scratch, progress:
        task = progress.add_task("pipeline up to the audit", total=options.kills)
        test = KillTest(Path(scratch), temp=options.temp, seed=options.seed)
        facts = test.prepare(options.profile)
        print(", ".join(f"{value} {key}" for key, value in facts.items()), flush=True)
        for number, objective in enumerate(objectives):
            progress.update(task, description=f"{objective}, straight")
            test.run_straight(objective)
            progress.update(task, description=f"{objective}, torn")
            aims = shares[number]
            test.tear(objective, aims, told=lambda: progress.advance(task))
    _show(test.outcomes)
    passed = all(outcome.identical for outcome in test.outcomes)
    report = {
        "facts": facts,
        "identical": passed,
        "kills": [asdict(kill) for kill in test.kills],
        "mended": test.mended,
        "outcomes": [asdict(outcome) for outcome in test.outcomes],
        "temp": options.temp,
    }
    write_json(options.out, report)
    return 0 if passed else 1


class KillTest:
    """Two copies of a clone with its pipeline run up to the audit, and all that happened to them.

    Args:
        scratch: a folder of this test alone.
        temp: train in temporary experiments.
        seed: of all moments.
    """

    def __init__(self, scratch: Path, *, temp: bool, seed: int) -> None:
        self._scratch = scratch
        self._temp = temp
        self._draws = random.Random(seed)
        self._steps = 0
        self.kills: list[Kill] = []
        self.mended: list[str] = []
        self.outcomes: list[Outcome] = []
        self._straight: dict[str, dict[str, str]] = {}

    def prepare(self, profile: str) -> dict[str, Any]:
        """Clone, run up to the audit, choose steps and saves, commit; then make the copies."""
        base = self._scratch / "base"
        call(self._scratch, "git", "clone", "--quiet", str(ROOT), "base")
        (base / ".venv").symlink_to(ROOT / ".venv")
        call(base, sys.executable, "stages/compose_profile.py", "--name", profile)
        change(base, collect_documents={"max_documents": MAX_DOCUMENTS})
        call(base, "dvc", "repro", "audit_windows")
        knobs, facts = choose_cadence(base)
        self._steps = knobs["steps"]
        change(base, pretrain=knobs)
        call(base, "git", "commit", "--quiet", "--all", "--message", "What is killed")
        for name in ("straight", "torn"):
            shutil.copytree(base, self._scratch / name, symlinks=True)
        return facts

    def run_straight(self, objective: str) -> None:
        """Train one objective with nobody near."""
        place = self._place("straight", objective)
        self._straight[objective] = self._finish(place)

    def tear(self, objective: str, aims: Sequence[str], *, told: Callable[[], None]) -> None:
        """Train one objective under kills, to its end; it starts anew when it ends too early."""
        place = self._place("torn", objective)
        with _kept(place.root) as start_over:
            for aim in aims:
                for _ in range(LIVES):
                    if kill := self._attempt(place, aim):
                        break
                    self._compare(place, self._finish(place))
                    start_over()
                else:
                    sys.exit(f"the moment {aim!r} was missed {LIVES} times")
                self.kills.append(kill)
                _tell(len(self.kills), objective, kill)
                told()
            self._compare(place, self._finish(place))

    def _attempt(self, place: Place, aim: str) -> Kill | None:
        self._mend(place)
        return kill_at(Attempt(place, self._scratch / "log"), aim, self._draws)

    def _mend(self, place: Place) -> None:
        told = call(place.root, *MEND).splitlines()
        self.mended += [line.replace(f"{self._scratch}/", "") for line in told]
        for line in self.mended[len(self.mended) - len(told) :]:
            print(f"     mended: {line}", flush=True)

    def _finish(self, place: Place) -> dict[str, str]:
        """Run the command with nobody near and hash what it made."""
        self._mend(place)
        said = call(place.root, *place.command)
        return hashes_of_experiment(place, said) if self._temp else hashes(place)

    def _compare(self, place: Place, torn: dict[str, str]) -> None:
        straight = self._straight[place.objective]
        self.outcomes.append(Outcome(objective=place.objective, straight=straight, torn=torn))

    def _place(self, name: str, objective: str) -> Place:
        how = ("exp", "run", "--temp") if self._temp else ("repro",)
        root = self._scratch / name
        return Place(
            root=root,
            objective=objective,
            steps=self._steps,
            keep_last=KEEP_LAST,
            command=("dvc", *how, f"pretrain@{objective}"),
            environment=environment(),
            others=frozenset(path.name for path in root.glob(".work/pretrain/*")),
        )


def _share(n_kills: int, n_objectives: int, *, temp: bool) -> list[list[str]]:
    """The moments to aim at for each objective, each moment about as often over all of them.

    One objective goes on where the one before it stopped, so that few kills are spread too. Within
    one they stand in the order of a training, so that a life holds many.
    """
    moments = [moment for moment in FIRST if not (temp and moment == "lock file")]
    aims = [moments[number % len(moments)] for number in range(n_kills)]
    ends = [-(-n_kills * number // n_objectives) for number in range(n_objectives + 1)]
    return [sorted(aims[first:end], key=MOMENTS.index) for first, end in pairwise(ends)]


@contextmanager
def _kept(root: Path) -> Iterator[Callable[[], None]]:
    """Give a function that puts the copy back to where it stands now."""
    kept = root.with_name(f"{root.name}.kept")
    shutil.copytree(root, kept, symlinks=True)

    def start_over() -> None:
        shutil.rmtree(root)
        shutil.copytree(kept, root, symlinks=True)

    try:
        yield start_over
    finally:
        shutil.rmtree(kept)


def _tell(number: int, objective: str, kill: Kill) -> None:
    print(
        f"{number:4} {objective:15} {kill.who:8} at step {kill.step:4}, {kill.phase}"
        f"  (aimed at: {kill.aim})",
        flush=True,
    )


def _show(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        for name, digest in outcome.straight.items():
            torn = outcome.torn[name]
            verdict = "identical" if torn == digest else "DIFFERENT"
            print(f"{outcome.objective:15} {name:18} {digest[:16]} {torn[:16]} {verdict}")


if __name__ == "__main__":
    sys.exit(main())
