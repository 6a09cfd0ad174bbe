"""What did the last good steps look like?

A training step leaves copies of a few positions of each tensor of its first micro-batch. Nothing
is worked out of them before somebody asks, and what is oldest gives way.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.training.plan import PretrainParams
from canvaslm.training.trace_hooks import watching
from canvaslm.training.trace_values import Stream, TracedTensor, sample, summarise

LEAST_VALUES = 2**20  # values: more than a step leaves at the laptop's shape
_LATEST = 6  # tensors: the normed input of a feed-forward is read again after five others


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
        self._size = params.trace_steps
        self._kept: deque[_Room] = deque()
        self._free: list[_Room] = []

    @property
    def why_empty(self) -> str:
        """Why there are no samples; empty when there are some."""
        return "" if self._kept else self.why_off or "no step before it ran in this process"

    @contextmanager
    def micro_batch(self, model: Backbone, number: int) -> Iterator[None]:
        """Take samples of the forward in the block, and of its backward after it.

        Only the first micro-batch of a step leaves any.
        """
        if self.why_off or number:
            yield
            return
        if not self._free:  # the first step: all of the memory, before that of any activation
            device = model.head_weight.device
            self._free = [_Room(device) for _ in range(self._size + 1)]
        self._free[-1].clear()
        with watching(model, self._free[-1].take):
            yield

    def end_step(self, step: int, *, good: bool) -> None:
        """Keep the samples of a good step, and drop those of a bad one."""
        if self.why_off or not good:
            return
        room = self._free.pop()
        room.step = step
        self._kept.append(room)
        if len(self._kept) > self._size:
            self._free.append(self._kept.popleft())

    def traced(self) -> list[TracedTensor]:
        """Statistics of all samples, in the order of steps and, within one, of time."""
        return [each for room in self._kept for each in room.traced()]


class _Room:
    """Memory for the samples of one step, taken once and used again.

    Small copies that outlive a step would lie scattered between the activations of the next one,
    and the heap would grow to several times its size around them. And each call of torch between
    two large products finds cold caches, so views are kept from step to step, and a tensor that
    one module made and others read is copied once.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = -1
        self._blocks = [torch.empty(LEAST_VALUES, device=device)]
        self._views: list[Tensor] = []
        self._ends: list[tuple[int, int]] = []  # block and place in it, after each view
        self.clear()

    def clear(self) -> None:
        """Forget what was taken."""
        self._samples: list[tuple[Stream, str, str, int]] = []  # with the number of the view
        self._n_taken = 0
        self._latest: deque[tuple[weakref.ref[Tensor], int]] = deque(maxlen=_LATEST)

    def take(self, stream: Stream, module: str, tensor: str, values: Tensor) -> None:
        """Copy a sample; on a GPU the copy is only queued."""
        for latest, number in self._latest:
            if latest() is values:
                self._samples.append((stream, module, tensor, number))
                return
        self._samples.append((stream, module, tensor, self._n_taken))
        self._latest.appendleft((weakref.ref(values), self._n_taken))
        chosen = sample(values)
        self._view(chosen.shape).copy_(chosen)
        self._n_taken += 1

    def traced(self) -> list[TracedTensor]:
        """Statistics of the samples, in the order of time."""
        values = [summarise(view) for view in self._views[: self._n_taken]]
        return [
            TracedTensor(
                step=self.step,
                micro_batch=0,
                stream=stream,
                order=order,
                module=module,
                tensor=tensor,
                values=values[number],
                sampled=True,
                windows=(),
            )
            for order, (stream, module, tensor, number) in enumerate(self._samples)
        ]

    def _view(self, shape: torch.Size) -> Tensor:
        """Memory for the next sample: that of the step before where it has the same shape."""
        number = self._n_taken
        if number < len(self._views) and self._views[number].shape == shape:
            return self._views[number]
        del self._views[number:], self._ends[number:]
        block, start = self._ends[-1] if self._ends else (0, 0)
        n_values = shape.numel()
        while start + n_values > len(self._blocks[block]):
            block, start = block + 1, 0
            if block == len(self._blocks):
                size = max(LEAST_VALUES, n_values)
                self._blocks.append(torch.empty(size, device=self._blocks[0].device))
        end = start + n_values
        self._views.append(self._blocks[block][start:end].view(shape))
        self._ends.append((block, end))
        return self._views[number]
