"""Where does a bad step stop being finite, when it is run again and everything is looked at?

A bad step changes nothing, so it can be run again: weights and moments first, then each module's
input and output as they come, the loss, and the gradients on the way back. The first tensor that is
not finite, in the order of time, is the place. Each window of the first bad micro-batch is also run
alone, to find out whether one of them does it. All of that happens on gradients of its own, and
leaves the learner as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from canvaslm.model.backbone import Backbone
from canvaslm.objective.targets import LossSum
from canvaslm.training.guard import fault
from canvaslm.training.optimizer import average
from canvaslm.training.trace import Trace
from canvaslm.training.trace_hooks import watching
from canvaslm.training.trace_ring import Ring
from canvaslm.training.trace_values import (
    STANDING,
    Stream,
    TracedTensor,
    Values,
    bad_rows,
    summarise,
)
from canvaslm.training.trace_words import (
    find_first,
    say_alone,
    say_first_place,
)

_LossOf = Callable[[np.ndarray, np.ndarray], LossSum]
_Micro = tuple[np.ndarray, np.ndarray]  # windows (B, T) and their numbers (B,)


def explain_step(
    *,
    step: int,
    windows: np.ndarray,
    numbers: np.ndarray,
    micro_batch_windows: int,
    model: Backbone,
    optimizer: torch.optim.Optimizer,
    loss_of: _LossOf,
    ring: Ring,
) -> Trace:
    """Run a step again, look at all of it, and say where it stopped being finite.

    Args:
        step: its number.
        windows: (W, T) its windows.
        numbers: (W,) their numbers in the run.
        micro_batch_windows: how the step was cut.
        model: with the weights that the step began with.
        optimizer: with the moments that it began with.
        loss_of: nats of some windows with their numbers, as in training.
        ring: what the good steps before it left.

    Returns:
        What was found. Weights, moments, gradients and modes are as before.
    """
    cuts = range(0, len(windows), micro_batch_windows)
    parts = [
        (windows[i : i + micro_batch_windows], numbers[i : i + micro_batch_windows]) for i in cuts
    ]
    with _own_gradients(model):
        replay = _Replay(model, step)
        replay.see_state(optimizer)
        for number, part in enumerate(parts):
            replay.run(number, part, loss_of)
        cause = replay.find_fault()
        first = replay.find_micro_batch()
        tried = parts[first] if first is not None else (windows[:0], numbers[:0])
        alone = _run_alone(model, tried, loss_of)
    return Trace(
        step=step,
        first_window=int(numbers[0]),
        last_window=int(numbers[-1]),
        cause=cause,
        first_place=say_first_place(replay.tensors, cause=cause),
        micro_batch=first,
        alone=alone,
        alone_in_words=say_alone(alone, micro_batch=first, n_windows=len(tried[1])),
        tensors=(*ring.traced(), *replay.tensors),
        not_measured=ring.why_empty,
    )


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A tensor of the micro-batch that runs now."""

    stream: Stream
    module: str
    tensor: str
    values: Values
    bad_rows: np.ndarray | None


class _Replay:
    """The step while it runs again."""

    def __init__(self, model: Backbone, step: int) -> None:
        self.tensors: list[TracedTensor] = []
        self._model = model
        self._step = step
        self._seen: list[_Seen] = []
        self._nats = 0.0
        self._n_targets = 0
        self._overflowed: int | None = None  # the micro-batch that made the norm overflow

    def see_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at weights and moments, as they are before the step."""
        for name, parameter in self._model.named_parameters():
            self._see("parameters", name, "weight", parameter)
            state = optimizer.state[parameter]
            for moment in STANDING:
                if moment in state:
                    self._see("parameters", name, moment, state[moment])
        self._end_micro_batch(0, np.array([], dtype=np.int64), None)

    def run(self, number: int, part: _Micro, loss_of: _LossOf) -> None:
        """Look at one micro-batch, forward and back; one without targets counts as absent."""
        windows, numbers = part
        with watching(self._model, self._see) as watched:
            loss = loss_of(windows, numbers)
        if not loss.n_targets:
            self._seen = []
            return
        self._see("loss", "loss", "output", loss.nats)
        with self._watching_parameters():
            loss.nats.backward()
        self._nats += loss.nats.item()
        self._n_targets += loss.n_targets
        self._end_micro_batch(number, numbers, watched.guess_rows)
        if self._overflowed is None and not bool(self._norm().isfinite()):
            self._overflowed = number

    def find_fault(self) -> str:
        """The fault of the whole step, as the guard names it; empty for none."""
        norm = self._norm().item()
        return fault(nats=self._nats, n_targets=self._n_targets, gradient_norm=norm) or ""

    def find_micro_batch(self) -> int | None:
        """The first micro-batch that went wrong."""
        first = find_first(self.tensors)
        return self._overflowed if first is None else first.micro_batch

    def _see(self, stream: Stream, module: str, tensor: str, values: Tensor) -> None:
        summary = summarise(values)
        rows = bad_rows(values) if summary.n_nonfinite else None
        seen = _Seen(stream=stream, module=module, tensor=tensor, values=summary, bad_rows=rows)
        self._seen.append(seen)

    @contextmanager
    def _watching_parameters(self) -> Iterator[None]:
        """Look at each parameter's gradient at the moment when it is complete."""

        def look(name: str) -> Callable[[Tensor], None]:
            return lambda parameter: self._see("parameters", name, "gradient", _gradient(parameter))

        handles = [
            parameter.register_post_accumulate_grad_hook(look(name))
            for name, parameter in self._model.named_parameters()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _end_micro_batch(self, number: int, numbers: np.ndarray, guess_rows: Tensor | None) -> None:
        """File what was seen, now that it is known which windows had a first pass."""
        for seen in self._seen:
            own = numbers
            if seen.stream == "first" and guess_rows is not None:
                own = numbers[guess_rows.cpu().numpy()]
            if seen.bad_rows is not None and len(seen.bad_rows) == len(own):
                own = own[seen.bad_rows]
            self.tensors.append(
                TracedTensor(
                    step=self._step,
                    micro_batch=number,
                    stream=seen.stream,
                    order=len(self.tensors),
                    module=seen.module,
                    tensor=seen.tensor,
                    values=seen.values,
                    sampled=False,
                    windows=tuple(own.tolist()) if seen.values.n_nonfinite else (),
                )
            )
        self._seen = []

    def _norm(self) -> Tensor:
        """Norm of the mean gradient over the targets so far, which stays summed."""
        n_targets = max(self._n_targets, 1)
        gradients = [_gradient(parameter) / n_targets for parameter in self._model.parameters()]
        return nn.utils.get_total_norm(gradients)


def _run_alone(model: Backbone, part: _Micro, loss_of: _LossOf) -> tuple[tuple[int, str], ...]:
    """Run each window as a step of its own; return those that go wrong, and how."""
    found = []
    for window, number in zip(*part, strict=True):
        model.zero_grad(set_to_none=False)
        loss = loss_of(window[None], np.array([number]))
        if not loss.n_targets:
            continue
        loss.nats.backward()
        norm = average(model, loss.n_targets).item()
        cause = fault(nats=loss.nats.item(), n_targets=loss.n_targets, gradient_norm=norm)
        if cause:
            found.append((int(number), cause))
    return tuple(found)


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Lay fresh gradients over the parameters, then put back those that stood there."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
