"""What did the last good steps look like?

A training step leaves copies of a few positions of each tensor of its first micro-batch. Nothing
is worked out of them before somebody asks, and what is oldest gives way.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.training.plan import PretrainParams
from canvaslm.training.trace_hooks import watching
from canvaslm.training.trace_values import Stream, TracedTensor, sample, summarise

_BLOCK = 2**20  # values: more than a step leaves at the laptop's shape


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
    and the heap would grow to several times its size around them.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = -1
        self._blocks = [torch.empty(_BLOCK, device=device)]
        self.clear()

    def clear(self) -> None:
        """Forget what was taken."""
        self._samples: list[tuple[Stream, str, str, int, int, int]] = []
        self._block, self._used = 0, 0

    def take(self, stream: Stream, module: str, tensor: str, values: Tensor) -> None:
        """Copy a sample; on a GPU the copy is only queued."""
        chosen = sample(values)
        n_values = chosen.numel()
        while self._used + n_values > len(self._blocks[self._block]):
            self._block, self._used = self._block + 1, 0
            if self._block == len(self._blocks):
                self._blocks.append(torch.empty(max(_BLOCK, n_values), device=chosen.device))
        end = self._used + n_values
        self._blocks[self._block][self._used : end].view(chosen.shape).copy_(chosen)
        self._samples.append((stream, module, tensor, self._block, self._used, end))
        self._used = end

    def traced(self) -> list[TracedTensor]:
        """Statistics of the samples, in the order of time."""
        return [
            TracedTensor(
                step=self.step,
                micro_batch=0,
                stream=stream,
                order=order,
                module=module,
                tensor=tensor,
                values=summarise(self._blocks[block][start:end]),
                sampled=True,
                windows=(),
            )
            for order, (stream, module, tensor, block, start, end) in enumerate(self._samples)
        ]
