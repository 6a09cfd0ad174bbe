"""Is every way in which a run can learn from the wrong tokens told by its own name?"""

import dataclasses

import numpy as np
import pytest
import torch

from canvaslm.checkpoint_state import SkippedStep
from canvaslm.corpus.windows import Windows
from canvaslm.diffusion.corruption import Noisy
from canvaslm.layout import Layout
from canvaslm.objective import denoising, noisy_loss
from canvaslm.objective.next_token import NextToken
from canvaslm.objective.targets import LossSum
from canvaslm.run_audit import consumed
from canvaslm.run_audit.data import check_data
from canvaslm.run_audit.stand_in import NO_TARGET, read_back

KINDS = ("diffusion", "prefix", "autoregressive")
OPTIONS = ("default", "phased", "biased", "previous", "bound")


def measured(checks, name):
    (check,) = (check for check in checks if check.name == name)
    return check.measured


def skipped(step, *, windows_per_step=4):
    first = step * windows_per_step
    last = first + windows_per_step - 1
    return SkippedStep(step=step, first_window=first, last_window=last, cause="loss is nan")


def with_progress(subject, **changes):
    progress = subject.state.progress.model_copy(update=changes)
    return dataclasses.replace(
        subject, state=subject.state.model_copy(update={"progress": progress})
    )


@pytest.mark.parametrize("kind", KINDS + OPTIONS)
def test_a_clean_run_passes(open_run, failures, kind):
    checks = check_data(open_run(kind))
    assert failures(checks) == [], checks
    assert len(checks) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_read_back_from_gradients_and_match_what_carries_loss(open_run, kind):
    subject = open_run(kind)
    for sample in read_back(subject):
        aimed = sample.targets != NO_TARGET
        assert np.array_equal(sample.targets[aimed], sample.window[aimed])
        if sample.times is None:
            assert aimed.all()
        else:
            assert np.array_equal(aimed, np.repeat(sample.times > 0, 4))


def test_targets_do_not_depend_on_how_the_loss_grows(open_run, failures):
    """A loss that is wrong in size but asks for the right tokens is for another check to name."""
    subject = open_run("autoregressive")

    class Squared(NextToken):
        def loss(self, model, windows, numbers):
            right = super().loss(model, windows, numbers)
            return LossSum(nats=right.nats**2, n_targets=right.n_targets)

    job = dataclasses.replace(subject.job, objective=Squared(**vars(subject.job.objective)))
    assert failures(check_data(dataclasses.replace(subject, job=job))) == []


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("diffusion", "targets_are_clean_tokens"), ("autoregressive", "targets_are_next_tokens")],
)
def test_shifted_targets_are_named(open_run, failures, monkeypatch, kind, name, shift):
    module = "noisy_loss" if kind == "diffusion" else "next_token"
    place = f"canvaslm.objective.{module}.chunked_cross_entropy"
    right = noisy_loss.chunked_cross_entropy

    def shifted(hidden, weight, targets, **options):
        return right(hidden, weight, targets.roll(shift, dims=1), **options)

    monkeypatch.setattr(place, shifted)
    checks = check_data(open_run(kind))
    assert failures(checks) == [name]
    assert not measured(checks, name).startswith("0 ")


def test_shifted_targets_of_a_clean_stream_are_named(open_run, failures, monkeypatch):
    right = denoising.chunked_cross_entropy

    def shifted(hidden, weight, targets, **options):
        return right(hidden, weight, targets.roll(1, dims=1), **options)

    monkeypatch.setattr("canvaslm.objective.denoising.chunked_cross_entropy", shifted)
    assert failures(check_data(open_run("phased"))) == ["targets_are_clean_tokens"]


def test_a_twin_that_reads_its_own_target_is_named(open_run, failures):
    subject = open_run("autoregressive")

    class Unshifted(NextToken):
        def _nats(self, model, windows, *, reduction):
            return super()._nats(model, windows.roll(-1, dims=1), reduction=reduction)

    job = dataclasses.replace(subject.job, objective=Unshifted(**vars(subject.job.objective)))
    found = failures(check_data(dataclasses.replace(subject, job=job)))
    assert found == ["inputs_are_shifted_by_one", "targets_are_next_tokens"]


