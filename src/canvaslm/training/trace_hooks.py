"""Which tensors pass through a model, in which order?

Forward hooks on its modules see their inputs and outputs, a hook on each output sees its gradient.
What has no module of its own (a whole pass, the re-embedded guess) is seen by methods that stand in
for the model's while the hooks are on. Nothing of it stays on the model.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Encoded
from canvaslm.training.trace_values import Stream

PASSES = ("encode", "encode_context", "denoise", "denoise_one_stream")

_See = Callable[[Stream, str, str, Tensor], None]  # stream, module, tensor's name, tensor


class _Watched:
    """What runs under :func:`watching`.

    Attributes:
        guess_rows: (B,) bool, the rows that went through the first pass of self-conditioning;
            None where no row did, or all.
    """

    def __init__(self, see: _See) -> None:
        self._see = see
        self._stream: Stream = ""
        self.guess_rows: Tensor | None = None

    def after_module(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        """A forward hook: show what a module was given and what it made."""
        del module
        given = _first(inputs)
        if given is not None:
            self._see(self._stream, name, "input", given)
        made = _first(output if isinstance(output, tuple) else (output,))
        if made is not None:
            self._show_output(name, made)

    def passing(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Stand in for a pass of the model: name it while it runs, and show its hidden states."""

        @functools.wraps(run)
        def passed(*arguments: Any, **options: Any) -> Any:
            self._stream = self._name_pass(name, options)
            made = run(*arguments, **options)
            hidden = made.hidden if isinstance(made, Encoded) else made
            if isinstance(hidden, Tensor):
                self._show_output(f"({name})", hidden)
            return made

        return passed

    def embedding(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Stand in for the re-embedding of a guess, which belongs to the first pass."""

        @functools.wraps(run)
        def embedded(hidden: Tensor, **options: Any) -> Tensor:
            self._stream = "first"
            made = run(hidden, **options)
            self._show_output("(soft_embedding)", made)
            return made

        return embedded

    def _name_pass(self, name: str, options: dict[str, Any]) -> Stream:
        if name.startswith("encode"):
            return "clean"
        self.guess_rows = options.get("has_guess")
        if options.get("guess") is None and not torch.is_grad_enabled():
            return "first"
        return "noisy"

    def _show_output(self, name: str, made: Tensor) -> None:
        self._see(self._stream, name, "output", made)
        if made.requires_grad:
            made.register_hook(functools.partial(self._see, self._stream, name, "gradient"))


@contextmanager
def watching(model: Backbone, see: _See) -> Iterator[_Watched]:
    """Show each tensor of the forwards in the block, and later each gradient of them.

    With gradient checkpointing a block is computed again in the backward pass; that happens after
    the block, when the hooks are gone, so nothing is shown twice.

    Args:
        model: the network; its methods and hooks are as before when the block ends.
        see: is told (stream, module, tensor's name, tensor); must not change the tensor.
    """
    watched = _Watched(see)
    handles = [
        module.register_forward_hook(functools.partial(watched.after_module, name))
        for name, module in model.named_modules()
        if name and not isinstance(module, (nn.ModuleList, nn.Identity))
    ]
    stand_ins = {name: watched.passing(name, getattr(model, name)) for name in PASSES}
    stand_ins["soft_embedding"] = watched.embedding(model.soft_embedding)
    try:
        with instead(model, stand_ins):
            yield watched
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def instead(model: nn.Module, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let functions stand in for methods of one model, then put back what stood there."""
    own = {name: vars(model)[name] for name in methods if name in vars(model)}
    try:
        for name, method in methods.items():
            setattr(model, name, method)
        yield
    finally:
        for name in methods:
            vars(model).pop(name, None)
        vars(model).update(own)


def _first(tensors: tuple[Any, ...]) -> Tensor | None:
    """The first tensor of real numbers; token ids are none."""
    found = (item for item in tensors if isinstance(item, Tensor) and item.is_floating_point())
    return next(found, None)
