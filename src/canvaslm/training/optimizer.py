"""How does a gradient become an update?

AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay on weight matrices only, for all
parameters or, under Muon, for those that are no matrix of a block. The learning rate is no state of
its own: the loop sets it on each step from the step's number.
"""

from typing import Any

import torch
from torch import Tensor, nn

from canvaslm.model.backbone import Backbone
from canvaslm.training.muon import Muon, orthogonalisation_flops
from canvaslm.training.plan import PretrainParams, Recipe
from canvaslm.training.weight_average import AVERAGE

_WITHOUT_DECAY = "self_conditioning"  # starts at zero and may stay small without being pulled there


def make_optimizer(model: nn.Module, params: PretrainParams) -> torch.optim.Optimizer:
    """Build the optimiser of every parameter, each exactly once, with its state already in place.

    Weight matrices decay, the embedding table among them: it is the head's matrix as well. Norms,
    biases and the zero-initialised self-conditioning projection do not. State is made here and not
    on the first step, so that saving and restoring never meet a half-made optimiser.
    """
    named = list(model.named_parameters())  # a tied table is listed once
    muon = {name for name, parameter in named if moves_by_muon(name, parameter, params)}
    rest = [(name, parameter) for name, parameter in named if name not in muon]
    decayed = [parameter for name, parameter in rest if _decays(name, parameter)]
    others = [parameter for name, parameter in rest if not _decays(name, parameter)]
    groups = [
        {"params": decayed, "weight_decay": params.weight_decay, "rate_share": 1.0},
        {"params": others, "weight_decay": 0.0, "rate_share": 1.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.adam_eps,
        fused=True,  # one kind of step everywhere: kinds differ in their last bits
    )
    optimizer = adamw if not muon else _Both(adamw, _make_muon(named, muon, params))
    for name, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
        state = _muon_state(parameter) if name in muon else _adamw_state(parameter)
        average = {AVERAGE: parameter.detach().clone()} if params.ema_decay else {}
        optimizer.state[parameter] = state | average
    return optimizer


def moves_by_muon(name: str, parameter: Tensor, params: PretrainParams) -> bool:
    """Tell whether Muon moves a parameter: under it, the matrices inside the blocks.

    Those map hidden states to hidden states. The token table, which is the head too, and what reads
    times and guesses, are inputs and outputs, where single directions have a meaning of their own.
    """
    return params.optimizer == "muon" and name.startswith("blocks.") and parameter.ndim == 2


def average(model: nn.Module, n_targets: int) -> Tensor:
    """Turn summed gradients into those of the mean over ``n_targets``, and return their norm.

    Dividing once, by the targets of the whole optimiser step, makes the step independent of how
    its windows were cut into micro-batches.
    """
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in found:
        gradient.div_(max(n_targets, 1))
    return nn.utils.get_total_norm(found)


def update(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, norm: Tensor, max_norm: float
) -> None:
    """Scale gradients of the given finite norm down to ``max_norm`` and apply them.

    Args:
        optimizer: made by :func:`make_optimizer`.
        learning_rate: that of AdamW's parameters; Muon's is the same share of its own highest one.
        norm: of all gradients.
        max_norm: what is left of a larger one.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate_share"]
    optimizer.step()


def moment_values(recipe: Recipe) -> int:
    """How many float32 values the state of the optimiser holds, counters apart."""
    model, params = _without_bytes(recipe), recipe.pretrain
    values = 0
    for name, parameter in model.named_parameters():
        moments = 1 if moves_by_muon(name, parameter, params) else 2
        values += (moments + bool(params.ema_decay)) * parameter.numel()
    return values


def update_flops(recipe: Recipe) -> float:
    """Floating-point operations of Muon's iterations in one optimiser step.

    AdamW takes a few for each parameter, which are not counted.
    """
    return sum(
        orthogonalisation_flops(parameter.shape)
        for name, parameter in _without_bytes(recipe).named_parameters()
        if moves_by_muon(name, parameter, recipe.pretrain)
    )


class _Both(torch.optim.Optimizer):
    """Two optimisers, each of parameters of its own, with one state and one list of groups."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let each part move its parameters."""
        for part in self._parts:
            part.step(closure)


def _without_bytes(recipe: Recipe) -> Backbone:
    """The model in names and shapes alone."""
    with torch.device("meta"):
        return Backbone(recipe.model, recipe.layout)


def _make_muon(
    named: list[tuple[str, nn.Parameter]], muon: set[str], params: PretrainParams
) -> Muon:
    """Muon over the named matrices, in the arithmetic of the run."""
    group: dict[str, Any] = {
        "params": [parameter for name, parameter in named if name in muon],
        "rate_share": params.muon_learning_rate / params.learning_rate,
    }
    return Muon(
        [group],
        lr=params.muon_learning_rate,
        momentum=params.muon_momentum,
        weight_decay=params.weight_decay,
        dtype=getattr(torch, params.precision),
    )


def _adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _muon_state(parameter: Tensor) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)}


def _decays(name: str, parameter: Tensor) -> bool:
    """Tell whether weight decay pulls this parameter."""
    return parameter.ndim >= 2 and _WITHOUT_DECAY not in name
