"""What does one optimiser step do to a model?

Pass its windows forward and backward in micro-batches, add up nats and targets, divide once, look
whether the result may be used, and only then change the weights.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from canvaslm.device import autocast
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.shape import ModelParams
from canvaslm.objective.targets import LossSum
from canvaslm.training.guard import fault
from canvaslm.training.optimizer import average, make_optimizer, update
from canvaslm.training.plan import Recipe, learning_rate
from canvaslm.training.run_state import StepRecord
from canvaslm.training.trace import Trace
from canvaslm.training.trace_hooks import PASSES, instead
from canvaslm.training.trace_replay import explain_step
from canvaslm.training.trace_ring import Ring
from canvaslm.training.weight_average import follow_weights


class Objective(Protocol):
    """What a training step needs to know of an objective."""

    def loss(self, model: Backbone, windows: Tensor, numbers: np.ndarray) -> LossSum:
        """Nats summed over the targets of windows (B, T) with the given run numbers (B,)."""
        ...

    def flops_of_first(self, params: ModelParams, n_windows: int) -> float:
        """Forward and backward operations of the first windows of a run."""
        ...


class Learner:
    """A model, its optimiser and its objective on one device, at the start of a run.

    Args:
        recipe: what is trained.
        objective: how windows become nats.
        device: where.

    Attributes:
        model: the plain model; compiling it changes neither its class nor its parameter names.
        optimizer: as the plan says, with state for every parameter.
    """

    def __init__(self, recipe: Recipe, objective: Objective, device: torch.device) -> None:
        self._params = recipe.pretrain
        self._objective = objective
        self._device = device
        self.model = Backbone(recipe.model, recipe.layout)
        initialise(self.model, recipe.pretrain.seed)
        self.model.to(device).train()
        self.model.checkpoint_blocks = recipe.pretrain.gradient_checkpointing
        self.optimizer = make_optimizer(self.model, recipe.pretrain)
        self._ring = Ring(recipe.pretrain)
        self._plain = {name: getattr(self.model, name) for name in PASSES}
        if recipe.pretrain.compile:
            _compile(self.model)

    def take_step(self, step: int, windows: np.ndarray, numbers: np.ndarray) -> StepRecord:
        """Train on the windows of one optimiser step; a bad step changes nothing.

        Args:
            step: its number, from 0.
            windows: (W, T) int64 ids.
            numbers: (W,) the windows' numbers in the run, which key all their draws.
        """
        rate = learning_rate(step, self._params)
        nats, n_targets = self._sum_gradients(windows, numbers)
        norm = average(self.model, n_targets)
        nats_value, norm_value = torch.stack([nats, norm.double()]).tolist()
        cause = fault(nats=nats_value, n_targets=n_targets, gradient_norm=norm_value)
        if cause is None:
            update(
                self.optimizer,
                learning_rate=rate,
                norm=norm,
                max_norm=self._params.max_gradient_norm,
            )
            follow_weights(self.optimizer, self._params.ema_decay)
        self._ring.end_step(step, good=cause is None)
        return StepRecord(
            step=step,
            nats=None if cause else nats_value,
            targets=n_targets,
            gradient_norm=None if cause else norm_value,
            learning_rate=rate,
            cause=cause or "",
        )

    def find_fault(self, windows: np.ndarray, numbers: np.ndarray) -> str | None:
        """Name what a step on these windows would be refused for; no weight or moment changes.

        Args:
            windows: (W, T) int64 ids.
            numbers: (W,) their numbers in the run.
        """
        nats, n_targets = self._sum_gradients(windows, numbers)
        norm = average(self.model, n_targets)
        return fault(nats=float(nats), n_targets=n_targets, gradient_norm=float(norm))

    def explain(self, step: int, windows: np.ndarray, numbers: np.ndarray) -> Trace:
        """Say where a bad step stopped being finite, before anything else is done.

        The step is run again with the plain passes, compiled or not, and leaves nothing changed.

        Args:
            step: the bad step's number; its arguments are those of :meth:`take_step`.
            windows: (W, T) int64 ids.
            numbers: (W,) the windows' numbers in the run.
        """
        with instead(self.model, self._plain):
            return explain_step(
                step=step,
                windows=windows,
                numbers=numbers,
                micro_batch_windows=self._params.micro_batch_windows,
                model=self.model,
                optimizer=self.optimizer,
                loss_of=self._loss,
                ring=self._ring,
            )

    def _sum_gradients(self, windows: np.ndarray, numbers: np.ndarray) -> tuple[Tensor, int]:
        """Leave the gradient of the summed nats on the parameters; return nats and targets."""
        self.optimizer.zero_grad(set_to_none=False)
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        n_targets = 0
        for start in range(0, len(windows), self._params.micro_batch_windows):
            part = slice(start, start + self._params.micro_batch_windows)
            with self._ring.micro_batch(self.model, start):
                loss = self._loss(windows[part], numbers[part])
            if loss.n_targets:
                loss.pull.backward()
                nats += loss.nats.detach()
                n_targets += loss.n_targets
        return nats, n_targets

    def _loss(self, windows: np.ndarray, numbers: np.ndarray) -> LossSum:
        """Nats of some windows (B, T), in the arithmetic of the run."""
        ids = torch.from_numpy(windows).to(self._device)
        with autocast(self._device, self._params.precision):
            return self._objective.loss(self.model, ids, numbers)


def _compile(model: Backbone) -> None:
    """Compile the passes in place of the methods, so that no wrapper gets into parameter names."""
    for name in PASSES:
        setattr(model, name, torch.compile(getattr(model, name)))
