"""What did the last good steps look like?

A training step leaves copies of a few positions of each tensor of its first micro-batch. Nothing
is worked out of them before somebody asks, and what is oldest gives way.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.training.plan import PretrainParams
from canvaslm.training.trace_hooks import watching
from canvaslm.training.trace_values import Stream, TracedTensor, sample, summarise

_Sample = tuple[Stream, str, str, Tensor]  # stream, module, tensor's name, values


class Ring:
    """Samples of the last ``trace_steps`` good steps of one learner.

    Attributes:
        why_off: why nothing is kept; empty when something is.
    """

    def __init__(self, params: PretrainParams) -> None:
        self.why_off = ""
        if not params.trace_steps:
            self.why_off = "pretrain.trace_steps is 0"
        elif params.compile:  # a hook would break the graph, or be compiled out of it
            self.why_off = "compiled passes have no modules to watch (pretrain.compile)"
        self._kept: deque[tuple[int, list[_Sample]]] = deque(maxlen=params.trace_steps)
        self._taken: list[_Sample] = []

    @contextmanager
    def micro_batch(self, model: Backbone, number: int) -> Iterator[None]:
        """Take samples of the forward in the block, and of its backward after it.

        Only the first micro-batch of a step leaves any.
        """
        if self.why_off or number:
            yield
            return
        self._taken = []
        with watching(model, self._take):
            yield

    def end_step(self, step: int, *, good: bool) -> None:
        """Keep the samples of a good step, and drop those of a bad one."""
        if good and not self.why_off:
            self._kept.append((step, self._taken))
        self._taken = []

    @property
    def why_empty(self) -> str:
        """Why there are no samples; empty when there are some."""
        return "" if self._kept else self.why_off or "no step before it ran in this process"

    def traced(self) -> list[TracedTensor]:
        """Statistics of all samples, in the order of steps and, within one, of time."""
        return [
            TracedTensor(
                step=step,
                micro_batch=0,
                stream=stream,
                order=order,
                module=module,
                tensor=tensor,
                values=summarise(values),
                sampled=True,
                windows=(),
            )
            for step, samples in self._kept
            for order, (stream, module, tensor, values) in enumerate(samples)
        ]

    def _take(self, stream: Stream, module: str, tensor: str, values: Tensor) -> None:
        self._taken.append((stream, module, tensor, sample(values)))
