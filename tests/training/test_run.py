"""Is a run one run: straight, killed and resumed, cut otherwise, or exported again?"""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from canvaslm.checkpoint import latest_complete, load_model
from canvaslm.checkpoint_state import read_state
from canvaslm.corpus.batches import window_indices
from canvaslm.errors import GateClosedError, InputError
from canvaslm.objective.targets import LossSum
from canvaslm.training import run as run_room
from canvaslm.training.identity import identity_name
from canvaslm.training.learner import Learner
from canvaslm.training.loader import window_numbers
from canvaslm.training.loop import _readable, advance, start
from canvaslm.training.optimizer import update_flops
from canvaslm.training.plan import learning_rate
from canvaslm.training.run_state import open_run
from runs import OUTS, StoppedError, finish, folder, job_of, loss_rows, stop_after


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_two_runs_from_scratch_give_the_same_bytes(tiny_recipe, shards, tmp_path, kind):
    job = job_of(tiny_recipe(kind), shards)
    assert finish(job, tmp_path / "first") == finish(job, tmp_path / "second")


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_stopped_and_resumed_run_gives_the_same_bytes(tiny_recipe, shards, tmp_path, kind):
    """BR-15..17, 37, 47: ten windows, four a step, so epochs end inside and after steps 5 and 10.

    StoppedError before the first checkpoint (3), on one (5, and 10), and between two (8, 12).
    """
    job = job_of(tiny_recipe(kind), shards)
    straight = finish(job, tmp_path / "straight")
    for stop in (3, 5, 8, 10, 12):
        place = tmp_path / str(stop)
        with pytest.raises(StoppedError):
            finish(job, place, stop_after(stop))
        assert not (place / "out").exists()
        assert finish(job, place) == straight, stop


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_resumed_run_under_muon_and_with_an_average_gives_the_same_bytes(
    tiny_recipe, shards, tmp_path, kind
):
    """A step is skipped before the stop and one after it."""
    recipe = tiny_recipe(kind, optimizer="muon", ema_decay=0.9)
    job = job_of(recipe, shards, poison=(14, 37))
    straight = finish(job, tmp_path / "straight")
    for stop in (3, 5, 8):
        place = tmp_path / str(stop)
        with pytest.raises(StoppedError):
            finish(job, place, stop_after(stop))
        assert finish(job, place) == straight, stop
    moments = load_file(tmp_path / "straight" / "out" / "optimizer.safetensors")
    kinds = {name.partition("/")[0] for name in moments}
    assert kinds == {"exp_avg", "exp_avg_sq", "step", "momentum_buffer", "ema"}


@pytest.mark.parametrize("knobs", [{"optimizer": "muon"}, {"ema_decay": 0.9}])
def test_a_checkpoint_of_another_optimiser_is_another_run_s(tiny_recipe, shards, tmp_path, knobs):
    """Nothing of it is taken, though it lies where the run looks."""
    plain, other = (job_of(tiny_recipe(**changes), shards) for changes in ({}, knobs))
    finish(plain, tmp_path / "plain")
    due = finish(other, tmp_path / "due")
    shutil.copytree(folder(plain, tmp_path / "plain"), folder(other, tmp_path / "mixed"))
    (folder(other, tmp_path / "mixed") / "steps.csv").unlink()
    assert finish(other, tmp_path / "mixed") == due


def test_operations_of_muon_are_counted_among_those_of_a_run(tiny_recipe, shards, tmp_path):
    """Once a step, however many windows it has."""
    plain, under_muon = (job_of(tiny_recipe(optimizer=kind), shards) for kind in ("adamw", "muon"))
    update = update_flops(under_muon.recipe)
    more = (under_muon.flops_of_first(4) - plain.flops_of_first(4)) / 4
    assert more == pytest.approx(update / 4) != 0
    finish(under_muon, tmp_path)
    assert float(loss_rows(tmp_path)[-1]["flops"]) == pytest.approx(
        15 * (plain.flops_of_first(4) + update)
    )


