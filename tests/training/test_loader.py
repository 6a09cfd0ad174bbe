"""Do threads that read ahead change which windows a step sees?"""

import threading

import numpy as np
import pytest

from canvaslm.corpus.batches import window_indices
from canvaslm.corpus.windows import Windows
from canvaslm.training.loader import gather, open_reader, window_numbers
from runs import StoppedError, finish, job_of, stop_after

WORKERS = [0, 1, 2]


@pytest.fixture
def split(shards):
    return Windows(shards, "train", 16)


@pytest.fixture
def params(tiny_recipe):
    def make(**changes):
        return tiny_recipe(**changes).pretrain

    return make


@pytest.mark.parametrize("workers", WORKERS)
def test_every_step_gets_the_windows_of_its_numbers(split, params, workers):
    """BR-18: ten windows, four a step, over the ends of six epochs, to the last step."""
    knobs = params(loader_workers=workers)
    with open_reader(split, knobs) as reader:
        for step in range(knobs.steps):
            ids, numbers = reader.read(step)
            assert numbers.tolist() == [*range(4 * step, 4 * step + 4)]
            due = split.gather(window_indices(4 * step, 4, seed=3, n_windows=10))
            assert np.array_equal(ids, due)
            assert (ids.dtype, numbers.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("workers", WORKERS)
def test_any_step_may_be_asked_for(split, params, workers):
    """A run goes back after a rollback, passes over marked steps, and asks for one again."""
    knobs = params(loader_workers=workers)
    with open_reader(split, knobs) as reader:
        for step in (0, 1, 2, 9, 10, 3, 3, 4, 14, 0):
            ids, numbers = reader.read(step)
            assert np.array_equal(numbers, window_numbers(step, 4))
            assert np.array_equal(ids, gather(split, numbers, 3))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("before", "after"), [((4, 8), (2, 8)), ((2, 8), (8, 8))])
def test_the_next_window_after_three_steps_of_eight_is_24(split, params, workers, before, after):
    """BR-18, BR-19: whatever was read ahead, and however a step is cut before and after."""
    micro, windows = before
    knobs = params(
        loader_workers=workers, micro_batch_windows=micro, windows_per_step=windows, steps=9
    )
    with open_reader(split, knobs) as reader:
        seen = [reader.read(step)[1] for step in range(3)]
    assert np.concatenate(seen).tolist() == [*range(24)]
    micro, windows = after
    knobs = params(
        loader_workers=2 - workers, micro_batch_windows=micro, windows_per_step=windows, steps=9
    )
    with open_reader(split, knobs) as reader:
        ids, numbers = reader.read(3)
    assert numbers[0] == 24
    assert np.array_equal(ids, split.gather(window_indices(24, 8, seed=3, n_windows=10)))


def test_the_seed_of_the_run_decides_the_order(split, params):
    """BR-19: seeds 1 and 2 differ, one seed twice does not."""
    found = []
    for seed in (1, 2, 1):
        with open_reader(split, params(seed=seed, loader_workers=2)) as reader:
            found.append(np.concatenate([reader.read(step)[0] for step in range(5)]))
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


class Broken(Windows):
    """Windows of which one cannot be read."""

    def __init__(self, inner, index):
        self.inner, self.index, self.asked = inner, index, []

    def __len__(self):
        return len(self.inner)

    def gather(self, indices):
        self.asked.append(threading.current_thread())
        if self.index in indices:
            raise OSError("the disk is gone")
        return self.inner.gather(indices)


@pytest.mark.parametrize("workers", WORKERS)
def test_what_a_thread_could_not_read_is_raised_on_the_step_that_needs_it(split, params, workers):
    (index,) = window_indices(10, 1, seed=3, n_windows=10)  # in step 2, and next in epoch 2
    first = next(n for n in range(60) if window_indices(n, 1, seed=3, n_windows=10) == [index])
    with open_reader(Broken(split, index), params(loader_workers=workers)) as reader:
        for step in range(first // 4):
            reader.read(step)
        with pytest.raises(OSError, match="the disk is gone"):
            reader.read(first // 4)


@pytest.mark.parametrize("workers", WORKERS)
def test_no_thread_outlives_the_run(split, params, workers):
    before = set(threading.enumerate())
    watched = Broken(split, -1)
    with open_reader(watched, params(loader_workers=workers)) as reader:
        reader.read(0)
        assert len(set(threading.enumerate()) - before) == workers
    assert set(threading.enumerate()) == before
    assert all((thread in before) == (workers == 0) for thread in watched.asked)
    n_asked = len(watched.asked)
    assert n_asked <= 1 + 2 * workers, "no further ahead than that"


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_the_number_of_threads_changes_no_byte_of_a_run(tiny_recipe, shards, tmp_path, kind):
    """BR-18: none, two, and three after a stop between two checkpoints; windows, noise and order.

    With a bad step in a row too many, the run goes back and asks for windows that it has read.
    """
    size = {"steps": 12, "save_every": 3, "max_consecutive_bad_steps": 2}

    def job(workers):
        recipe = tiny_recipe(kind, loader_workers=workers, **size)
        return job_of(recipe, shards, poison=[16, 20])

    straight = finish(job(0), tmp_path / "none")
    assert finish(job(2), tmp_path / "two") == straight
    with pytest.raises(StoppedError):
        finish(job(2), tmp_path / "torn", stop_after(4))
    assert finish(job(3), tmp_path / "torn") == straight
    assert b"marked after a rollback" in straight["out/state.json"]
