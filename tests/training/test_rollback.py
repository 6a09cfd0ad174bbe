"""Does a run that cannot go on go back, differ in its second try, and end as it would have?

The tiny run has fifteen steps of four windows, saves every five and gives up after three bad steps
in a row. Each test plants a fault and holds what is left against a run without the fault that
passed over the same steps from its start.
"""

import contextlib
import dataclasses
import json
import math

import pytest
import torch

from canvaslm.checkpoint_state import Rollback, read_state
from canvaslm.errors import GateClosedError
from canvaslm.objective.targets import LossSum
from canvaslm.training import run as run_room
from canvaslm.training.learner import Learner
from canvaslm.training.loop import start
from runs import StoppedError, finish, folder, job_of, loss_rows, stop_after

TRAINED = ("out/model.safetensors", "out/optimizer.safetensors", "reports/loss.csv")


def windows_of(*steps):
    return [4 * step for step in steps]


def trained(outs):
    return {name: outs[name] for name in TRAINED}


def skipped_from_the_start(recipe, shards, place, monkeypatch, steps):
    """What a run without a fault leaves when it passes over these steps."""
    told = Rollback(from_step=15, to_step=0, cause="asked for", bad_steps=0, marked=steps)
    with monkeypatch.context() as patch:
        patch.setattr(run_room, "start", lambda: start().model_copy(update={"rollbacks": (told,)}))
        return trained(finish(job_of(recipe, shards), place))


def state_in(outs):
    return json.loads(outs["out/state.json"])["progress"]


def metrics_in(place):
    return json.loads((place / "reports" / "metrics.json").read_text())