def test_a_run_stopped_again_and_again_gives_the_same_bytes(tiny_recipe, shards, tmp_path):
    job = job_of(tiny_recipe(), shards)
    straight = finish(job, tmp_path / "straight")
    for stop in (6, 6, 4):  # 6 steps, back to 5; 11, back to 10; 14, back to 10
        with pytest.raises(StoppedError):
            finish(job, tmp_path / "torn", stop_after(stop))
    assert finish(job, tmp_path / "torn") == straight


def test_a_resumed_run_with_a_skipped_step_gives_the_same_bytes(tiny_recipe, shards, tmp_path):
    """The skip list is part of the state: window 18 is bad in step 4, 37 in step 9."""
    job = job_of(tiny_recipe(), shards, poison=(18, 37))
    straight = finish(job, tmp_path / "straight")
    with pytest.raises(StoppedError):
        finish(job, tmp_path / "torn", stop_after(7))
    assert finish(job, tmp_path / "torn") == straight
    metrics = json.loads(straight["reports/metrics.json"])
    assert (metrics["bad_steps"], metrics["steps"], metrics["windows"]) == (2, 15, 60)
    skipped = json.loads(straight["out/state.json"])["progress"]["skipped"]
    assert [(item["step"], item["cause"]) for item in skipped] == [
        (4, "loss is nan"),
        (9, "loss is nan"),
    ]


def test_the_first_resumed_step_uses_its_own_learning_rate(tiny_recipe, shards, tmp_path):
    """BR-37: 15 straight against 5+10 and 12 (back to 10) + 5, as floats."""
    job = job_of(tiny_recipe(), shards)

    def rates(place, *stops):
        for stop in stops:
            with pytest.raises(StoppedError):
                finish(job, place, stop_after(stop))
        finish(job, place)
        with open_run(place / "work", identity_name(job.identity)) as state:
            return [record.learning_rate for record in state.steps()]

    straight = rates(tmp_path / "straight")
    assert len(straight) == 15
    assert rates(tmp_path / "five", 5) == straight
    assert rates(tmp_path / "twelve", 12) == straight


def test_a_finished_run_is_only_copied_out(tiny_recipe, shards, tmp_path, monkeypatch):
    job = job_of(tiny_recipe(), shards)
    first = finish(job, tmp_path)
    timing = (tmp_path / "reports" / "timing.csv").read_bytes()
    for name in OUTS:
        (tmp_path / name).unlink()
    monkeypatch.setattr(run_room, "Learner", pytest.fail)
    assert finish(job, tmp_path) == first
    assert (tmp_path / "reports" / "timing.csv").read_bytes() == timing


def test_cadence_changes_the_rows_and_nothing_else(tiny_recipe, shards, tmp_path):
    """A run that was logged and saved otherwise before it was killed writes the same bytes."""
    finish(job_of(tiny_recipe(), shards), tmp_path / "plain")
    other = job_of(tiny_recipe(log_every=5, save_every=4, keep_last=None), shards)
    straight = finish(other, tmp_path / "other")
    with pytest.raises(StoppedError):
        finish(job_of(tiny_recipe(), shards), tmp_path / "mixed", stop_after(7))
    assert finish(other, tmp_path / "mixed") == straight
    plain = (tmp_path / "plain" / "out" / "model.safetensors").read_bytes()
    assert straight["out/model.safetensors"] == plain
    assert [row["step"] for row in loss_rows(tmp_path / "mixed")] == ["5", "10", "15"]
    assert [row["step"] for row in loss_rows(tmp_path / "plain")] == [
        *map(str, range(2, 15, 2)),
        "15",
    ]


def test_the_windows_of_a_step_are_those_of_its_numbers(tiny_recipe, shards, tmp_path, monkeypatch):
    """One epoch holds each window once, also where it ends inside a step (BR-15, 16)."""
    seen = []
    take_step = Learner.take_step

    def spy(self, step, windows, numbers):
        seen.append((windows, numbers))
        return take_step(self, step, windows, numbers)

    monkeypatch.setattr(Learner, "take_step", spy)
    job = job_of(tiny_recipe(), shards)
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(7))
    finish(job, tmp_path)
    numbers = np.concatenate([numbers for _, numbers in seen])
    # 7 steps, then again from the checkpoint after 5
    assert numbers.tolist() == [*range(28), *range(20, 60)]
    ids = np.concatenate([windows for windows, _ in seen])[28:]
    expected = job.windows.gather(window_indices(20, 40, seed=3, n_windows=10))
    assert np.array_equal(ids, expected)
    epoch = job.windows.gather(window_indices(20, 10, seed=3, n_windows=10))
    assert len(np.unique(epoch, axis=0)) == 10


