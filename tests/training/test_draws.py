"""Do draws come back by themselves, whatever the generators of the process stand at?"""

import random

import numpy as np
import pytest
import torch

from runs import StoppedError, finish, job_of, stop_after


def scramble(seed):
    """Put every global generator somewhere else."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002, since libraries draw from it
    torch.manual_seed(seed)
    for _ in range(seed % 7):
        random.random()
        np.random.random()  # noqa: NPY002
        torch.rand(1)


def global_states():
    """Python's and NumPy's; building a layer draws from torch's, and nothing of that is kept."""
    legacy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return random.getstate(), legacy["key"].tolist(), legacy["pos"]


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_resumed_run_asks_no_global_generator(tiny_recipe, shards, tmp_path, kind):
    """BR-45, BR-46: Python's, NumPy's and torch's are scrambled before each process.

    What a step draws is a function of its number, so there is no state of theirs to save, and none
    that could be lost.
    """
    job = job_of(tiny_recipe(kind, steps=8, save_every=3), shards)
    scramble(1)
    straight = finish(job, tmp_path / "straight")
    scramble(2)
    with pytest.raises(StoppedError):
        finish(job, tmp_path / "torn", stop_after(5))
    scramble(12)
    before = global_states()
    assert finish(job, tmp_path / "torn") == straight
    assert global_states() == before