class _Explode(torch.autograd.Function):
    """The value as it is; its gradient infinite."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * math.inf


class Exploding:
    """An objective whose gradient is infinite on some window numbers."""

    def __init__(self, inner, numbers):
        self.inner = inner
        self.numbers = set(numbers)

    def loss(self, model, windows, numbers):
        loss = self.inner.loss(model, windows, numbers)
        if self.numbers.isdisjoint(numbers.tolist()):
            return loss
        return LossSum(nats=_Explode.apply(loss.nats), n_targets=loss.n_targets)

    def flops_of_first(self, params, n_windows):
        return self.inner.flops_of_first(params, n_windows)


def plant_once(monkeypatch, step, damage):
    """Damage the learner once, just before a step, as a failing memory would."""
    take_step, done = Learner.take_step, []

    def spoil(self, number, windows, numbers):
        if number == step and not done:
            done.append(number)
            with torch.no_grad():
                damage(self)
        return take_step(self, number, windows, numbers)

    monkeypatch.setattr(Learner, "take_step", spoil)


def break_a_moment(learner):
    parameter = learner.model.blocks[1].feed_forward.up.weight
    learner.optimizer.state[parameter]["exp_avg"][0, 0] = math.nan


def break_a_weight(learner):
    learner.model.final_norm.weight[0] = math.nan


def blow_up(learner):
    """Weights that are finite, and of no use."""
    for parameter in learner.model.parameters():
        parameter.mul_(1e30)


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_window_that_always_fails_costs_its_step_and_no_more(
    tiny_recipe, shards, tmp_path, monkeypatch, kind
):
    job = job_of(tiny_recipe(kind), shards, poison=windows_of(6, 12))
    outs = finish(job, tmp_path / "poisoned")
    wanted = skipped_from_the_start(
        tiny_recipe(kind), shards, tmp_path / "without", monkeypatch, (6, 12)
    )
    assert trained(outs) == wanted
    assert state_in(outs)["rollbacks"] == []
    assert metrics_in(tmp_path / "poisoned")["bad_steps"] == 2


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_bad_steps_in_a_row_cost_one_rollback(tiny_recipe, shards, tmp_path, monkeypatch, kind):
    """BR-48: the first of them is marked, so the second try has one fewer and goes on."""
    job = job_of(tiny_recipe(kind), shards, poison=windows_of(6, 7, 8))
    outs = finish(job, tmp_path / "poisoned")
    wanted = skipped_from_the_start(
        tiny_recipe(kind), shards, tmp_path / "without", monkeypatch, (6, 7, 8)
    )
    assert trained(outs) == wanted
    [record] = state_in(outs)["rollbacks"]
    assert (record["from_step"], record["to_step"], record["marked"]) == (9, 5, [6])
    assert record["cause"] == "3 steps in a row changed nothing (loss is nan)"
    metrics = metrics_in(tmp_path / "poisoned")
    assert (metrics["rollbacks"], metrics["steps_marked"]) == (1, 1)
    assert (metrics["bad_steps"], metrics["bad_steps_before_rollbacks"]) == (5, 3)
    assert (metrics["verdict"], metrics["steps"]) == ("pass", 15)
    assert metrics["verdict_reason"] == "came to its end with 5 bad steps and 1 rollback"


def test_an_infinite_gradient_changes_nothing_and_costs_one_rollback(
    tiny_recipe, shards, tmp_path, monkeypatch
):
    """BR-40: alone in step 2, and three in a row later."""
    job = job_of(tiny_recipe(), shards)
    exploding = Exploding(job.objective, windows_of(2, 7, 8, 9))
    outs = finish(dataclasses.replace(job, objective=exploding), tmp_path / "poisoned")
    wanted = skipped_from_the_start(
        tiny_recipe(), shards, tmp_path / "without", monkeypatch, (2, 7, 8, 9)
    )
    assert trained(outs) == wanted
    state = state_in(outs)
    assert [record["marked"] for record in state["rollbacks"]] == [[7]]
    causes = {item["step"]: item["cause"] for item in state["skipped"]}
    # inf / inf: an infinite norm is NaN where a part of the gradient was 0 times infinity
    assert set(causes) == {2, 7, 8, 9}
    assert causes[7] == "marked after a rollback"
    assert causes[2].startswith("gradient norm is ")


def test_no_checkpoint_stands_among_bad_steps(tiny_recipe, shards, tmp_path, monkeypatch):
    """One is due after step 9; it waits for the first good step, behind what had to be marked."""
    job = job_of(tiny_recipe(keep_last=None), shards, poison=windows_of(8, 9, 10))
    outs = finish(job, tmp_path / "poisoned")
    wanted = skipped_from_the_start(
        tiny_recipe(), shards, tmp_path / "without", monkeypatch, (8, 9, 10)
    )
    assert trained(outs) == wanted
    [record] = state_in(outs)["rollbacks"]
    assert (record["to_step"], record["marked"]) == (5, [8])
    names = sorted(
        path.name for path in (folder(job, tmp_path / "poisoned") / "checkpoints").iterdir()
    )
    assert names == ["step_00000005", "step_00000012", "step_00000015"]


@pytest.mark.parametrize(
    ("step", "damage", "cause", "blamed", "to_step"),
    [
        (7, break_a_moment, "is not finite", 7, 5),
        (9, break_a_moment, "is not finite", 9, 5),  # seen when step 9 is to be saved
        (8, blow_up, "3 steps in a row changed nothing", 7, 5),  # the latest update before it
        (10, blow_up, "3 steps in a row changed nothing", 9, 5),  # saved since: one further back
        (10, break_a_weight, "is not finite", 10, 10),  # it was finite when it was saved
    ],
)
def test_an_update_that_breaks_the_model_is_the_one_to_blame(
    tiny_recipe, shards, tmp_path, monkeypatch, step, damage, cause, blamed, to_step
):
    """The bad steps after it are symptoms; in the second try they run."""
    plant_once(monkeypatch, step, damage)
    outs = finish(job_of(tiny_recipe(), shards), tmp_path / "broken")
    wanted = skipped_from_the_start(
        tiny_recipe(), shards, tmp_path / "without", monkeypatch, (blamed,)
    )
    assert trained(outs) == wanted
    [record] = state_in(outs)["rollbacks"]
    assert cause in record["cause"]
    assert (record["to_step"], record["marked"]) == (to_step, [blamed])


def marks_of(outs):
    return tuple(step for record in state_in(outs)["rollbacks"] for step in record["marked"])


def test_a_mark_outlives_its_process(tiny_recipe, shards, tmp_path, monkeypatch):
    """A fault that never comes back: only the mark in the state can tell the killed run of it."""
    with monkeypatch.context() as patch:
        plant_once(patch, 7, break_a_moment)
        straight = finish(job_of(tiny_recipe(), shards), tmp_path / "straight")
    with monkeypatch.context() as patch:
        plant_once(patch, 7, break_a_moment)
        with pytest.raises(StoppedError):  # the bars start anew after the rollback
            finish(job_of(tiny_recipe(), shards), tmp_path / "torn", stop_in_second_try(1))
    assert finish(job_of(tiny_recipe(), shards), tmp_path / "torn") == straight
    assert marks_of(straight) == (7,)


def stop_in_second_try(n_steps):
    """A track that lets the first try be and ends the second after so many steps."""
    tries = []

    def track(items, *, total, label):
        tries.append(label)
        yield from (
            items if len(tries) == 1 else stop_after(n_steps)(items, total=total, label=label)
        )

    return track


@pytest.mark.parametrize("stop", [6, 8, 10, 12])
def test_a_poisoned_run_that_is_stopped_ends_with_the_same_bytes(
    tiny_recipe, shards, tmp_path, stop
):
    job = job_of(tiny_recipe(), shards, poison=windows_of(6, 7, 8, 13))
    straight = finish(job, tmp_path / "straight")
    for track in (stop_after(stop), stop_in_second_try(stop - 5)):
        with contextlib.suppress(StoppedError):
            finish(job, tmp_path / "torn", track)
    assert finish(job, tmp_path / "torn") == straight


def test_a_run_that_goes_back_too_often_stops_with_the_reason(tiny_recipe, shards, tmp_path):
    """Each try is one window further; the report counts what the logs have forgotten."""
    job = job_of(tiny_recipe(), shards, poison=range(24, 60))
    match = r"first bad step 9 \(window numbers 36 to 39\), which is blamed; .* went back 3 times"
    with pytest.raises(GateClosedError, match=match) as closed:
        finish(job, tmp_path)
    metrics = metrics_in(tmp_path)
    assert metrics["verdict"] == "fail"
    assert str(closed.value) == (
        f"{metrics['verdict_reason']}; the trace of the first fault is "
        f"{tmp_path / 'reports' / 'nonfinite' / 'trace.json'}"
    )
    assert (metrics["rollbacks"], metrics["steps_marked"], metrics["bad_steps"]) == (3, 3, 12)
    assert [row["step"] for row in loss_rows(tmp_path)] == ["2", "4", "6", "8", "10", "12"]
    assert not (tmp_path / "out").exists()
    with pytest.raises(GateClosedError, match="went back 3 times"):  # a rerun says the same
        finish(job, tmp_path)


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_without_a_checkpoint_the_run_stops_with_the_reason(tiny_recipe, shards, tmp_path, kind):
    job = job_of(tiny_recipe(kind), shards, poison=windows_of(1, 2, 3))
    match = r"first bad step 1 \(window numbers 4 to 7\), which is blamed; there is no checkpoint"
    with pytest.raises(GateClosedError, match=match):
        finish(job, tmp_path)
    assert metrics_in(tmp_path)["rollbacks"] == 0


def test_no_rollback_is_made_where_none_is_allowed(tiny_recipe, shards, tmp_path):
    job = job_of(tiny_recipe(max_rollbacks=0), shards, poison=windows_of(6, 7, 8))
    with pytest.raises(GateClosedError, match="the run went back 0 times"):
        finish(job, tmp_path)


@pytest.mark.parametrize("knobs", [{}, {"optimizer": "muon", "ema_decay": 0.9}])
def test_a_rollback_puts_everything_back(tiny_recipe, shards, tmp_path, monkeypatch, knobs):
    """BR-49: weights, moments, counters and logs are those of the checkpoint, bit by bit."""
    seen = {}
    take_step = Learner.take_step

    def spy(self, step, windows, numbers):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        moments = [
            value.clone()
            for parameter in self.model.parameters()
            for _, value in sorted(self.optimizer.state[parameter].items())
        ]
        seen.setdefault(step, []).append((weights, moments, windows, numbers))
        return take_step(self, step, windows, numbers)

    monkeypatch.setattr(Learner, "take_step", spy)
    job = job_of(tiny_recipe(**knobs), shards, poison=windows_of(6, 7, 8))
    finish(job, tmp_path)
    (weights, moments, *batch), (weights_again, moments_again, *batch_again) = seen[5]
    assert all(torch.equal(value, weights_again[name]) for name, value in weights.items())
    assert all(map(torch.equal, moments, moments_again))
    assert all((one == two).all() for one, two in zip(batch, batch_again, strict=True))
    assert len(seen[6]) == 1
    progress = read_state(tmp_path / "out").progress
    assert (progress.step, progress.windows_consumed) == (15, 60)


def test_the_first_bad_step_is_explained_at_once_and_only_once(
    tiny_recipe, shards, tmp_path, monkeypatch
):
    """The trace is there while the run goes on, and stays; another run's is removed."""
    job = job_of(tiny_recipe(), shards, poison=windows_of(6, 9))
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(8))
    trace = tmp_path / "reports" / "nonfinite"
    told = json.loads((trace / "trace.json").read_text())
    assert (told["step"], told["cause"]) == (6, "loss is nan")
    written = {path.name: path.read_bytes() for path in trace.iterdir()}
    monkeypatch.setattr(Learner, "explain", pytest.fail)
    finish(job, tmp_path)
    assert {path.name: path.read_bytes() for path in trace.iterdir()} == written
    finish(job_of(tiny_recipe(seed=5), shards), tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("keep_last", [1, None])
def test_how_many_checkpoints_stay_decides_nothing(
    tiny_recipe, shards, tmp_path, monkeypatch, keep_last
):
    """An update just before a save broke the model: the checkpoint before it is still there."""
    plant_once(monkeypatch, 10, blow_up)
    job = job_of(tiny_recipe(keep_last=keep_last), shards)
    [record] = state_in(finish(job, tmp_path))["rollbacks"]
    assert (record["to_step"], record["marked"]) == (5, [9])


def test_a_step_without_targets_ends_no_streak(tiny_recipe, shards, tmp_path):
    """A save is due after it, and would stand behind the first bad step."""
    job = job_of(tiny_recipe(keep_last=None, save_every=4), shards, poison=windows_of(5, 6, 8))
    empty = Emptied(job.objective, windows_of(7))
    outs = finish(dataclasses.replace(job, objective=empty), tmp_path)
    [record] = state_in(outs)["rollbacks"]
    assert (record["to_step"], record["marked"]) == (4, [5])


class Emptied:
    """An objective without a target in the steps of some window numbers."""

    def __init__(self, inner, numbers):
        self.inner = inner
        self.numbers = {number // 4 for number in numbers}

    def loss(self, model, windows, numbers):
        loss = self.inner.loss(model, windows, numbers)
        if self.numbers.isdisjoint((numbers // 4).tolist()):
            return loss
        return LossSum(nats=loss.nats * 0.0, n_targets=0)

    def flops_of_first(self, params, n_windows):
        return self.inner.flops_of_first(params, n_windows)


@pytest.mark.parametrize(
    ("step", "damage", "told"),
    [
        (8, blow_up, "first bad step 8 (window numbers 32 to 35); the update of step 7 (window "
         "numbers 28 to 31) is blamed, because its own windows, finite then, no longer are: loss"),
        (9, break_a_moment, "is not finite; no bad step before it; the update of step 9 (window "
         "numbers 36 to 39) is blamed, because it is the latest before that was found; back to 5"),
        (10, break_a_weight, "first bad step 10 (window numbers 40 to 43), which is blamed; back"),
    ],
)  # fmt: skip
def test_the_message_names_the_first_bad_step_and_the_one_to_blame(
    tiny_recipe, shards, tmp_path, monkeypatch, caplog, step, damage, told
):
    """The log of skipped steps and the trace name the one, the mark the other; one line for it."""
    plant_once(monkeypatch, step, damage)
    finish(job_of(tiny_recipe(), shards), tmp_path)
    messages = [record.getMessage() for record in caplog.records]
    [line] = [each for each in messages if "back to step" in each]
    assert told.replace("back to 5", "back to step 5") in line
    assert "steps.csv" not in caplog.text


def test_bad_steps_are_told_with_the_place_of_their_trace(tiny_recipe, shards, tmp_path, caplog):
    """What went wrong first when it happens, and the place of the copy also after a resume."""
    job = job_of(tiny_recipe(), shards, poison=windows_of(6, 9, 12))
    place = tmp_path / "reports" / "nonfinite" / "trace.json"
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(11))
    first = json.loads(place.read_text())["first_place"]
    assert f"step 6, what went wrong first: {first}; see {place}" in caplog.text
    told = f"(window numbers 36 to 39); the trace of the first fault is {place}"
    assert told in caplog.text
    caplog.clear()
    for path in place.parent.iterdir():
        path.unlink()
    place.parent.rmdir()  # as when the reports were restored from elsewhere
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(3))
    assert f"(window numbers 48 to 51); the trace of the first fault is {place}" in (caplog.text)
    assert place.is_file()
