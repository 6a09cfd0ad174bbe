"""Which parameters decay, and is a mean taken once and a norm clipped once?"""

import pytest
import torch
from torch import nn

from canvaslm.model.backbone import Backbone
from canvaslm.training.optimizer import average, make_optimizer, update


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


def test_every_parameter_and_the_tied_table_are_in_exactly_one_group(pair):
    """BR-39: the head shares the table's storage and is no parameter of its own."""
    model, optimizer = pair
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
