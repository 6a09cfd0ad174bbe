"""How does a gradient become an update?

AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay on weight matrices only. The
learning rate is no state of its own: the loop sets it on each step from the step's number.
"""

import torch
from torch import Tensor, nn

from canvaslm.training.plan import PretrainParams

_WITHOUT_DECAY = "self_conditioning"  # starts at zero and may stay small without being pulled there


def make_optimizer(model: nn.Module, params: PretrainParams) -> torch.optim.AdamW:
    """Build AdamW over every parameter, each exactly once, with its state already in place.

    Weight matrices decay, the embedding table among them: it is the head's matrix as well. Norms,
    biases and the zero-initialised self-conditioning projection do not. State is made here and not
    on the first step, so that saving and restoring never meet a half-made optimiser.
    """
    named = list(model.named_parameters())  # a tied table is listed once
    decayed = [parameter for name, parameter in named if _decays(name, parameter)]
    others = [parameter for name, parameter in named if not _decays(name, parameter)]
    groups = [
        {"params": decayed, "weight_decay": params.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.adam_eps,
        fused=True,  # one kind of step everywhere: kinds differ in their last bits
    )
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


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
    """Scale gradients of the given finite norm down to ``max_norm`` and apply them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def _decays(name: str, parameter: Tensor) -> bool:
    """Tell whether weight decay pulls this parameter."""
    return parameter.ndim >= 2 and _WITHOUT_DECAY not in name
