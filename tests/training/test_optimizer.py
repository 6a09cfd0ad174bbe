"""Which parameters decay, and is a mean taken once and a norm clipped once?"""

import pytest
import torch
from torch import nn

from canvaslm.model.backbone import Backbone
from canvaslm.training.optimizer import (
    average,
    make_optimizer,
    moment_values,
    update,
    update_flops,
)
from oracles import muon_by_hand


@pytest.fixture
def pair(tiny_recipe):
    recipe = tiny_recipe()
    model = Backbone(recipe.model, recipe.layout)
    return model, make_optimizer(model, recipe.pretrain)


def grad_of(parameter):
    assert parameter.grad is not None
    return parameter.grad


def names_in(group, model):
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {of[id(parameter)] for parameter in group["params"]}


def test_matrices_decay_and_nothing_else(pair):
    model, optimizer = pair
    decayed, others = (names_in(group, model) for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert "embedding.weight" in decayed
    assert "blocks.0.attention.query.weight" in decayed
    assert "blocks.0.attention.query.bias" in others
    assert "final_norm.weight" in others
    assert {name for name in others if "self_conditioning" in name} == {
        "self_conditioning.projection.weight",
        "self_conditioning.projection.bias",
    }


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest(tiny_recipe):
    """Table, times, the guess' projection, norms and biases are AdamW's."""
    recipe = tiny_recipe(optimizer="muon", model={"qk_norm": True})
    model = Backbone(recipe.model, recipe.layout)
    optimizer = make_optimizer(model, recipe.pretrain)
    decayed, others, matrices = (names_in(group, model) for group in optimizer.param_groups)
    of_a_block = {
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *(f"feed_forward.{name}.weight" for name in ("gate", "up", "down")),
    }
    assert matrices == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in of_a_block}
    times = {"time_embedding.inner.weight", "time_embedding.outer.weight"}
    assert decayed == {"embedding.weight", *times}
    assert "blocks.0.attention.query_norm.weight" in others
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    for name, parameter in model.named_parameters():
        kinds = {"momentum_buffer"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[parameter]) == kinds


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_and_the_tied_table_are_in_exactly_one_group(tiny_recipe, kind):
    """BR-39: the head shares the table's storage and is no parameter of its own."""
    recipe = tiny_recipe(optimizer=kind)
    model = Backbone(recipe.model, recipe.layout)
    optimizer = make_optimizer(model, recipe.pretrain)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    pointers = [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]
    assert pointers.count(model.head_weight.data_ptr()) == 1


def test_state_stands_before_the_first_step_and_an_unused_parameter_has_a_gradient(pair):
    model, optimizer = pair
    for parameter in model.parameters():
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert parameter.grad is not None


def test_first_update_equals_adamw_by_hand(tiny_recipe):
    """AdamW after one step: p·(1 - lr·wd) - lr·g/(|g| + eps), biases corrected to that."""
    model = nn.Linear(2, 1)
    optimizer = make_optimizer(model, tiny_recipe().pretrain)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.bias.zero_()
    grad_of(model.weight).copy_(torch.tensor([[0.3, -0.4]]))
    update(optimizer, learning_rate=0.1, norm=torch.tensor(0.5), max_norm=1.0)
    expected = torch.tensor([[2.0 * 0.99 - 0.1, -1.0 * 0.99 + 0.1]])
    torch.testing.assert_close(model.weight.detach(), expected)
    assert model.bias.item() == 0.0


def test_updates_of_muon_are_those_of_its_definition(tiny_recipe):
    """Its rate is the same share of its own highest one as AdamW's is of the other."""
    recipe = tiny_recipe(optimizer="muon", learning_rate=0.01, muon_learning_rate=0.03)
    model = Backbone(recipe.model, recipe.layout)
    optimizer = make_optimizer(model, recipe.pretrain)
    generator, name = torch.Generator().manual_seed(1), "blocks.0.feed_forward.down.weight"
    moved, bias = model.get_parameter(name), model.get_parameter("blocks.0.feed_forward.down.bias")
    before, bias_before, gradients = moved.detach().clone(), bias.detach().clone(), []
    for _ in range(3):
        for parameter in model.parameters():
            grad_of(parameter).normal_(generator=generator)
        gradients.append(grad_of(moved).clone())
        update(optimizer, learning_rate=0.005, norm=torch.tensor(0.5), max_norm=1.0)
    due = muon_by_hand(before, gradients, rate=0.015, momentum=0.9, decay=0.1)
    torch.testing.assert_close(moved.detach().double(), due, rtol=1e-4, atol=1e-6)
    assert not torch.equal(bias, bias_before)
    assert optimizer.state[bias]["step"] == 3


@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_values_of_the_state_are_counted(tiny_recipe, kind, decay):
    recipe = tiny_recipe(optimizer=kind, ema_decay=decay)
    model = Backbone(recipe.model, recipe.layout)
    state = make_optimizer(model, recipe.pretrain).state.values()
    found = sum(x.numel() for each in state for name, x in each.items() if name != "step")
    assert moment_values(recipe) == found


def test_operations_of_an_update_are_those_of_muon(tiny_recipe):
    """Of each layer: query and output of 16 by 16; key and value of 8 by 16; three of 24 by 16."""
    assert update_flops(tiny_recipe()) == 0.0
    square, small, wide = (5 * (4 * a * a * b + 2 * a**3) for a, b in ((16, 16), (8, 16), (16, 24)))
    due = 2 * (2 * square + 2 * small + 3 * wide)
    assert update_flops(tiny_recipe(optimizer="muon")) == due


def test_average_divides_by_all_targets_and_gives_the_norm_of_the_mean(tiny_recipe):
    model = nn.Linear(2, 1, bias=False)
    make_optimizer(model, tiny_recipe().pretrain)
    grad_of(model.weight).copy_(torch.tensor([[30.0, 40.0]]))
    assert average(model, 10).item() == pytest.approx(5.0)
    assert grad_of(model.weight).tolist() == [[3.0, 4.0]]


def test_clipping_scales_only_a_larger_norm(tiny_recipe):
    for norm, expected in [(5.0, [[0.6, 0.8]]), (0.5, [[3.0, 4.0]])]:
        model = nn.Linear(2, 1, bias=False)
        optimizer = make_optimizer(model, tiny_recipe().pretrain)
        grad_of(model.weight).copy_(torch.tensor([[3.0, 4.0]]))
        update(optimizer, learning_rate=0.1, norm=torch.tensor(norm), max_norm=1.0)
        torch.testing.assert_close(grad_of(model.weight), torch.tensor(expected), rtol=1e-5, atol=0)
