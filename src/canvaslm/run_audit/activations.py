"""Does any number inside the network run away, and how large do they get?

Hooks over every module look at each output of the run's own passes, in the order in which they are
made, and name the first that is not finite or lies beyond a stated bound. Scores are worked out
from what the projections put out, with a rotation of their own, and not by the attention's code.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from canvaslm.run_audit.reading import Reading

BOUND = 1e4  # float32 holds seven digits, so a difference of 1 is still exact to three of them
_QUERIES = 256  # of a long window, spread evenly; all keys


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """What was seen of all outputs.

    Attributes:
        first: the first module whose output is not finite or too large, in words; None if none is.
        n_outputs: how many outputs were looked at.
        largest: by kind of module, the largest absolute value of an output; finite ones only.
    """

    first: str | None
    n_outputs: int
    largest: dict[str, float]


class Watch:
    """Looks at every output of every module while it is entered."""

    def __init__(self, model: Backbone) -> None:
        self._model = model
        self._stack = ExitStack()
        self._first: str | None = None
        self._n_outputs = 0
        self._largest: dict[str, float] = {}

    def __enter__(self) -> "Watch":
        """Hook every module."""
        for place, module in self._model.named_modules():
            if module is not self._model:
                hook = module.register_forward_hook(self._look_at(place))
                self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the modules as they were."""
        self._stack.close()

    def result(self) -> Extremes:
        """What was seen so far."""
        return Extremes(first=self._first, n_outputs=self._n_outputs, largest=dict(self._largest))

    def _look_at(self, place: str) -> Any:
        kind = ".".join(part for part in place.split(".") if not part.isdigit())

        def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            del module, inputs
            tensors = output if isinstance(output, tuple) else (output,)
            value = tensors[0].detach()  # of a block: the residual stream, then keys and values
            largest = float(value.abs().max())
            self._n_outputs += 1
            if math.isfinite(largest):
                self._largest[kind] = max(self._largest.get(kind, 0.0), largest)
            if self._first is None and not largest <= BOUND:
                self._first = f"{place}, output {self._n_outputs}: {_told(value, largest)}"

        return look


@torch.no_grad()
def largest_score(model: Backbone, reading: Reading) -> float:
    """The largest absolute attention score of a window, q·k/sqrt(E), over all layers and heads.

    Every query of up to 256 meets every key of its own stream and of the clean one, those that a
    mask would hide among them, so that the bound is one for any mask.
    """
    with _projections(model) as seen:
        context = model.encode(reading.clean)
        clean = [dict(layer) for layer in seen]
        largest = _scores(clean, clean, model.params)
        if reading.has_noise:
            model.denoise(reading.noisy, reading.times, context=context, guess=None, has_guess=None)
            largest = max(largest, *(_scores(seen, keys, model.params) for keys in (seen, clean)))
    return largest


@contextmanager
def _projections(model: Backbone) -> Iterator[list[dict[str, Tensor]]]:
    """The latest queries and keys (1, heads, T, E) of each layer, before they are rotated."""
    seen: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    with ExitStack() as stack:
        for layer, block in zip(seen, model.blocks, strict=True):
            for name in ("query", "key"):
                norm = getattr(block.attention, f"{name}_norm")

                def keep(
                    module: nn.Module,
                    inputs: Any,
                    output: Tensor,
                    layer: dict[str, Tensor] = layer,
                    name: str = name,
                ) -> None:
                    del module, inputs
                    layer[name] = output

                stack.callback(norm.register_forward_hook(keep).remove)
        yield seen


def _scores(
    queries: list[dict[str, Tensor]], keys: list[dict[str, Tensor]], params: ModelParams
) -> float:
    """The largest absolute score between two sets of projections."""
    largest, group = 0.0, params.n_heads // params.n_kv_heads
    for own, other in zip(queries, keys, strict=True):
        q = _rotated(own["query"][0].double(), params)  # (H, T, E)
        k = _rotated(other["key"][0].double(), params).repeat_interleave(group, dim=0)
        every = max(1, q.shape[1] // _QUERIES)
        scores = q[:, ::every] @ k.mT / math.sqrt(params.head_width)
        largest = max(largest, float(scores.abs().max()))
    return largest


def _rotated(heads: Tensor, params: ModelParams) -> Tensor:
    """Turn each pair of features (i, i + E/2) by position · base^(-2i/E)."""
    half = params.head_width // 2
    positions = torch.arange(heads.shape[1], dtype=torch.float64, device=heads.device)
    periods = params.rope_base ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones(len(positions), half, dtype=torch.float64, device=heads.device),
        positions[:, None] / periods.to(heads.device),
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def _told(value: Tensor, largest: float) -> str:
    n_wrong = int((~torch.isfinite(value)).sum())
    if n_wrong:
        return f"{n_wrong} of {value.numel()} values are not finite"
    return f"up to {largest:.3g}"
