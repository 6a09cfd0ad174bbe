"""Does a run go on elsewhere to the same bytes, and begin with other weights only on purpose?"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from canvaslm.checkpoint import load_model
from canvaslm.checkpoint_state import read_state
from canvaslm.errors import InputError
from canvaslm.reporting.progress import untracked
from canvaslm.training import run as run_room
from canvaslm.training.identity import identity_name
from canvaslm.training.job import make_job
from canvaslm.training.lineage import open_origin
from canvaslm.training.run import pretrain
from canvaslm.training.run_state import open_run
from runs import OUTS, StoppedError, finish, folder, job_of, stop_after

STEPS = {"steps": 8, "save_every": 2, "keep_last": 2, "log_every": 2}


@pytest.fixture
def short(tiny_recipe):
    """A recipe of eight steps with a checkpoint after every second one."""

    def make(kind="autoregressive", **changes):
        return tiny_recipe(kind, **(STEPS | changes))

    return make


def go_on(recipe, shards, place, *, resume=None, fork=None, track=untracked):
    """Train as the stage does, from where the options say."""
    origin = open_origin(resume=resume, fork=fork)
    job = make_job(recipe, shards=shards, code_digest="c", parent=origin.parent)
    places = {"work": place / "work", "out": place / "out", "reports": place / "reports"}
    pretrain(job, **places, track=track, origin=origin)
    return {name: (place / name).read_bytes() for name in OUTS}


def stop(job, place, n_steps):
    with pytest.raises(StoppedError):
        finish(job, place, stop_after(n_steps))
    return folder(job, place)


@pytest.fixture
def moved(short, shards, tmp_path):
    """A run that was stopped after five steps; its folder was copied elsewhere by hand."""
    job = job_of(short(), shards)
    run = stop(job, tmp_path / "old", 5)
    shutil.copytree(run, tmp_path / "copied" / "any name")
    return job, tmp_path / "copied" / "any name"


@pytest.mark.parametrize("what", ["run", "checkpoint", "older checkpoint"])
def test_a_run_goes_on_in_another_place(short, shards, tmp_path, moved, what, caplog):
    """To the bytes of one that never moved, logs included; the copy stays as it was."""
    caplog.set_level("INFO")
    job, copied = moved
    straight = finish(job, tmp_path / "straight")
    step = 2 if what == "older checkpoint" else 4
    place = copied if what == "run" else copied / "checkpoints" / f"step_{step:08d}"
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    assert go_on(short(), shards, tmp_path / "new", resume=place) == straight
    assert f"resumed at step {step} " in caplog.text
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    seconds = (folder(job, tmp_path / "new") / "seconds.csv").read_text().splitlines()
    assert seconds[: step + 1] == (copied / "seconds.csv").read_text().splitlines()[: step + 1]
    machines = json.loads((tmp_path / "new" / "reports" / "machine.json").read_text())
    assert [entry["from_step"] for entry in machines["processes"]] == [0, step]


def test_a_run_that_was_brought_over_needs_its_old_place_no_more(short, shards, tmp_path, moved):
    """It is killed in its new place and started there by the plain command."""
    job, copied = moved
    straight = finish(job, tmp_path / "straight")
    with pytest.raises(StoppedError):
        go_on(short(), shards, tmp_path / "new", resume=copied, track=stop_after(1))
    shutil.rmtree(copied)
    assert go_on(short(), shards, tmp_path / "new") == straight


def test_what_lies_elsewhere_and_is_no_further_is_not_brought(short, shards, tmp_path, moved):
    job, copied = moved
    straight = finish(job, tmp_path / "straight")
    stop(job, tmp_path / "new", 7)
    (copied / "steps.csv").write_text("damaged")
    assert go_on(short(), shards, tmp_path / "new", resume=copied) == straight
    own = folder(job, tmp_path / "old")
    assert go_on(short(), shards, tmp_path / "old", resume=own) == straight


def test_a_folder_under_its_own_name_passes_over_what_is_broken(short, shards, tmp_path, moved):
    """BR-41: the newest whole one is brought over."""
    job, copied = moved
    (copied / "checkpoints" / "step_00000004" / "model.safetensors").write_bytes(b"")
    straight = finish(job, tmp_path / "straight")
    assert go_on(short(), shards, tmp_path / "new", resume=copied) == straight


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_another_run_is_refused_with_what_differs(
    short, shards, tmp_path, moved, kind, caplog, monkeypatch
):
    """Before anything is loaded or a folder is made; the line advises to fork."""
    _, copied = moved
    place = copied if kind == "run" else copied / "checkpoints" / "step_00000004"
    monkeypatch.setattr(run_room, "restore", pytest.fail)
    monkeypatch.setattr(run_room, "Learner", pytest.fail)
    with pytest.raises(InputError) as refused:
        go_on(short(learning_rate=0.02, seed=4), shards, tmp_path / "new", resume=place)
    told = str(refused.value)
    assert "pretrain.learning_rate: 0.01 -> 0.02; pretrain.seed: 3 -> 4" in told
    assert f"--fork {copied}/checkpoints/step_00000004" in told
    assert "\n" not in told
    table = [line.split() for line in caplog.text.splitlines()]
    assert ["pretrain.learning_rate", "0.01", "0.02"] in table
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_without_the_log_of_its_run_is_refused(short, shards, tmp_path, moved):
    """As one that was exported: the loss of its steps is not known."""
    job, copied = moved
    alone = tmp_path / "checkpoints" / "diffusion"
    shutil.copytree(copied / "checkpoints" / "step_00000004", alone)
    with pytest.raises(InputError, match="one that stands alone, so that the loss of its steps"):
        go_on(short(), shards, tmp_path / "new", resume=alone)
    straight = finish(job, tmp_path / "straight")
    stop(job, tmp_path / "far", 7)
    assert go_on(short(), shards, tmp_path / "far", resume=alone) == straight


@pytest.mark.parametrize("damage", [None, "", "steps"])
def test_a_damaged_log_is_not_brought_over_the_own_one(short, shards, tmp_path, moved, damage):
    """The own folder is at step 2 and stays as it is."""
    job, copied = moved
    own = stop(job, tmp_path / "new", 3)
    log = own / "steps.csv"
    before = log.read_bytes()
    if damage is None:
        (copied / "steps.csv").unlink()
    else:
        (copied / "steps.csv").write_text(damage)
    with pytest.raises(InputError, match=r"any name/(steps\.csv|checkpoints)"):
        go_on(short(), shards, tmp_path / "new", resume=copied)
    assert log.read_bytes() == before
    assert not (own / "checkpoints" / "step_00000004").exists()


def test_a_run_that_is_trained_elsewhere_is_not_brought_over(short, shards, tmp_path, moved):
    _, copied = moved
    with (
        open_run(copied.parent, copied.name),
        pytest.raises(InputError, match="expected a run that no process trains, got process"),
    ):
        go_on(short(), shards, tmp_path / "new", resume=copied)


@pytest.mark.parametrize("place", ["absent", "empty", "without checkpoints"])
def test_what_is_no_run_is_refused(tmp_path, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "without checkpoints" / "checkpoints").mkdir(parents=True)
    for options in ({"resume": tmp_path / place}, {"fork": tmp_path / place}):
        options = {"resume": None, "fork": None} | options
        with pytest.raises(InputError, match=f"{place}: expected .*, got none"):
            open_origin(**options)


def test_a_folder_with_checkpoints_in_it_is_answered_with_the_newest(moved):
    """Of the run to fork from its folder is known best, and the folder above the checkpoints."""
    _, copied = moved
    checkpoints = copied / "checkpoints"
    newest = checkpoints / "step_00000004"
    for place in (copied, checkpoints):
        with pytest.raises(InputError, match=f"give --fork {re.escape(str(newest))}$"):
            open_origin(resume=None, fork=place)
    with pytest.raises(InputError, match=f"give --resume {re.escape(str(newest))}$"):
        open_origin(resume=checkpoints, fork=None)


def test_to_resume_and_to_fork_are_two_things(tmp_path):
    with pytest.raises(InputError, match="expected one of them, got both"):
        open_origin(resume=tmp_path, fork=tmp_path)


@pytest.fixture
def parent(short, shards, tmp_path):
    """The checkpoint that a finished run has exported."""
    finish(job_of(short(), shards), tmp_path / "parent")
    return tmp_path / "parent" / "out"


def test_a_fork_is_a_new_run_with_those_weights(short, shards, tmp_path, parent, monkeypatch):
    """Fresh moments, step and schedule; each checkpoint and the metrics name the parent."""
    first = {}
    train = run_room.train

    def spy(learner, *arguments, progress, **options):
        first["weights"] = {k: v.clone() for k, v in learner.model.state_dict().items()}
        first["moments"] = [float(v.abs().max()) for s in learner.optimizer.state.values()
                            for v in s.values()]  # fmt: skip
        first["progress"] = progress
        return train(learner, *arguments, progress=progress, **options)

    monkeypatch.setattr(run_room, "train", spy)
    forked = go_on(short(learning_rate=0.002), shards, tmp_path / "fork", fork=parent)
    stored = load_file(parent / "model.safetensors")
    assert all(torch.equal(first["weights"][name], stored[name]) for name in stored)
    assert set(first["moments"]) == {0.0}
    assert first["progress"].step == 0
    state = read_state(parent)
    due = {
        "identity": identity_name(state.identity.model_dump(mode="json")),
        "step": 8,
        "model_sha256": state.files["model.safetensors"],
    }
    assert json.loads(forked["reports/metrics.json"])["parent"] == due
    (run,) = (tmp_path / "fork" / "work").iterdir()
    saved = [read_state(path) for path in [tmp_path / "fork" / "out", *run.glob("checkpoints/*")]]
    for each in saved:
        assert each.identity.model_dump(mode="json")["parent"] == due
        assert run.name == identity_name(each.identity.model_dump(mode="json"))
    assert len(saved) == 3
    learned = list(load_model(tmp_path / "fork" / "out").state_dict().values())
    assert any(not torch.equal(a, b) for a, b in zip(learned, stored.values(), strict=True))


def test_the_average_of_a_fork_begins_with_its_weights(short, shards, tmp_path, parent):
    """Of step 0, which is saved before any update."""
    go_on(short(ema_decay=0.9, keep_last=None), shards, tmp_path / "fork", fork=parent)
    (run,) = (tmp_path / "fork" / "work").iterdir()
    moments = load_file(run / "checkpoints" / "step_00000000" / "optimizer.safetensors")
    for name, weight in load_file(parent / "model.safetensors").items():
        assert torch.equal(moments[f"ema/{name}"], weight), name


def test_a_run_of_the_seed_has_no_parent(short, shards, tmp_path, parent):
    """So that the same settings with and without a parent are two runs."""
    del parent
    assert read_state(tmp_path / "parent" / "out").identity.parent is None
    metrics = json.loads((tmp_path / "parent" / "reports" / "metrics.json").read_text())
    assert metrics["parent"] is None


@pytest.mark.parametrize("n_steps", [0, 1, 3, 4])
def test_a_killed_fork_goes_on_to_the_same_bytes(short, shards, tmp_path, parent, n_steps):
    straight = go_on(short(seed=4), shards, tmp_path / "straight", fork=parent)
    with pytest.raises(StoppedError):
        go_on(short(seed=4), shards, tmp_path / "torn", fork=parent, track=stop_after(n_steps))
    assert go_on(short(seed=4), shards, tmp_path / "torn", fork=parent) == straight


def test_a_fork_outlives_its_parent(short, shards, tmp_path, parent):
    """Killed before its first own step was saved; its folder is enough to go on."""
    straight = go_on(short(seed=4), shards, tmp_path / "straight", fork=parent)
    with pytest.raises(StoppedError):
        go_on(short(seed=4), shards, tmp_path / "torn", fork=parent, track=stop_after(1))
    shutil.rmtree(parent)
    with pytest.raises(InputError, match="a fork that has begun needs none and goes on with --res"):
        go_on(short(seed=4), shards, tmp_path / "torn", fork=parent)
    (run,) = (tmp_path / "torn" / "work").iterdir()
    assert go_on(short(seed=4), shards, tmp_path / "torn", resume=run) == straight


def test_a_fork_never_replaces_its_parent(short, shards, tmp_path, parent):
    before = {path.name: path.read_bytes() for path in parent.iterdir()}
    with pytest.raises(InputError, match="the parent, which the new checkpoint would replace"):
        go_on(short(seed=4), shards, tmp_path / "parent", fork=parent)
    assert {path.name: path.read_bytes() for path in parent.iterdir()} == before


def test_weights_of_another_shape_begin_nothing(short, shards, tmp_path, parent):
    """By name and shape, nothing left out: neither a wider one nor the other objective."""
    for recipe in (short(model={"ffn_width": 20}), short("diffusion")):
        with pytest.raises(InputError, match=r"out/model\.safetensors"):
            go_on(recipe, shards, tmp_path / "fork", fork=parent)


def test_a_changed_token_is_told_by_its_shard(short, repacked, tmp_path, moved, caplog):
    """BR-20: old and new hash; the manifest fits, so nothing else would notice.

    Refused where it is asked to go on, passed over where it lies in the run's own folder, and
    taken only as a fork, which is recorded.
    """
    old_job, copied = moved
    name = "train/shard_00000.bin"
    new_job = job_of(short(), repacked)
    old, new = (job.identity["data"]["shards"][name] for job in (old_job, new_job))
    assert old != new
    with pytest.raises(InputError) as refused:
        go_on(short(), repacked, tmp_path / "new", resume=copied)
    assert f"data.shards.{name}: {old[:12]}.. -> {new[:12]}.." in str(refused.value)
    row = [f"data.shards.{name}", f'"{old}"', f'"{new}"']
    assert row in [line.split() for line in caplog.text.splitlines()]
    caplog.clear()
    own = folder(new_job, tmp_path / "new") / "checkpoints"
    shutil.copytree(copied / "checkpoints", own)
    straight = finish(new_job, tmp_path / "straight")
    assert finish(new_job, tmp_path / "new") == straight
    assert "passed over" in caplog.text
    assert row in [line.split() for line in caplog.text.splitlines()]
    parent = copied / "checkpoints" / "step_00000004"
    go_on(short(), repacked, tmp_path / "fork", fork=parent)
    recorded = read_state(tmp_path / "fork" / "out").identity.parent
    assert recorded is not None
    assert recorded.identity == identity_name(old_job.identity)


def test_an_unfinished_run_that_may_be_meant_is_told(short, shards, tmp_path, caplog):
    """The nearest one, of the same objective; a finished one and a fresh start tell nothing."""
    caplog.set_level("INFO")
    far = job_of(short(learning_rate=0.02, seed=4), shards)
    stop(far, tmp_path, 3)
    assert ", unfinished," not in caplog.text
    near = job_of(short(learning_rate=0.03), shards)
    stop(near, tmp_path, 5)
    caplog.clear()
    finish(job_of(short("diffusion"), shards), tmp_path)
    assert ", unfinished," not in caplog.text
    finish(job_of(short(), shards), tmp_path)
    finish(job_of(short(), shards), tmp_path)
    told = f"{folder(near, tmp_path)} stands at step 4, unfinished, and differs in"
    assert caplog.text.count(", unfinished,") == 1
    assert told in caplog.text
    assert ["pretrain.learning_rate", "0.03", "0.01"] in [
        line.split() for line in caplog.text.splitlines()
    ]
    caplog.clear()
    finish(near, tmp_path)
    finish(far, tmp_path)
    caplog.clear()
    finish(job_of(short(seed=9), shards), tmp_path)
    assert ", unfinished," not in caplog.text
