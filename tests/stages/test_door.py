import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = f"import sys; sys.path.insert(0, {str(ROOT / 'stages')!r}); import door\n"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        encoding="latin-1",
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "arguments", [("--zzz",), ("--number", "many"), ("--number", "0"), ("stray",)]
)
def test_a_wrong_command_line_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    script = """
from typing import Annotated
import typer
def stage(number: Annotated[int, typer.Option(min=1)] = 1) -> None:
    print("ran")
door.main(stage)
"""
    result = run(script, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "--help" in result.stderr


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        ("InputError('here', expected='a', got='b', fix='mend it')", 2, "here: expected a, got b"),
        ("GateClosedError('too bad')", 1, "gate closed: too bad"),
        ("OSError(errno.ENOSPC, 'No space left on device', 'data/x')", 2, "data/x: expected room"),
        ("PermissionError(errno.EACCES, 'Permission denied', 'data/x')", 2, "data/x: expected acc"),
        ("KeyboardInterrupt()", 130, "interrupted"),
        (
            "shutil.Error([('a', 'b', '[Errno 13] Permission denied: \\'b\\''), ('c', 'd', 'no')])",
            2,
            "a: expected access, got Permission denied; check",
        ),
        ("shutil.Error([('a', 'b', '[Errno 28] No space left on device')])", 2, "a: expected room"),
        ("shutil.Error('a and b are one file')", 2, "the disk: expected access, got a and b"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_a_status(
    raised: str, status: int, told: str
) -> None:
    script = f"""
import errno
import shutil
from canvaslm.errors import GateClosedError, InputError
def stage() -> None:
    raise {raised}
door.main(stage)
"""
    result = run(script)
    assert result.returncode == status
    assert result.stderr.startswith(told)
    assert len(result.stderr.splitlines()) == 1


def test_our_own_faults_are_not_dressed_up_as_a_users(tmp_path: Path) -> None:
    result = run("def stage() -> None:\n    assert False, 'ours'\ndoor.main(stage)\n")
    assert result.returncode == 1
    assert "AssertionError: ours" in result.stderr


def test_letters_that_an_encoding_lacks_are_shown_as_escapes() -> None:
    result = run("door.say('caf\\u00e9 \\u2603')", PYTHONIOENCODING="latin-1")
    assert result.returncode == 0
    assert result.stdout == "caf\u00e9 \\u2603\n"


def test_control_characters_cannot_reach_a_terminal() -> None:
    result = run("sys.stdout.isatty = lambda: True\ndoor.say('a\\x1b[31mb\\tc\\nd')")
    assert result.stdout == "a\\x1b[31mb\tc\nd\n"
    result = run("door.say('a\\x1b[31mb')")  # a file gets what the model wrote
    assert result.stdout == "a\x1b[31mb\n"


def test_text_for_a_closed_stdout_is_refused_and_not_lost() -> None:
    script = PRELUDE + "def stage() -> None:\n    door.say('text')\ndoor.main(stage)\n"
    result = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >&-', sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("stdout: expected an open stream")


@pytest.mark.parametrize("interactive", [False, True])
def test_tracking_yields_every_item(interactive: bool) -> None:
    stderr = "sys.stderr.isatty = lambda: True\n" if interactive else ""
    result = run(stderr + "print(list(door.track(range(5), total=5, label='counting')))")
    assert result.stdout == "[0, 1, 2, 3, 4]\n"
    assert ("counting" in result.stderr) is interactive


def heed_ctrl_c() -> None:
    """Undo what a job in the background inherits: it ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_a_stage_in_one_line() -> None:
    script = PRELUDE + (
        "def stage() -> None:\n"
        "    print('ready', flush=True)\n"
        "    while True:\n        pass\n"
        "door.main(stage)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            _, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    "script",
    [
        "raise KeyboardInterrupt",  # as in an import of the stage's script
        "def stage() -> None:\n    pass\n"
        "def interrupted() -> None:\n    raise KeyboardInterrupt\n"
        "door._guarded = lambda stage: interrupted\ndoor.main(stage)\n",
        "import canvaslm.leash\ndef interrupted() -> None:\n    raise KeyboardInterrupt\n"
        "canvaslm.leash.end_with_dvc = interrupted\ndoor.main(interrupted)\n",
    ],
    ids=["while importing", "inside typer", "before the stage"],
)
def test_ctrl_c_outside_a_stage_is_one_line_too(script: str) -> None:
    """Wherever the interrupt lands once the door is there: 130, one line and no traceback."""
    result = run(script)
    assert result.returncode == 130
    assert result.stderr.splitlines() == [
        "interrupted; the same command again goes on or starts over"
    ]
