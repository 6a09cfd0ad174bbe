"""Does a stage end with the DVC that started it, and only then?"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0
# A stage that says so when it has begun, and then answers for as long as it is asked.
STAGE = f"""
import sys
sys.path.insert(0, {str(ROOT / "stages")!r})
import door

def stage() -> None:
    with open("answers", "w", buffering=1) as answers, open("questions") as questions:
        answers.write("begun\\n")
        answers.writelines(questions)

door.main(stage)
"""
# What DVC does with a stage: it names it in the environment and waits for its command line.
DVC = """
import os, subprocess, sys
given = {"DVC_STAGE": sys.argv[1]} if sys.argv[1] else {}
subprocess.Popen(["/bin/sh", "-c", sys.argv[2]], env={**os.environ, **given}).wait()
"""


class Started:
    """A stage, what has started it, and a line to the stage."""

    def __init__(self, dvc: subprocess.Popen[bytes], place: Path) -> None:
        self._dvc = dvc
        self._answers = (place / "answers").open()
        self._questions = (place / "questions").open("w", buffering=1)
        self.pid = int((place / "pid").read_text())
        self._handle = os.pidfd_open(self.pid)

    def answer(self) -> str:
        """What it says next; nothing when it has ended."""
        return self._answers.readline().strip()

    def ask(self, question: str) -> str:
        self._questions.write(f"{question}\n")
        return self.answer()

    def ends(self) -> bool:
        return bool(select.select([self._handle], [], [], LIMIT_S)[0])

    def kill_dvc(self) -> None:
        self._dvc.kill()
        self._dvc.wait()

    def close(self) -> None:
        os.close(self._handle)
        self._answers.close()
        self._questions.close()


@contextmanager
def started(place: Path, name: str, line: str) -> Iterator[Started]:
    """A stage that a fake DVC has started, in a session that no reaper of orphans is in."""
    for end in ("answers", "questions"):
        os.mkfifo(place / end)
    (place / "stage.py").write_text(STAGE)
    (place / "run").write_text(f"echo $$ > pid; exec {sys.executable} stage.py\n")
    dvc = subprocess.Popen(
        [sys.executable, "-c", DVC, name, line],
        cwd=place,
        env={key: os.environ[key] for key in os.environ if not key.startswith("DVC_")},
        start_new_session=True,
    )
    try:
        with closing(Started(dvc, place)) as stage:
            yield stage
    finally:
        os.killpg(dvc.pid, signal.SIGKILL)
        dvc.wait()


@pytest.mark.parametrize("line", [". ./run", "sh run; true"], ids=["gives way", "stays"])
def test_a_stage_ends_with_its_dvc_also_behind_a_shell_that_stays(
    tmp_path: Path, line: str
) -> None:
    with started(tmp_path, "pretrain@diffusion", line) as stage:
        assert stage.answer() == "begun"
        assert stage.ask("there?") == "there?"
        stage.kill_dvc()
        assert stage.ends()


def test_a_stage_does_not_begin_when_its_dvc_has_died_meanwhile(tmp_path: Path) -> None:
    wait = "echo $$ > pid; echo waits > answers; read go < questions; . ./run"
    with started(tmp_path, "pretrain@diffusion", wait) as stage:
        assert stage.answer() == "waits"
        stage.kill_dvc()
        assert stage.ask("go") == ""
        assert stage.ends()


def test_a_stage_that_was_started_by_hand_outlives_what_started_it(tmp_path: Path) -> None:
    with started(tmp_path, "", ". ./run") as stage:
        assert stage.answer() == "begun"
        stage.kill_dvc()
        assert stage.ask("there?") == "there?"
