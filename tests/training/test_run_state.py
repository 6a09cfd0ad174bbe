"""Does a run's folder keep each step once, and for one trainer only?"""

import os
import re
import subprocess
import sys

import pytest

from canvaslm.errors import InputError
from canvaslm.training.run_state import StepRecord, clear_runs, open_run


def ran(step):
    return StepRecord(
        step=step, nats=1 / 3 + step, targets=64, gradient_norm=0.1, learning_rate=0.01, cause=""
    )


def skipped(step):
    return StepRecord(
        step=step,
        nats=None,
        targets=64,
        gradient_norm=None,
        learning_rate=0.01,
        cause="loss is nan",
    )


def test_records_come_back_exactly(tmp_path):
    records = [ran(0), skipped(1), ran(2)]
    with open_run(tmp_path, "run") as state:
        for record in records:
            state.record(record, seconds=0.25)
        state.flush()
        assert state.steps() == records
        assert state.seconds() == [0.25] * 3


def test_rows_after_the_checkpoint_are_dropped_and_counted(tmp_path):
    """BR-47: killed at 17, resumed from 10, ended at 20: steps 0..19 once each, in order."""
    with open_run(tmp_path, "run") as state:
        for step in range(17):
            state.record(ran(step), seconds=1.0)
    with open_run(tmp_path, "run") as state:
        assert state.roll_back(10, log_sha256="") == 7
        for step in range(10, 20):
            state.record(ran(step), seconds=2.0)
        assert state.steps() == [ran(step) for step in range(20)]
        assert state.seconds() == [1.0] * 10 + [2.0] * 10


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_that_a_kill_left_half_written_is_dropped(tmp_path, cut):
    with open_run(tmp_path, "run") as state:
        for step in range(3):
            state.record(ran(step), seconds=1.0)
    log = tmp_path / "run" / "steps.csv"
    os.truncate(log, log.stat().st_size - cut)
    with open_run(tmp_path, "run") as state:
        state.roll_back(2, log_sha256="")
        assert state.steps() == [ran(0), ran(1)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_log_that_lacks_a_step_of_the_checkpoint_is_refused(tmp_path, lost):
    with open_run(tmp_path, "run") as state:
        for step in range(3):
            if step != lost:
                state.record(ran(step), seconds=1.0)
    with (
        open_run(tmp_path, "run") as state,
        pytest.raises(InputError, match="expected steps 0 to 1, once each"),
    ):
        state.roll_back(2, log_sha256="")


HEADER = b"step,nats,targets,gradient_norm,learning_rate,cause\n"
GARBAGE = {
    "nothing": b"",
    "zero bytes": bytes(200),
    "no text": bytes(range(256)) * 4,
    "another header": b"a,b\n1,2\n",
    "no numbers": HEADER + b"x,y,z,u,v,w\n" * 2,
    "too few cells": HEADER + b"0,1\n1,1\n",
    "no finite nats": HEADER + b"0,nan,1,1,1,\n1,1,1,1,1,\n",
    "a cell without end": b"step,seconds\n" + b"9" * 200_000 + b"\n",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_record_of_steps_is_refused_by_name_and_rebuilt_where_none_is_needed(
    tmp_path, garbage
):
    log = tmp_path / "run" / "steps.csv"
    log.parent.mkdir()
    log.write_bytes(GARBAGE[garbage])
    with open_run(tmp_path, "run") as state:
        with pytest.raises(InputError, match=r"run/steps\.csv: expected steps 0 to 1, once each"):
            state.roll_back(2, log_sha256="")
        state.roll_back(0, log_sha256="")
        state.record(ran(0), seconds=1.0)
        assert state.steps() == [ran(0)]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_damaged_seconds_are_left_empty_and_stop_no_run(tmp_path, caplog, garbage):
    with open_run(tmp_path, "run") as state:
        for step in range(3):
            state.record(ran(step), seconds=1.0)
    (tmp_path / "run" / "seconds.csv").write_bytes(GARBAGE[garbage])
    with open_run(tmp_path, "run") as state:
        state.roll_back(2, log_sha256="")
        state.record(ran(2), seconds=2.0)
        assert state.seconds() == [None, None, 2.0]
        assert state.steps() == [ran(0), ran(1), ran(2)]
    assert "run/seconds.csv: the seconds of some steps are lost" in caplog.text


def test_seconds_that_can_be_read_outlive_those_that_cannot(tmp_path):
    with open_run(tmp_path, "run") as state:
        for step in range(4):
            state.record(ran(step), seconds=1.0 + step)
    log = tmp_path / "run" / "seconds.csv"
    log.write_text(log.read_text().replace("1,2.0", "1,-2.0").replace("2,3.0", "2,inf"))
    with open_run(tmp_path, "run") as state:
        state.roll_back(4, log_sha256="")
        assert state.seconds() == [1.0, None, None, 4.0]


def test_what_others_put_among_the_checkpoints_stays(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    (folder / ".step_notes").mkdir(parents=True)
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / ".step_00000004.7.partial").write_bytes(b"a file under such a name")
    (folder / ".step_00000004.removed").mkdir()
    with open_run(tmp_path, "run"):
        assert sorted(path.name for path in folder.iterdir()) == [
            ".DS_Store",
            ".step_00000004.7.partial",
            ".step_notes",
        ]


def test_a_second_trainer_of_a_live_run_is_refused(tmp_path):
    """Its process id is named; another run in the same place is free."""
    code = """
import sys
from pathlib import Path
from canvaslm.errors import InputError
from canvaslm.training.run_state import open_run
try:
    with open_run(Path(sys.argv[1]), sys.argv[2]):
        print("open")
except InputError as error:
    print(error)
"""

    def other(name):
        command = [sys.executable, "-c", code, str(tmp_path), name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    with open_run(tmp_path, "run"):
        told = other("run")
        assert re.search(rf"only trainer of this run, got process {os.getpid()} started at", told)
        assert told.count("\n") == 1
        assert other("another") == "open\n"
    assert other("run") == "open\n"


def test_the_lock_of_a_killed_holder_is_taken_over(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from canvaslm.training.run_state import open_run
with open_run(Path(sys.argv[1]), "run"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert run.returncode == -9
    assert "process" in (tmp_path / "run" / "lock").read_text()
    with open_run(tmp_path, "run") as state:
        assert state.steps() == []


def test_what_a_killed_save_left_is_cleared(tmp_path):
    leftover = tmp_path / "run" / "checkpoints" / ".step_00000004.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    with open_run(tmp_path, "run") as state:
        assert list(state.checkpoints.iterdir()) == []


def test_runs_that_nobody_trains_are_cleared_and_a_live_one_is_kept(tmp_path):
    with open_run(tmp_path, "ended") as state:
        state.record(ran(0), seconds=1.0)
    with open_run(tmp_path, "live"):
        assert clear_runs(tmp_path) == [tmp_path / "ended"]
        assert [path.name for path in tmp_path.iterdir()] == ["live"]
    assert clear_runs(tmp_path) == [tmp_path / "live"]
    assert clear_runs(tmp_path / "nothing") == []
