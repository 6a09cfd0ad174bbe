"""Is everything that a run can leave behind wrongly told by its own name?"""

import dataclasses
import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from canvaslm.checkpoint import load_trained_model
from canvaslm.model.backbone import Backbone
from canvaslm.run_audit import average, revival
from canvaslm.run_audit.rehearsal import fresh_learner, learn_one_window, take_steps
from canvaslm.run_audit.revival import stored_identity
from canvaslm.run_audit.state import check_state
from canvaslm.training.identity import identity_name

KINDS = ("diffusion", "autoregressive")


@pytest.fixture
def open_long(open_run, tmp_path):
    """A run with a checkpoint of its own, audited with enough steps to learn a window."""

    def open_one(kind):
        subject = open_run(kind)
        place = tmp_path / "checkpoint"
        shutil.copytree(subject.checkpoint, place)
        params = subject.params.model_copy(
            update={"overfit_steps": 120, "overfit_learning_rate": 0.03}
        )
        return dataclasses.replace(subject, checkpoint=place, params=params)

    return open_one


def one(checks, name):
    (check,) = (check for check in checks if check.name == name)
    return check


def rewrite_state(subject, change):
    path = subject.checkpoint / "state.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", [*KINDS, "muon", "default"])
def test_a_clean_run_passes(open_long, failures, kind):
    checks = check_state(open_long(kind))
    assert failures(checks) == [], checks
    assert len(checks) == (10 if kind == "muon" else 9)


def test_what_has_no_counter_is_told(open_long):
    told = one(check_state(open_long("muon")), "moments_counted_every_update").measured
    assert told.startswith("counters at 12; ")
    assert told.endswith("14 momenta have no counter")


def test_trained_weights_that_are_judged_in_place_of_the_average_are_named(
    open_long, failures, monkeypatch
):
    monkeypatch.setattr(average, "load_model", load_trained_model)
    checks = check_state(open_long("muon"))
    assert failures(checks) == ["average_is_what_is_judged"]
    assert "0 of the averages differ" in one(checks, "average_is_what_is_judged").measured


