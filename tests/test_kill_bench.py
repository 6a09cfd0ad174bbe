"""Does the test that kills spread its kills, and leave nothing when it is told to end itself?"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kill_test
import torn_run

BENCH = Path(__file__).parents[1] / "bench"

# A child, a grandchild in its group, and one in a group of its own.
TREE = "sleep 600 & one=$!; setsid sleep 600 & echo $$ $one $! > {fifo}; wait"
STAND_IN = f"""
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(BENCH)!r})
import kill_test, torn_run
how, tree = sys.argv[1:3]
del sys.argv[1:3]
def prepare(self, profile):
    (self._scratch / "full").write_bytes(bytes(1000))
    if how == "call":
        kill_test.call(self._scratch, "bash", "-c", tree)
    place = torn_run.Place(
        root=self._scratch, objective="diffusion", steps=1, keep_last=1,
        command=("bash", "-c", tree), environment=kill_test.environment(),
    )
    torn_run.Attempt(place, self._scratch / "log").dvc.wait()
kill_test.KillTest.prepare = prepare
sys.exit(kill_test.main())
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("how", ["call", "attempt"])
def test_a_test_that_is_told_to_end_leaves_no_process_and_no_folder(
    tmp_path: Path, number: signal.Signals, how: str
) -> None:
    """Whole trees of processes, the scratch folder, one line, and the status of the signal."""
    scratch, fifo = tmp_path / "scratch", tmp_path / "fifo"
    scratch.mkdir()
    os.mkfifo(fifo)
    script = [sys.executable, "-c", STAND_IN, how, TREE.format(fifo=fifo), "--kills", "1"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(script, stderr=subprocess.PIPE, text=True, env=environment) as test:
        pids = [int(word) for word in fifo.read_text().split()]
        try:
            assert len(pids) == 3
            assert all(map(torn_run._lives, pids))
            assert len(list(scratch.iterdir())) == 1
            test.send_signal(number)
            _, told = test.communicate(timeout=30)
            assert not any(map(torn_run._lives, pids))
        finally:
            test.kill()
            for pid in filter(torn_run._lives, pids):
                os.kill(pid, signal.SIGKILL)
    assert test.returncode == 128 + number
    assert list(scratch.iterdir()) == []
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith(f"ended by {number.name}")


@pytest.mark.parametrize("n_objectives", [1, 2])
@pytest.mark.parametrize("temp", [False, True])
def test_few_kills_hit_different_phases_and_many_hit_all(n_objectives: int, temp: bool) -> None:
    """A save and DVC's commit are among the first two; each share is in the order of a training."""
    all_moments = set(torn_run.MOMENTS) - ({"lock file"} if temp else set())
    for n_kills in range(1, 30):
        shares = kill_test._share(n_kills, n_objectives, temp=temp)
        aims = [aim for share in shares for aim in share]
        assert len(aims) == n_kills
        assert len(set(aims)) == min(n_kills, len(all_moments))
        assert set(aims) <= all_moments
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(share == sorted(share, key=torn_run.MOMENTS.index) for share in shares)
        assert {"save", "commit"} <= set(aims) or n_kills == 1
    assert all(set(share) == all_moments for share in kill_test._share(20, n_objectives, temp=temp))
