"""Is the average of the weights what it should be, and does it change nothing else?"""

import copy

import numpy as np
import pytest
import torch

from canvaslm.objective.denoising import Denoising
from canvaslm.training.learner import Learner
from canvaslm.training.weight_average import begin_average, follow_weights
from oracles import averaged_by_hand

KINDS = ("adamw", "muon")


def learner_of(recipe):
    objective = Denoising(layout=recipe.layout, diffusion=recipe.diffusion, seed=3, vocab_chunk=16)
    return Learner(recipe, objective, torch.device("cpu"))


def averages_of(learner):
    named = learner.model.named_parameters()
    return {name: learner.optimizer.state[p]["ema"].clone() for name, p in named}


def weights_of(learner):
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("decay", [0.2, 0.99])  # reached after three updates, and never
def test_the_average_follows_its_definition(tiny_recipe, windows, optimizer, decay):
    learner, seen = learner_of(tiny_recipe(optimizer=optimizer, ema_decay=decay)), []
    for step in range(6):
        learner.take_step(step, windows[:4], np.arange(4 * step, 4 * step + 4))
        seen.append(weights_of(learner))
        for name, average in averages_of(learner).items():
            due = averaged_by_hand([weights[name] for weights in seen], decay)
            torch.testing.assert_close(average.double(), due, rtol=1e-5, atol=1e-7)


def test_after_the_first_update_nothing_of_the_draw_is_left(tiny_recipe, windows):
    learner = learner_of(tiny_recipe(ema_decay=0.9))
    learner.take_step(0, windows[:4], np.arange(4))
    weights = weights_of(learner)
    assert all(torch.equal(x, weights[name]) for name, x in averages_of(learner).items())


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_of_constant_weights_is_the_weights(tiny_recipe, decay):
    learner = learner_of(tiny_recipe(ema_decay=decay))
    weights = weights_of(learner)
    for n_updates in range(1, 40):
        for state in learner.optimizer.state.values():
            state["step"].fill_(n_updates)
        follow_weights(learner.optimizer, decay)
        for name, average in averages_of(learner).items():
            assert torch.equal(average, weights[name]), (n_updates, name)


@pytest.mark.parametrize("optimizer", KINDS)
def test_a_bad_step_leaves_the_average(tiny_recipe, windows, optimizer):
    learner = learner_of(tiny_recipe(optimizer=optimizer, ema_decay=0.9))
    for step in range(3):
        learner.take_step(step, windows[:4], np.arange(4 * step, 4 * step + 4))
    before = copy.deepcopy(learner.optimizer.state_dict()["state"])
    gate = learner.model.get_parameter("blocks.0.feed_forward.gate.weight")
    handle = gate.register_hook(lambda gradient: gradient * float("nan"))
    assert learner.take_step(3, windows[4:8], np.arange(12, 16)).cause
    handle.remove()
    after = learner.optimizer.state_dict()["state"]
    for number, state in before.items():
        for kind, value in state.items():
            assert torch.equal(value, after[number][kind]), (number, kind)
    assert not learner.take_step(4, windows[4:8], np.arange(16, 20)).cause
    moved = learner.optimizer.state_dict()["state"]
    assert all(not torch.equal(state["ema"], moved[n]["ema"]) for n, state in before.items())


@pytest.mark.parametrize("optimizer", KINDS)
def test_an_average_changes_no_bit_of_training(tiny_recipe, windows, optimizer):
    plain, averaged = (
        learner_of(tiny_recipe(optimizer=optimizer, ema_decay=decay)) for decay in (0.0, 0.9)
    )
    for step in range(4):
        for learner in (plain, averaged):
            learner.take_step(step, windows[:4], np.arange(4 * step, 4 * step + 4))
    theirs = weights_of(averaged)
    assert all(torch.equal(x, theirs[name]) for name, x in weights_of(plain).items())
    assert all("ema" not in state for state in plain.optimizer.state.values())


def test_an_average_can_begin_anew_with_other_weights(tiny_recipe, windows):
    learner = learner_of(tiny_recipe(ema_decay=0.9))
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(1.0)
    begin_average(learner.optimizer)
    weights = weights_of(learner)
    assert all(torch.equal(x, weights[name]) for name, x in averages_of(learner).items())
    without = learner_of(tiny_recipe())
    begin_average(without.optimizer)
    assert all("ema" not in state for state in without.optimizer.state.values())
