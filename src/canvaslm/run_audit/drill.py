"""What does an optimiser step do to each parameter, seen from outside?

A drill is a few steps of the run's own learner, on few of its windows, in float32 on the CPU, with
everything that a step touches kept from before and after it. What the steps should have done is
worked out elsewhere from these.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canvaslm.checkpoint import restore
from canvaslm.run_audit.own_loss import has_guess
from canvaslm.run_audit.reading import windows_of
from canvaslm.run_audit.subject import Subject
from canvaslm.training.learner import Learner, Objective
from canvaslm.training.run_state import StepRecord

_MOST_TOKENS = 1024  # of a drilled step, so that a large shape stays within minutes on a CPU
_N_STEPS = 3
_MOST_SEARCHED = 10_000  # window numbers among which one with a guess is looked for
_NO_CLIPPING = 1e30  # a norm that no finite gradient reaches


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The optimiser's state of one parameter.

    Attributes:
        mean: of gradients.
        square: the mean of their squares; None under Muon, which keeps none.
        n_updates: AdamW's counter; NaN under Muon, which does not count.
        average: of the weights; None where none is kept.
    """

    mean: Tensor
    square: Tensor | None
    n_updates: float
    average: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StepSeen:
    """One step from outside; everything by parameter name.

    Attributes:
        record: what the learner says of it.
        before: weights.
        after: weights.
        gradients: as they lie on the parameters after the step; None where there is none.
        moments_before: only of parameters that the optimiser knows.
        moments_after: likewise.
        n_listed: how many times the optimiser lists the parameter.
        trainable: whether the parameter asks for a gradient.
    """

    record: StepRecord
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    moments_before: dict[str, Moments]
    moments_after: dict[str, Moments]
    n_listed: dict[str, int]
    trainable: dict[str, bool]


def drill(
    subject: Subject,
    *,
    steps: Sequence[int],
    passes: int,
    max_norm: float = _NO_CLIPPING,
    from_checkpoint: bool = False,
    objective: Objective | None = None,
) -> Iterator[StepSeen]:
    """Take steps one after the other, all on the same windows.

    Args:
        subject: the run.
        steps: their numbers in the run, which decide the rate.
        passes: into how many micro-batches a step is cut, at most one for each window.
        max_norm: gradients are clipped to it.
        from_checkpoint: start from the finished weights and moments, not from fresh ones.
        objective: in place of the run's own.
    """
    numbers = drill_numbers(subject)
    windows = windows_of(subject, numbers)
    knobs: dict[str, Any] = {
        "windows_per_step": len(numbers),
        "micro_batch_windows": -(-len(numbers) // passes),
        "max_gradient_norm": max_norm,
        "device": "cpu",
        "precision": "float32",
        "compile": False,
        "gradient_checkpointing": False,
        "trace_steps": 0,  # samples for a fault that nobody will ask for here
    }
    pretrain = subject.recipe.pretrain.model_copy(update=knobs)
    recipe = dataclasses.replace(subject.recipe, pretrain=pretrain)
    learner = Learner(recipe, objective or subject.job.objective, torch.device("cpu"))
    if from_checkpoint:
        restore(subject.checkpoint, model=learner.model, optimizer=learner.optimizer)
    for step in steps:
        yield _see(learner, step, windows, numbers)


def drill_steps(subject: Subject) -> list[int]:
    """Numbers of three steps where the rate is near its highest: the last of the rise, and on."""
    params = subject.recipe.pretrain
    end = min(params.warmup_steps + 1, params.steps)
    return list(range(max(end - _N_STEPS, 0), end))


def highest_step(subject: Subject) -> int:
    """Number of the step with the highest rate."""
    return max(subject.recipe.pretrain.warmup_steps - 1, 0)


def drill_numbers(subject: Subject) -> np.ndarray:
    """Run numbers of the drilled windows: the first few of the phase that the run ends in.

    One of them has a guess where there is one.
    """
    layout, W = subject.recipe.layout, subject.recipe.pretrain.windows_per_step
    n = min(W, max(_MOST_TOKENS // layout.window_tokens, 2))
    begin = subject.recipe.first_phase_windows
    numbers = list(range(begin, begin + n))
    if not any(has_guess(subject, number) for number in numbers):
        last = min(subject.state.progress.windows_consumed, _MOST_SEARCHED)
        found = (number for number in range(begin + n, last) if has_guess(subject, number))
        numbers[-1] = next(found, numbers[-1])
    return np.array(numbers)


def _see(learner: Learner, step: int, windows: np.ndarray, numbers: np.ndarray) -> StepSeen:
    named = dict(learner.model.named_parameters())
    before, moments_before = _weights(named), _moments(learner, named)
    record = learner.take_step(step, windows, numbers)
    listed = [id(p) for group in learner.optimizer.param_groups for p in group["params"]]
    return StepSeen(
        record=record,
        before=before,
        after=_weights(named),
        gradients={
            name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()
        },
        moments_before=moments_before,
        moments_after=_moments(learner, named),
        n_listed={name: listed.count(id(p)) for name, p in named.items()},
        trainable={name: p.requires_grad for name, p in named.items()},
    )


def _weights(named: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


def _moments(learner: Learner, named: dict[str, torch.nn.Parameter]) -> dict[str, Moments]:
    """Copies of the optimiser's state, where it is whole."""
    found = {}
    for name, parameter in named.items():
        state = learner.optimizer.state.get(parameter, {})
        average = state["ema"].clone() if "ema" in state else None
        if {"exp_avg", "exp_avg_sq", "step"} <= set(state):
            found[name] = Moments(
                mean=state["exp_avg"].clone(),
                square=state["exp_avg_sq"].clone(),
                n_updates=float(state["step"]),
                average=average,
            )
        elif "momentum_buffer" in state:
            mean = state["momentum_buffer"].clone()
            found[name] = Moments(mean=mean, square=None, n_updates=math.nan, average=average)
    return found
