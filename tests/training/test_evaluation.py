"""Does looking at a model leave its training alone, and does training leave the look alone?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evaluations
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.training import run
from canvaslm.training.learner import Learner
from evaluations import evaluate, evaluate_checkpoints
from runs import StoppedError, finish, job_of, loss_rows, stop_after


@pytest.fixture(params=["diffusion", "autoregressive"])
def kind(request):
    return request.param


def other_model(recipe, kind):
    """The model that the one in training is compared with; it learns nothing."""
    model = Backbone(recipe.model, recipe.layout)
    initialise(model, 9)
    return model.eval()


def watch_every(n_steps, learners, other, kind, seen):
    """A track that evaluates the model in training after every so many steps; 0 never does."""

    def track(items, *, total, label):
        del total, label
        for number, item in enumerate(items, start=1):
            yield item
            if n_steps and number % n_steps == 0:
                seen.append(look(learners[-1].model, other, kind))

    return track


def look(model, other, kind):
    """Evaluate, and hold mode, gradients and the global generator to what they were."""
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    pair = (other, model) if kind == "diffusion" else (model, other)
    metrics = evaluate(*pair)
    assert model.training, "back in train mode"
    assert not other.training
    for parameter, before in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, before), "no gradient of the evaluation is left"
    assert all(parameter.grad is None for parameter in other.parameters())
    assert torch.equal(torch.get_rng_state(), state), "no draw from the global generator"
    return metrics


def test_evaluating_never_or_every_few_steps_trains_the_same_bits(
    tiny_recipe, shards, tmp_path, monkeypatch, kind
):
    """BR-64: losses, norms and weights of a run that is evaluated every 5 steps, every 7, never."""
    recipe, learners = tiny_recipe(kind, steps=15), []
    twin_of = {"diffusion": "autoregressive", "autoregressive": "diffusion"}[kind]
    other = other_model(tiny_recipe(twin_of), twin_of)

    class Watched(Learner):
        def __init__(self, *args):
            super().__init__(*args)
            learners.append(self)

    monkeypatch.setattr(run, "Learner", Watched)
    outs, rows, seen = {}, {}, {0: [], 5: [], 7: []}
    for n_steps, found in seen.items():
        track = watch_every(n_steps, learners, other, kind, found)
        place = tmp_path / str(n_steps)
        outs[n_steps] = finish(job_of(recipe, shards), place, track=track)
        rows[n_steps] = loss_rows(place)
    assert [len(found) for found in seen.values()] == [0, 3, 2]
    assert seen[5][0] != seen[5][-1], "the model that is looked at learns"
    assert rows[5] == rows[7] == rows[0]
    assert outs[5] == outs[7] == outs[0]


def test_one_checkpoint_always_scores_the_same_on_the_same_draws(tiny_recipe, shards, tmp_path):
    """BR-65: twice in one process, in a new process, and after a resume."""
    straight = train_both(tiny_recipe, shards, tmp_path / "straight", stopped=False)
    first = evaluate_checkpoints(*straight)
    torch.rand(3)  # whoever draws from the global generator in between
    assert evaluate_checkpoints(*straight) == first
    resumed = train_both(tiny_recipe, shards, tmp_path / "resumed", stopped=True)
    assert evaluate_checkpoints(*resumed) == first
    assert evaluate_in_a_new_process(*straight) == first
    assert (first["n_windows"], first["n_tokens"]) == (5, 80)


def train_both(tiny_recipe, shards, place, *, stopped):
    """The checkpoints of the twin and of the denoiser after four steps, at once or in two goes."""
    for kind in ("autoregressive", "diffusion"):
        job = job_of(tiny_recipe(kind, steps=4, save_every=1), shards)
        if stopped:
            with pytest.raises(StoppedError):
                finish(job, place / kind, track=stop_after(2))
        finish(job, place / kind)
    return place / "autoregressive" / "out", place / "diffusion" / "out"


def evaluate_in_a_new_process(twin, denoiser):
    ran = subprocess.run(
        [sys.executable, str(Path(evaluations.__file__)), str(twin), str(denoiser)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)
