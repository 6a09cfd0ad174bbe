"""Are the best checkpoints those whose steps had the lowest loss?"""

import pytest

from canvaslm.training.best import best_checkpoints
from canvaslm.training.run_state import StepRecord, open_run
from runs import StoppedError, finish, folder, job_of, stop_after


def steps_of(*means, targets=10):
    """A record for each mean nats per target; None for a step that changed nothing."""
    return [
        StepRecord(
            step=step,
            nats=None if mean is None else mean * targets,
            targets=targets,
            gradient_norm=None if mean is None else 1.0,
            learning_rate=0.1,
            cause="loss is nan" if mean is None else "",
        )
        for step, mean in enumerate(means)
    ]


def best(records, saved, keep, save_every=2):
    return best_checkpoints(records, saved, save_every=save_every, keep=keep)


def test_a_checkpoint_has_the_loss_of_the_steps_that_led_to_it():
    """Means 4, 1, 3, 2 of two steps each; a longer log changes nothing."""
    records = steps_of(5, 3, 1, 1, 3, 3, 2, 2)
    assert best(records, [2, 4, 6, 8], keep=4) == [4, 8, 6, 2]
    assert best([*records, *steps_of(0, 0)], [2, 4, 6, 8], keep=2) == [4, 8]


def test_none_are_kept_where_none_are_asked_for():
    assert best(steps_of(1, 1), [2], keep=0) == []


def test_targets_weigh_and_not_steps():
    """30 nats over 11 targets against 2.9 a target: the mean of means would be 5.25."""
    records = [*steps_of(2, targets=10), *steps_of(8.5, targets=1), *steps_of(2.9, 2.9)]
    assert best(records, [2, 4], keep=1) == [2]


def test_of_equal_ones_the_later_is_better():
    assert best(steps_of(1, 1, 1, 1, 1, 1), [6, 2, 4], keep=2) == [6, 4]


def test_what_has_no_loss_is_never_best():
    """Steps 2 and 3 changed nothing; of 4 and 5 one did, and the other is the mean."""
    records = steps_of(3, 3, None, None, 9, None)
    assert best(records, [2, 4, 6], keep=3) == [2, 6]
    assert best(steps_of(None, None), [0, 2], keep=3) == []


def test_a_loss_that_is_no_number_is_never_best():
    assert best(steps_of(1, 1, float("nan"), 1, float("inf"), 1), [2, 4, 6], keep=3) == [2]


@pytest.mark.parametrize("save_every", [2, 3])
def test_a_save_off_the_beat_is_judged_by_as_many_steps(save_every):
    """The end of a run, or a save that waited for the end of bad steps."""
    records = steps_of(5, 5, 5, 1, 1)
    assert best(records, [3, 5], keep=1, save_every=save_every) == [5]


def saved_steps(job, place):
    names = [path.name for path in (folder(job, place) / "checkpoints").iterdir()]
    return sorted(int(name.removeprefix("step_")) for name in names)


@pytest.mark.parametrize("keep_best", [0, 1, 2])
def test_a_run_keeps_its_best_ones_however_often_it_was_stopped(
    tiny_recipe, shards, tmp_path, keep_best
):
    """BR-42: a rate that lets the loss rise again, so that the last ones are not the best.

    Step 2 is bad, and is no part of its mean.
    """
    recipe = tiny_recipe(
        "autoregressive", steps=12, save_every=2, keep_last=1, keep_best=keep_best,
        learning_rate=2.0, final_learning_rate_share=1.0, warmup_steps=6,
    )  # fmt: skip
    job = job_of(recipe, shards, poison=[8])
    straight = finish(job, tmp_path / "straight")
    for stop in (5, 3, 4):
        with pytest.raises(StoppedError):
            finish(job, tmp_path / "torn", stop_after(stop))
    assert finish(job, tmp_path / "torn") == straight
    with open_run(tmp_path / "straight" / "work", folder(job, tmp_path).name) as state:
        records = state.steps()
    losses = {}
    for step in range(2, 13, 2):
        ran = [record for record in records[step - 2 : step] if not record.cause]
        losses[step] = sum(record.nats or 0 for record in ran) / sum(
            record.targets for record in ran
        )
    due = sorted(losses, key=losses.__getitem__)[:keep_best]
    assert 12 not in due, "the newest would stay anyway"
    for place in ("straight", "torn"):
        assert saved_steps(job, tmp_path / place) == sorted({*due, 10, 12})
