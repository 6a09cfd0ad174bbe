"""Does a comparison of two pipelines let only one of them work at a time, and leave none behind?"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import pipeline
from clones import Repro, clone

# Says what DVC says. A real one needs a moment to start a stage; this one waits to be sent on, so
# that what it does in a stage comes after the stop whatever the machine is busy with.
STAND_IN = """
import signal, sys
name, stages, log, status = sys.argv[1], sys.argv[2].split(), sys.argv[3], int(sys.argv[4])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])
for stage in stages:
    print(f"Running stage '{stage}':")
    signal.sigwait([signal.SIGCONT])
    with open(log, "a") as file:
        file.write(f"{name} {stage}\\n")
sys.exit(status)
"""


def stand_in(place: Path, name: str, stages: str, *, status: int = 0) -> list[str]:
    return [sys.executable, "-c", STAND_IN, name, stages, str(place / "log"), str(status)]


def test_clones_work_in_turn_stage_by_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(place: Path, words: list[str], *, threads: int) -> Repro:
        stages = "train judge" if place.name == "before" else "train judge tell"
        return Repro(tmp_path, stand_in(tmp_path, place.name, stages), threads=threads)

    monkeypatch.setattr(pipeline, "Repro", start)
    places = {name: tmp_path / name for name in ("before", "after")}
    seconds = pipeline._run_in_turn(places, ["dvc", "repro"], threads=1)
    assert (tmp_path / "log").read_text().splitlines() == [
        "before train",
        "after train",
        "after judge",
        "before judge",
        "after tell",
    ]
    assert {name: list(found) for name, found in seconds.items()} == {
        "before": ["start of DVC", "train", "judge"],
        "after": ["start of DVC", "train", "judge", "tell"],
    }
    assert all(value > 0 for found in seconds.values() for value in found.values())


def test_a_pipeline_that_fails_ends_the_comparison_with_what_it_said(tmp_path: Path) -> None:
    run = Repro(tmp_path, stand_in(tmp_path, "a", "train", status=3), threads=1)
    with pytest.raises(SystemExit, match="ended with 3"):
        run.run_stage()


@pytest.mark.timeout(60)
def test_a_clone_stands_still_at_a_border_and_is_ended_with_the_comparison(tmp_path: Path) -> None:
    run = Repro(tmp_path, stand_in(tmp_path, "a", "train judge"), threads=1)
    os.waitid(os.P_PID, run._process.pid, os.WSTOPPED | os.WNOWAIT)  # for ever where it goes on
    run.end()
    assert run._process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(run._process.pid, 0)


def test_a_stage_that_only_one_revision_has_is_not_compared() -> None:
    rows = pipeline._list_seconds(
        {"before": {"train": 4.0, "gone": 2.0}, "after": {"train": 3.0, "new": 9.0}}
    )
    assert rows == [
        {"stage": "train", "before_s": 4.0, "after_s": 3.0},
        {"stage": "gone", "before_s": 2.0, "after_s": None},
        {"stage": "new", "before_s": None, "after_s": 9.0},
        {"stage": "those that both have", "before_s": 4.0, "after_s": 3.0},
        {"stage": "all", "before_s": 6.0, "after_s": 12.0},
    ]


def test_a_loss_that_grew_is_told_in_standard_errors_and_one_that_fell_is_no_fault(
    tmp_path: Path,
) -> None:
    for name, nats, bound in (("before", 3.5, 5.0), ("after", 3.54, 4.9)):
        folder = tmp_path / name / "reports/eval_loss_parity"
        folder.mkdir(parents=True)
        metrics = {
            "autoregressive": {"nats_per_token": nats, "standard_error_nats": 0.03},
            "diffusion": {"bound_nats_per_token": bound, "standard_error_nats": 0.04},
        }
        (folder / "metrics.json").write_text(json.dumps(metrics))
    rows = pipeline._compare_losses({name: tmp_path / name for name in ("before", "after")})
    twin, bound = (row["excess_over_error"] for row in rows)
    assert twin == pytest.approx(0.04 / (0.03 * 2**0.5))
    assert bound == 0  # a ratio of a bench is never below


def test_a_revision_that_git_does_not_know_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        clone("no-such-revision", tmp_path / "place", profile="ci")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no-such-revision" in said
    assert "git fetch --unshallow" in said
    assert not (tmp_path / "place").exists()
