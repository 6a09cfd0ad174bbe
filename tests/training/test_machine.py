"""Does a run say on what each part of it was trained?"""

import json
import platform

import numpy as np
import pytest
import safetensors
import torch

from canvaslm.training.identity import identity_name
from canvaslm.training.machine import note_machine
from runs import StoppedError, finish, folder, job_of, stop_after


def note(place):
    return json.loads((place / "machine.json").read_text())


def processes(place):
    return note(place)["processes"]


def test_each_process_adds_what_it_ran_on_and_how(tiny_recipe, tmp_path):
    params = tiny_recipe(precision="bfloat16", micro_batch_windows=4).pretrain
    for step in (0, 7):
        note_machine(tmp_path, device=torch.device("cpu"), params=params, from_step=step)
    first, second = processes(tmp_path)
    assert (first["from_step"], second["from_step"]) == (0, 7)
    assert first | {"from_step": 7} == second
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
    }
    assert versions.items() <= first.items()
    assert (first["device"], first["precision"]) == ("cpu", "bfloat16")
    assert (first["micro_batch_windows"], first["compile"]) == (4, False)
    assert first["threads"] == torch.get_num_threads()
    assert first["processor"]


@pytest.mark.parametrize("damage", ["", "[]", '{"processes": 3}', "{}", "\x00"])
def test_a_damaged_note_begins_anew(tiny_recipe, tmp_path, caplog, damage):
    (tmp_path / "machine.json").write_text(damage)
    note_machine(tmp_path, device=torch.device("cpu"), params=tiny_recipe().pretrain, from_step=3)
    assert [entry["from_step"] for entry in processes(tmp_path)] == [3]
    assert "begins anew" in caplog.text


def test_a_run_copies_its_notes_and_removes_what_is_of_an_earlier_one(
    tiny_recipe, shards, tmp_path
):
    """Stopped after five steps, resumed at four: two processes. It has no trace of a bad step."""
    stale = tmp_path / "reports" / "nonfinite"
    stale.mkdir(parents=True)
    (stale / "trace.json").write_text("of an earlier run")
    job = job_of(tiny_recipe("autoregressive", steps=6, save_every=2), shards)
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(5))
    finish(job, tmp_path)
    finish(job, tmp_path)
    assert [entry["from_step"] for entry in processes(tmp_path / "reports")] == [0, 4]
    # A restored report may lie beside the note of another run, so the note says whose it is.
    assert note(tmp_path / "reports")["run"] == identity_name(job.identity)
    assert not stale.exists()


def test_the_trace_of_a_bad_step_is_copied_with_the_reports(tiny_recipe, shards, tmp_path):
    """Whole, in place of what stood there, and by a rerun that trains nothing."""
    job = job_of(tiny_recipe("autoregressive", steps=4, save_every=2), shards)
    finish(job, tmp_path)
    trace = folder(job, tmp_path) / "nonfinite"
    trace.mkdir()
    (trace / "trace.json").write_text("{}")
    copied = tmp_path / "reports" / "nonfinite"
    copied.mkdir()
    (copied / "trace.svg").write_text("old")
    finish(job, tmp_path)
    assert [path.name for path in copied.iterdir()] == ["trace.json"]