def test_micro_batches_change_neither_windows_nor_noise(tiny_recipe, shards, tmp_path):
    """Three steps cut 1x4, 2x2 and 4x1 lose the same nats up to rounding."""
    found = {}
    for micro in (1, 2, 4):
        recipe = tiny_recipe(micro_batch_windows=micro, steps=3)
        finish(job_of(recipe, shards), tmp_path / str(micro))
        found[micro] = [float(row["loss_nats"]) for row in loss_rows(tmp_path / str(micro))]
    assert found[1] == pytest.approx(found[4], rel=1e-5)
    assert found[2] == pytest.approx(found[4], rel=1e-5)


def test_a_run_that_does_not_learn_stops_with_its_log_written(
    tiny_recipe, shards, tmp_path, caplog
):
    """BR-48: three bad steps in a row, before any checkpoint; a rerun says the same."""
    job = job_of(tiny_recipe(), shards, poison=range(4, 60))
    for _ in range(2):
        with pytest.raises(GateClosedError, match=r"3 steps in a row .*loss is nan.* 4 to 7"):
            finish(job, tmp_path)
        with open_run(tmp_path / "work", identity_name(job.identity)) as state:
            assert [record.cause for record in state.steps()] == ["", *["loss is nan"] * 3]
    assert "step 1 skipped, nothing changed: loss is nan (window numbers 4 to 7)" in caplog.text
    assert not (tmp_path / "out").exists()


def test_a_run_whose_gate_closes_reports_first(tiny_recipe, shards, tmp_path):
    """Four of fifteen steps, of which the first ran; then the same run comes to its end."""
    reports = tmp_path / "reports"
    poisoned = job_of(tiny_recipe(), shards, poison=range(4, 60))
    with pytest.raises(GateClosedError) as closed:
        finish(poisoned, tmp_path)
    metrics = json.loads((reports / "metrics.json").read_text())
    assert metrics["verdict"] == "fail"
    assert str(closed.value).startswith(
        metrics["verdict_reason"] + "; the trace of the first fault is "
    )
    assert str(tmp_path) not in metrics["verdict_reason"]
    assert (metrics["steps"], metrics["bad_steps"]) == (4, 3)
    assert metrics["final_loss_nats_per_target"] is None
    assert [row["skipped_steps"] for row in loss_rows(tmp_path)] == ["1", "2"]
    finish(job_of(tiny_recipe(), shards), tmp_path)
    metrics = json.loads((reports / "metrics.json").read_text())
    assert (metrics["verdict"], metrics["verdict_reason"]) == ("pass", "")