def test_noise_that_is_not_that_of_its_time_is_named(open_run, failures, monkeypatch):
    right = denoising.draw_corruption

    def kept(windows, numbers, **options):
        return Noisy(ids=windows, times=right(windows, numbers, **options).times)

    monkeypatch.setattr(denoising, "draw_corruption", kept)
    assert failures(check_data(open_run("diffusion"))) == ["inputs_are_corrupted_windows"]


def test_an_id_outside_the_vocabulary_is_named_first(open_run, failures):
    subject = open_run("autoregressive")
    small = Layout(canvas_tokens=1, canvases_per_window=16, vocab_size=30)
    recipe = dataclasses.replace(subject.recipe, layout=small)
    checks = check_data(dataclasses.replace(subject, recipe=recipe))
    assert failures(checks)[0] == "ids_are_in_vocabulary"
    assert measured(checks, "ids_are_in_vocabulary") == "0 to 36 in 48 windows"


def test_held_out_windows_are_named_and_those_that_taught_nothing_are_counted_apart(
    open_run, failures
):
    subject = open_run("diffusion")
    leaky = dataclasses.replace(subject, train=Windows(subject.shards, "val", 16))
    checks = check_data(leaky)
    assert failures(checks) == ["no_held_out_window_consumed"]
    told = measured(checks, "no_held_out_window_consumed")
    assert told.startswith("48 of 48 windows that were learned from")
    unused = with_progress(leaky, skipped=tuple(skipped(step) for step in range(12)))
    checks = check_data(unused)
    assert "no_held_out_window_consumed" not in failures(checks)
    told = measured(checks, "no_held_out_window_consumed")
    assert told.startswith("0 of 0 windows")
    assert told.endswith("48 of 48 in steps that changed nothing")


def test_a_window_that_stands_in_both_splits_by_nature_is_no_leak(open_run, failures, monkeypatch):
    """Short windows repeat; equal ids prove nothing when the training files hold them too."""
    subject = open_run("diffusion")
    digests = consumed._digests

    def overlapping(opened, split):
        return digests(opened, split) | digests(opened, "train")

    monkeypatch.setattr(consumed, "_digests", overlapping)
    assert failures(check_data(subject)) == []


def test_a_run_that_ended_early_is_named(open_run, failures):
    subject = open_run("diffusion")
    short = with_progress(subject, step=11, windows_consumed=44, tokens=704)
    checks = check_data(short)
    assert failures(checks) == ["run_reached_its_plan"]
    assert measured(checks, "run_reached_its_plan").startswith("11 steps, 44 windows, 704 tokens, ")


def test_a_skipped_step_that_the_log_does_not_count_is_named(open_run, failures):
    subject = with_progress(open_run("diffusion"), skipped=(skipped(3),))
    checks = check_data(subject)
    assert failures(checks) == ["skipped_steps_are_counted"]
    told = measured(checks, "skipped_steps_are_counted")
    assert told.startswith("1 skipped by the state and 0 by the log, with 4 windows")
    subject.loss_rows[1]["skipped_steps"] = "1"
    assert failures(check_data(subject)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.append(rows[-1]),  # BR-47
        lambda rows: rows.insert(3, rows[1]),
        lambda rows: rows.pop(2),
        lambda rows: rows.reverse(),
        lambda rows: rows[2].update(loss_nats="nan"),
        lambda rows: rows[2].update(gradient_norm="inf"),
        lambda rows: rows[2].update(loss_nats=""),
        lambda rows: rows[2].update(windows="25"),
        lambda rows: rows[2].update(targets="0"),
        lambda rows: rows[2].update(flops="1.0"),  # as in the log of another model
        lambda rows: rows[2].update(step="six"),
    ],
)
def test_a_log_that_is_not_whole_is_named(open_run, failures, change):
    subject = open_run("diffusion")
    assert [row["step"] for row in subject.loss_rows] == ["2", "4", "6", "8", "10", "12"]
    change(subject.loss_rows)
    assert "loss_log_is_whole" in failures(check_data(subject))


def test_reading_back_changes_nothing(open_run):
    subject = open_run("diffusion")
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    check_data(subject)
    assert all(torch.equal(before[k], v) for k, v in subject.model.state_dict().items())
