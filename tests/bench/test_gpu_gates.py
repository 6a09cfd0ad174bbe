"""Is a gate that goes wrong a result of its own, and not the end of the others?"""

import sys
from pathlib import Path

import pytest
import torch

import gpu_gates
import gpu_training
from canvaslm.reporting.benches import read_bench
from gpu_gate import Place, learner_of
from gpu_gates import GATES, Gate

FAKES = """
import os, threading
from gpu_gate import Found

def raises(place):
    raise ValueError("no such kernel")

def dies(place):
    os._exit(9)

def hangs(place):
    threading.Event().wait()

def breaks(place):
    return Found(ratios={"equal": 0.0}, broken=["other bytes"])

def holds(place):
    assert place.tiny
    return Found(rows=[{"form": "ours", "median_s": 0.5}], ratios={"equal": 1.0})
"""


def gate(name: str, budget_s: float = 60.0) -> Gate:
    return Gate(name=name, run=f"fake_gates:{name}", budget_s=budget_s, ratios=("equal",))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is told here is told without a GPU")
def test_gates_that_raise_die_hang_or_break_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake_gates.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["x", "--tiny", "--out", str(tmp_path / "gpu_gates.json")])
    names = ("raises", "dies", "hangs", "breaks", "holds")
    monkeypatch.setattr(
        gpu_gates, "GATES", tuple(gate(name, 3.0 if name == "hangs" else 60.0) for name in names)
    )
    assert gpu_gates.main() == 1
    written = read_bench(tmp_path / "gpu_gates.json")
    rows = {row["gate"]: row for row in written.rows if "verdict" in row}
    assert {name: rows[name]["verdict"] for name in names} == {
        "raises": "fail",
        "dies": "fail",
        "hangs": "fail",
        "breaks": "fail",
        "holds": "not_measured",
    }
    reasons = {name: str(rows[name]["why"]) for name in names}
    assert "ValueError: no such kernel" in reasons["raises"]
    assert "status 9" in reasons["dies"]
    assert "longer than its 3 s" in reasons["hangs"]
    assert reasons["breaks"] == "other bytes"
    assert "needs a GPU" in reasons["holds"]
    assert "its code ran here" in reasons["holds"]
    assert written.ratios == {f"gpu/{name}/equal": None for name in names}
    assert "no such kernel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        ("adamw", {"step", "exp_avg", "exp_avg_sq"}),
        ("muon", {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}),
    ],
)
def test_runs_are_compared_by_their_weights_and_all_that_their_optimiser_keeps(
    optimizer: str, kinds: set[str]
) -> None:
    place = Place(device=torch.device("cpu"), tiny=True, rounds=1)
    plan = place.plan(optimizer=optimizer, windows_per_step=1, micro_batch_windows=1)
    learner = learner_of(plan, place)
    found = gpu_training._trained(learner, plan, 0, 1)
    assert {name.partition("/")[0] for name in found if "/" in name} == kinds
    kept = sum(len(learner.optimizer.state[x]) for x in learner.model.parameters())
    assert len(found) == len(learner.model.state_dict()) + kept


def test_without_a_gpu_nothing_is_run_and_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_gates, "_end_of", lambda *_: pytest.fail("a gate was run"))
    monkeypatch.setattr("sys.argv", ["x", "--out", str(tmp_path / "gpu_gates.json")])
    assert gpu_gates.main() == 0
    written = read_bench(tmp_path / "gpu_gates.json")
    assert set(written.ratios.values()) == {None}
    assert written.reason("gpu/step/share_of_peak") == "needs a GPU, and torch finds none here"
    assert [row["verdict"] for row in written.rows] == ["not_measured"] * len(GATES)


def test_all_gates_together_take_ten_minutes_at_most() -> None:
    assert gpu_gates._ALL_S < 600
    assert max(gate.budget_s for gate in GATES) <= 200


def test_a_gate_owes_what_the_bounds_ask_of_it() -> None:
    owed = {f"gpu/{gate.name}/{ratio}" for gate in GATES for ratio in gate.ratios}
    text = Path(sys.modules["gpu_gates"].__file__ or "").with_name("bounds.yaml").read_text()
    asked = {
        line.split("id: ")[1].split(",")[0] for line in text.splitlines() if "id: gpu/" in line
    }
    assert asked
    assert asked <= owed