@pytest.mark.parametrize(
    "change",
    [
        {"exp_avg/embedding.weight": None},
        {"ema/embedding.weight": None},
        {"momentum_buffer/blocks.0.attention.key.weight": None},
        {"step/blocks.0.attention.key.weight": torch.tensor(12.0)},
    ],
)
def test_a_moment_too_few_or_too_many_is_named(open_long, change):
    subject = open_long("muon")
    path = subject.checkpoint / "optimizer.safetensors"
    moments = load_file(path)
    for name, value in change.items():
        moments.pop(name, None)
        if value is not None:
            moments[name] = value
    save_file(moments, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite_state(subject, lambda state: state["files"].update({path.name: digest}))
    check = one(check_state(subject), "checkpoint_is_whole")
    assert check.verdict == "fail"
    assert check.measured.startswith("2 of 2 hashes agree")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_is_found_without_the_loader(open_run, tmp_path, name):
    subject = open_run("diffusion")
    place = tmp_path / "checkpoint"
    shutil.copytree(subject.checkpoint, place)
    content = bytearray((place / name).read_bytes())
    content[-1] ^= 1
    (place / name).write_bytes(content)
    check = one(check_state(dataclasses.replace(subject, checkpoint=place)), "checkpoint_is_whole")
    assert check.verdict == "fail"
    assert check.measured.startswith("1 of 2 hashes agree")


def test_another_identity_is_named_by_its_keys_and_a_parent_is_shown(open_long, failures):
    subject = open_long("diffusion")
    parent = {"identity": "0123456789abcdef", "step": 7, "model_sha256": "m"}
    rewrite_state(subject, lambda state: state["identity"].update(parent=parent))
    checks = check_state(subject)
    name = "identity_is_that_of_the_inputs"
    assert name not in failures(checks)
    assert one(checks, name).measured.endswith("forked from 0123456789abcdef at step 7")
    identity = subject.job.identity | {"code": "other"}
    identity["pretrain"] = identity["pretrain"] | {"beta1": 0.8}
    job = dataclasses.replace(subject.job, identity=identity)
    check = one(check_state(dataclasses.replace(subject, job=job)), name)
    assert check.verdict == "fail"
    assert check.measured.startswith("2 of ")
    assert "code, pretrain.beta1" in check.measured


def test_a_knob_that_was_not_written_down_is_named(open_long, failures):
    subject = open_long("diffusion")
    rewrite_state(subject, lambda state: state["identity"]["model"].pop("norm_eps"))
    found = failures(check_state(subject))
    assert "configuration_is_recorded" in found
    assert "1 missing" in one(check_state(subject), "configuration_is_recorded").measured


def test_a_machine_that_nobody_wrote_down_is_not_measured(open_long, tmp_path):
    subject = open_long("diffusion")
    absent = one(check_state(dataclasses.replace(subject, reports=tmp_path)), "machine_is_recorded")
    assert absent.verdict == "not_measured"
    assert one(check_state(subject), "machine_is_recorded").verdict == "pass"
    run = identity_name(stored_identity(subject))
    for content, verdict, told in (
        ({"run": run, "processor": "p", "python": "3", "torch": "2"}, "pass", "recorded"),
        ({"run": run, "processor": "p"}, "fail", "recorded, without python, torch"),
        ({"run": "0" * 16, "processor": "p"}, "not_measured", f"of run {'0' * 16} and the"),
        ({"processor": "p"}, "not_measured", "does not say of which run"),
    ):
        (tmp_path / "machine.json").write_text(json.dumps(content))
        checks = check_state(dataclasses.replace(subject, reports=tmp_path))
        found = one(checks, "machine_is_recorded")
        assert found.verdict == verdict
        assert told in found.measured


def test_moments_that_began_anew_are_named_by_their_counter(open_long, failures):
    subject = open_long("diffusion")
    path = subject.checkpoint / "optimizer.safetensors"
    moments = load_file(path)
    for name in moments:
        if name.startswith("step/"):
            moments[name] -= 6
    save_file(moments, path)
    checks = check_state(subject)
    assert "moments_counted_every_update" in failures(checks)
    assert one(checks, "moments_counted_every_update").measured.startswith("counters at 6;")


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_another_tensor_is_named_also_with_equal_values(
    open_long, failures, monkeypatch, kind
):
    right = revival.load_trained_model

    def untied(directory):
        model = right(directory)
        model.__class__ = type("Untied", (Backbone,), {"head_weight": model.head_weight.clone()})
        return model

    monkeypatch.setattr(revival, "load_trained_model", untied)
    checks = check_state(open_long(kind))
    assert failures(checks) == ["head_is_tied"]
    assert one(checks, "head_is_tied").measured == "two tensors after load, a step after load"


@pytest.mark.parametrize(
    ("kind", "moment", "name"),
    [
        ("diffusion", "exp_avg", "embedding.weight"),
        ("diffusion", "exp_avg_sq", "embedding.weight"),
        ("diffusion", "step", "embedding.weight"),
        ("muon", "momentum_buffer", "blocks.0.attention.query.weight"),
        ("muon", "ema", "embedding.weight"),
    ],
)
def test_any_part_of_the_optimiser_that_is_lost_is_named(
    open_long, failures, monkeypatch, kind, moment, name
):
    right = revival.restore

    def forgetful(directory, *, model, optimizer):
        progress = right(directory, model=model, optimizer=optimizer)
        for state in optimizer.state.values():
            if moment in state:
                state[moment].zero_()
        return progress

    monkeypatch.setattr(revival, "restore", forgetful)
    checks = check_state(open_long(kind))
    assert failures(checks) == ["optimizer_state_survives"]
    assert f"{moment}/{name}" in one(checks, "optimizer_state_survives").measured


def test_a_rehearsal_that_took_no_step_proves_nothing(open_long, failures, monkeypatch):
    monkeypatch.setattr(revival, "take_steps", lambda *_, **__: False)
    assert "optimizer_state_survives" in failures(check_state(open_long("diffusion")))


def test_weights_that_a_load_rounds_are_named(open_long, failures, monkeypatch):
    right = revival.load_trained_model

    def rounded(directory):
        model = right(directory)
        with torch.no_grad():
            model.final_norm.weight.copy_(model.final_norm.weight.bfloat16() * 1.01)
        return model

    monkeypatch.setattr(revival, "load_trained_model", rounded)
    assert failures(check_state(open_long("diffusion"))) == ["reload_is_bit_equal"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_that_is_not_learned_in_time_is_named(open_run, failures, kind):
    checks = check_state(open_run(kind))  # four steps
    assert failures(checks) == ["one_window_is_learned"]
    assert one(checks, "one_window_is_learned").measured.endswith("in 4 steps")


def test_one_window_keeps_its_noise_while_it_is_learned(open_run, monkeypatch):
    subject, seen = open_run("diffusion"), []
    right = type(subject.job.objective).loss

    def watched(self, model, windows, numbers):
        seen.append((windows.tolist(), numbers.tolist()))
        return right(self, model, windows, numbers)

    monkeypatch.setattr(type(subject.job.objective), "loss", watched)
    learned = learn_one_window(subject)
    assert learned.n_steps == 4
    assert seen == [seen[0]] * 4
    assert seen[0][1] == [0]
    assert learned.last_nats < learned.first_nats


def test_a_rehearsal_may_be_longer_than_the_run(open_run):
    subject = open_run("diffusion")
    short = subject.recipe.pretrain.model_copy(update={"steps": 1, "warmup_steps": 0})
    recipe = dataclasses.replace(subject.recipe, pretrain=short)
    subject = dataclasses.replace(subject, recipe=recipe)
    assert take_steps(subject, fresh_learner(subject), first=0, n_steps=3)
