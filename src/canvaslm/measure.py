"""What does a piece of work cost: seconds, bytes, forwards, arithmetic?

Seconds are read only after the device has ended its work; a timer that is read when the work is
merely queued reports any speed one likes. Things that are compared are run in turn, round by
round, so that a machine that slows down slows all of them. Forwards are counted by a hook on one
module of the network, without replacing any of its code. Arithmetic is counted by formula.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from canvaslm.device import wait_for


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The seconds of the rounds of one piece of work."""

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle round."""
        return statistics.median(self.rounds_s)

    @property
    def fastest_s(self) -> float:
        """The shortest round."""
        return min(self.rounds_s)

    @property
    def slowest_s(self) -> float:
        """The longest round."""
        return max(self.rounds_s)


def seconds(
    run: Callable[[], object],
    *,
    device: torch.device,
    wait: Callable[[torch.device], None] = wait_for,
) -> float:
    """Time one call of ``run``, from an idle device to an idle device.

    Args:
        run: the work.
        device: where the work is done.
        wait: returns when the device has ended all work that is queued on it.
    """
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def interleaved_seconds(
    runs: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int,
    warmup_rounds: int,
    wait: Callable[[torch.device], None] = wait_for,
) -> dict[str, Timing]:
    """Time several pieces of work against each other: A B C, B C A, C A B, ...

    Each round runs every piece once and starts one place further on, so that none is always the
    one that follows a given other. The first ``warmup_rounds`` rounds are run and not kept.

    Args:
        runs: the work, by name.
        device: where the work is done.
        rounds: rounds that are kept, at least 1.
        warmup_rounds: rounds that are not, 0 or more.
        wait: as in :func:`seconds`.
    """
    assert rounds >= 1, rounds
    names = list(runs)
    kept: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup_rounds + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            elapsed_s = seconds(runs[name], device=device, wait=wait)
            if number >= warmup_rounds:
                kept[name].append(elapsed_s)
    return {name: Timing(rounds_s=tuple(values)) for name, values in kept.items()}


def peak_bytes(run: Callable[[], object], *, device: torch.device) -> int | None:
    """Run once and say how much memory was in use at the worst moment.

    On CUDA these are the bytes of tensors on the device. On Linux they are the resident bytes of
    the whole process, whose high-water mark the kernel lets a process set back. Elsewhere nothing
    is measured.

    Returns:
        Bytes, or ``None`` where this machine gives no answer.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        wait_for(device)
        return torch.cuda.max_memory_allocated(device)
    can_reset = sys.platform == "linux" and _reset_resident_peak()
    run()
    return _resident_peak() if can_reset else None


class ForwardCounter:
    """Counts the forwards of a network while a ``with`` block runs.

    The hook sits on one module that every forward passes exactly once, for example
    ``Backbone.entrance``; its first tensor tells batch and length.

    Args:
        module: the module to listen to; its first tensor argument is (B, S, ...).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.forwards = 0
        self.tokens = 0

    def __enter__(self) -> "ForwardCounter":
        """Start to count."""
        self._hook = self._module.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the module as it was."""
        self._hook.remove()

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor))
        self.forwards += 1
        self.tokens += given.shape[0] * given.shape[1]


class ModelNumbers(Protocol):
    """The numbers of a transformer that decide its arithmetic."""

    @property
    def width(self) -> int:
        """D."""
        ...

    @property
    def n_layers(self) -> int:
        """Blocks."""
        ...

    @property
    def n_heads(self) -> int:
        """H."""
        ...

    @property
    def n_kv_heads(self) -> int:
        """K."""
        ...

    @property
    def head_width(self) -> int:
        """E."""
        ...

    @property
    def ffn_width(self) -> int:
        """Inner width of the gated feed-forward."""
        ...

    @property
    def token_shift(self) -> bool:
        """Whether a D×D matrix reads the token before."""
        ...


def stream_flops(
    model: ModelNumbers,
    *,
    tokens: float,
    mean_keys: float,
    scored_tokens: float,
    vocab_size: int,
    for_context: bool = False,
) -> float:
    """Count the floating-point operations of one forward of one stream of tokens.

    ``2·M·tokens`` for the M matrix parameters of all blocks and of the token shift,
    ``4·tokens·mean_keys·H·E`` in each block for scores and weighted sum, ``2·D·V`` for each token
    that goes through the head (Kaplan et al. 2020, arXiv 2001.08361, section 2.1, with attention
    over the keys that are really seen). Norms, activations, biases, look-ups, the time embedding
    (once a canvas) and the self-conditioning projection are left out: together they are below one
    percent at any width that matters. Under a tilt the time embedding is made for each token, which
    is left out as well: ``D·(F + D)`` parameters for F features of time. A backward costs twice a
    forward.

    Args:
        model: the shape, for example ``ModelParams``.
        tokens: tokens that pass the blocks.
        mean_keys: keys that a token attends to, on average: ``(T+1)/2`` for a causal stream,
            ``L·(C+1)/2`` for a noisy stream whose canvases also see the clean ones before them.
        scored_tokens: tokens that pass the head.
        vocab_size: V.
        for_context: whether the last block makes its keys and values and nothing else.
    """
    query = model.n_heads * model.head_width
    key = model.n_kv_heads * model.head_width
    matrices = model.width * (2 * query + 2 * key + 3 * model.ffn_width)
    attention = 4.0 * mean_keys * query
    whole = model.n_layers - 1 if for_context else model.n_layers
    blocks = whole * tokens * (2.0 * matrices + attention)
    if model.token_shift:
        blocks += tokens * 2.0 * model.width**2
    if for_context:
        blocks += tokens * 2.0 * model.width * 2 * key
    return blocks + 2.0 * model.width * vocab_size * scored_tokens


def _reset_resident_peak() -> bool:
    """Set the high-water mark of resident bytes back to what is resident now (proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    """Read the high-water mark of resident bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