def test_a_run_says_where_it_starts_and_what_it_trains_again(tiny_recipe, shards, tmp_path, caplog):
    """In one line, so that no row seems lost: killed after 3 steps, none saved, and after 9."""
    caplog.set_level("INFO")
    job = job_of(tiny_recipe(), shards)
    for n_steps in (3, 9):
        with pytest.raises(StoppedError):
            finish(job, tmp_path, stop_after(n_steps))
    finish(job, tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    again = "; steps.csv is cut back to it, later rows to be trained again: "
    assert [line for line in lines if line.startswith("starts at step 0")] == [
        "starts at step 0",
        f"starts at step 0{again}3",
    ]
    [resumed] = [line for line in lines if line.startswith("resumed at step 5 from ")]
    assert resumed.endswith(f"{again}4")


def test_the_loss_of_a_run_that_diverges_is_readable():
    assert _readable(6.24061) == "6.2406"
    assert _readable(19193233888247808.0) == "1.919e+16"


def test_a_run_that_diverged_ends_and_says_so(tiny_recipe, shards, tmp_path):
    """It came to its end, so nothing is stopped; its verdict does not call that a success."""
    recipe = tiny_recipe("autoregressive", learning_rate=30.0, max_gradient_norm=1.0)
    finish(job_of(recipe, shards), tmp_path)
    metrics = json.loads((tmp_path / "reports" / "metrics.json").read_text())
    assert metrics["verdict"] == "fail"
    assert "ln V = 3.611" in metrics["verdict_reason"]


@pytest.mark.parametrize("bad_step", [3, 4, 9, 14])
def test_a_bad_step_is_caught_where_a_row_a_checkpoint_or_the_end_is_due(
    tiny_recipe, shards, tmp_path, bad_step
):
    """BR-50: step 3 is logged, 4 is saved, 9 is both, 14 is the last and is both."""
    job = job_of(tiny_recipe(), shards, poison=[4 * bad_step])
    finish(job, tmp_path)
    model = load_model(tmp_path / "out")
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert sum(int(row["skipped_steps"]) for row in loss_rows(tmp_path)) == 1
    skipped = read_state(tmp_path / "out").progress.skipped
    assert [(item.step, item.cause) for item in skipped] == [(bad_step, "loss is nan")]


def test_only_the_asked_number_of_checkpoints_stays(tiny_recipe, shards, tmp_path):
    job = job_of(tiny_recipe(), shards)
    finish(job, tmp_path)
    names = sorted(path.name for path in (folder(job, tmp_path) / "checkpoints").iterdir())
    assert names == ["step_00000010", "step_00000015"]


def test_a_broken_newest_checkpoint_is_passed_over(tiny_recipe, shards, tmp_path):
    """BR-41: with no manual step, and to the same bytes."""
    job = job_of(tiny_recipe(), shards)
    straight = finish(job, tmp_path / "straight")
    with pytest.raises(StoppedError):
        finish(job, tmp_path / "torn", stop_after(12))
    newest = latest_complete(folder(job, tmp_path / "torn") / "checkpoints", identity=job.identity)
    assert newest is not None
    (newest / "optimizer.safetensors").write_bytes(b"")
    assert finish(job, tmp_path / "torn") == straight


def test_no_step_is_taken_where_the_results_would_overwrite_something(
    tiny_recipe, shards, tmp_path, monkeypatch
):
    job = job_of(tiny_recipe(), shards)
    monkeypatch.setattr(run_room, "open_run", pytest.fail)
    (tmp_path / "out" / "diffusion").mkdir(parents=True)
    with pytest.raises(InputError, match="out: expected nothing, or a checkpoint to replace"):
        finish(job, tmp_path)
    (tmp_path / "out" / "diffusion").rmdir()
    (tmp_path / "reports").write_text("mine")
    with pytest.raises(InputError, match="reports: expected a folder, got a file"):
        finish(job, tmp_path)


@pytest.mark.parametrize("damage", ["a flipped bit", "another run", "another number"])
def test_a_state_that_is_not_its_own_is_passed_over(tiny_recipe, shards, tmp_path, caplog, damage):
    """The run goes on from the one before, to the bytes of a straight run."""
    caplog.set_level("INFO")
    job = job_of(tiny_recipe(), shards)
    straight = finish(job, tmp_path / "straight")
    with pytest.raises(StoppedError):
        finish(job, tmp_path / "torn", stop_after(12))
    newest = folder(job, tmp_path / "torn") / "checkpoints" / "step_00000010"
    state = newest / "state.json"
    if damage == "a flipped bit":
        text = state.read_text()
        assert text.count('"step": 10') == 1
        state.write_text(text.replace('"step": 10', '"step": 18'))
    elif damage == "another number":
        newest.rename(newest.with_name("step_00000014"))
    else:
        other = job_of(tiny_recipe(learning_rate=0.02), shards)
        finish(other, tmp_path / "other")
        source = folder(other, tmp_path / "other") / "checkpoints" / newest.name
        shutil.copytree(source, newest, dirs_exist_ok=True)
    assert finish(job, tmp_path / "torn") == straight
    assert "passed over" in caplog.text
    assert "resumed at step 5 " in caplog.text


def test_damaged_seconds_stop_neither_a_run_nor_its_report(tiny_recipe, shards, tmp_path):
    job = job_of(tiny_recipe(), shards)
    first = finish(job, tmp_path)
    (folder(job, tmp_path) / "seconds.csv").write_bytes(bytes(100))
    assert finish(job, tmp_path) == first
    timing = (tmp_path / "reports" / "timing.csv").read_text()
    assert timing.splitlines()[1:] == [f"{step},," for step in (*range(2, 15, 2), 15)]


def test_the_out_says_which_run_it_is(tiny_recipe, shards, tmp_path):
    job = job_of(tiny_recipe("autoregressive"), shards)
    finish(job, tmp_path)
    state = read_state(tmp_path / "out")
    assert state.identity.model_dump(mode="json") == json.loads(json.dumps(job.identity))
    assert state.identity.data.manifest_sha256 == job.windows.manifest.sha256
    progress = state.progress
    assert (progress.step, progress.windows_consumed, progress.tokens) == (15, 60, 960)
    assert progress.flops == job.flops_of_first(60)
    assert load_model(tmp_path / "out").params.time_width == 0


def test_other_code_is_another_run(tiny_recipe, shards, tmp_path):
    """BR-75: nothing goes on from the state of other settings or other code."""
    with pytest.raises(StoppedError):
        finish(job_of(tiny_recipe(), shards), tmp_path, stop_after(7))
    finish(job_of(tiny_recipe(), shards, code="other"), tmp_path)
    finish(job_of(tiny_recipe(learning_rate=0.02), shards), tmp_path)
    assert len(list((tmp_path / "work").iterdir())) == 3


def test_shards_of_another_vocabulary_are_refused(tiny_recipe, shards):
    layout = tiny_recipe().layout.model_copy(update={"vocab_size": 36})
    with pytest.raises(InputError, match=r"expected layout\.vocab_size \(36\), got 37"):
        job_of(tiny_recipe(layout=layout), shards)


def test_windows_are_counted_once_and_everything_follows_from_the_count(tiny_recipe):
    recipe = tiny_recipe()
    learner = Learner(recipe, _Constant(), torch.device("cpu"))
    progress = start()
    for step in range(3):
        numbers = window_numbers(step, 4)
        record = learner.take_step(step, np.zeros((4, 16), np.int64), numbers)
        progress = advance(
            progress, record, recipe.pretrain, recipe.layout, lambda windows: 2.5 * windows
        )
    assert (progress.step, progress.windows_consumed) == (3, 12)
    assert (progress.tokens, progress.flops) == (12 * 16, 12 * 2.5)


class _Constant:
    def loss(self, model, windows, numbers):
        return LossSum(nats=model.final_norm.weight.sum(), n_targets=windows.numel())

    def flops_of_first(self, params, n_windows):
        return 2.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler itself warns about parts of torch
def test_a_compiled_run_saves_a_plain_model_and_resumes(tiny_recipe, shards, tmp_path):
    """BR-43: same keys as the plain run's, losses equal to rounding, resume equal to the bit."""

    def job(compile):
        recipe = tiny_recipe(
            "autoregressive", model={"n_layers": 1}, steps=4, save_every=2, compile=compile
        )
        return job_of(recipe, shards)

    finish(job(False), tmp_path / "plain")
    straight = finish(job(True), tmp_path / "compiled")
    with pytest.raises(StoppedError):
        finish(job(True), tmp_path / "torn", stop_after(3))
    assert finish(job(True), tmp_path / "torn") == straight
    plain, compiled = (tmp_path / name for name in ("plain", "compiled"))
    keys = [load_model(place / "out").state_dict().keys() for place in (plain, compiled)]
    assert keys[0] == keys[1]
    losses = [[float(row["loss_nats"]) for row in loss_rows(p)] for p in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_result_never_depends_on_the_global_generators(tiny_recipe, shards, tmp_path, kind):
    """Python's, NumPy's and torch's stand elsewhere at the start and before each step.

    Draws come from named streams, so what else draws in the process changes nothing. That no
    global generator is moved isn't promised: building a layer does, and its draws are overwritten.
    """

    def scrambled(seed):
        def seed_all(number):
            random.seed(number)
            np.random.seed(number)  # noqa: NPY002, since libraries draw from it
            torch.manual_seed(number)

        def track(items, *, total, label):
            del total, label
            for number, item in enumerate(items):
                seed_all(seed + number)
                yield item

        seed_all(seed)
        return track

    job = job_of(tiny_recipe(kind), shards)
    first = finish(job, tmp_path / "first", scrambled(1))
    assert finish(job, tmp_path / "second", scrambled(1000)) == first


@pytest.fixture
def used_rates(monkeypatch):
    """The learning rates of all groups at each update that an optimiser really makes."""
    rates = []
    step = torch.optim.AdamW.step

    def spy(self, *arguments, **options):
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    return rates


def test_the_optimiser_uses_one_rate_a_step_however_the_step_is_cut(
    tiny_recipe, shards, tmp_path, used_rates
):
    """BR-36: ten steps of eight windows, whole and accumulated over four micro-batches."""
    found = {}
    for micro in (8, 2):
        used_rates.clear()
        recipe = tiny_recipe(steps=10, windows_per_step=8, micro_batch_windows=micro)
        finish(job_of(recipe, shards), tmp_path / str(micro))
        found[micro] = list(used_rates)
        due = [learning_rate(step, recipe.pretrain) for step in range(10)]
        assert found[micro] == [[rate, rate] for rate in due]
    assert found[8] == found[2]


def test_the_optimiser_uses_the_rates_of_a_straight_run_after_a_resume(
    tiny_recipe, shards, tmp_path, used_rates
):
    """BR-37: 20 straight against 7+13 and 10+10, as equal floats, the first resumed one too."""
    found = []
    for stops in ((), (7,), (10,)):
        used_rates.clear()
        place = tmp_path / str(stops)
        job = job_of(tiny_recipe(steps=20, save_every=max(stops, default=20)), shards)
        for stop in stops:
            with pytest.raises(StoppedError):
                finish(job, place, stop_after(stop))
        finish(job, place)
        found.append(list(used_rates))
    assert len(found[0]) == 20
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_changed_digit_in_the_log_is_refused(tiny_recipe, shards, tmp_path):
    """A row from before the checkpoint: it would silently be another loss log."""
    job = job_of(tiny_recipe(), shards)
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(12))
    log = folder(job, tmp_path) / "steps.csv"
    lines = log.read_text().splitlines(keepends=True)
    fields = lines[4].split(",")
    fields[1] = f"1{fields[1]}"
    log.write_text("".join([*lines[:4], ",".join(fields), *lines[5:]]))
    with pytest.raises(InputError, match=r"steps\.csv: expected the record of 10 steps with sha"):
        finish(job, tmp_path)


def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(tiny_recipe, shards, tmp_path):
    """With another cadence it would not be overwritten, and a whole one would go for it."""
    job = job_of(tiny_recipe(), shards)
    with pytest.raises(StoppedError):
        finish(job, tmp_path, stop_after(11))
    checkpoints = folder(job, tmp_path) / "checkpoints"
    (checkpoints / "step_00000010" / "model.safetensors").write_bytes(b"")
    with pytest.raises(StoppedError):
        finish(job_of(tiny_recipe(save_every=7), shards), tmp_path, stop_after(4))
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["passed_over_step_00000010", "step_00000005", "step_00000007"]


def test_a_run_goes_on_with_smaller_micro_batches(tiny_recipe, shards, tmp_path):
    """BR-19: the next window is the same, and losses agree to rounding."""
    whole = job_of(tiny_recipe(micro_batch_windows=4), shards)
    finish(whole, tmp_path / "straight")
    with pytest.raises(StoppedError):
        finish(whole, tmp_path / "torn", stop_after(7))
    finish(job_of(tiny_recipe(micro_batch_windows=1), shards), tmp_path / "torn")
    machine = json.loads((tmp_path / "torn" / "reports" / "machine.json").read_text())
    cuts = [(each["from_step"], each["micro_batch_windows"]) for each in machine["processes"]]
    assert cuts == [(0, 4), (5, 1)]  # the second did not start anew
    rows = [loss_rows(tmp_path / place) for place in ("straight", "torn")]
    losses = [[float(row["loss_nats"]) for row in each] for each in rows]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert [row["windows"] for row in rows[1]] == [row["windows"] for row in rows[0]]
