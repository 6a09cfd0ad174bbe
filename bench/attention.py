"""What does attention without a mask cost, beside a dense mask, flex and a softmax by hand?

Forward, and forward and backward to all heads, one after the other in the same rounds, for one
stream (each canvas sees itself and those before it) and for two (a noisy canvas sees the clean keys
before it, and itself). The dense mask is what it costs to say the same with a boolean T×T mask, or
T×2T for two streams. Query heads share keys in groups, and no way but the softmax by hand repeats a
key. Memory is what a fresh process takes beyond inputs, and gradients included.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import harness

from canvaslm.measure import interleaved_seconds
from canvaslm.model.attention import (
    block_causal_attention,
    canvas_attention,
    full_attention,
    masked_attention,
)
from canvaslm.reporting.benches import Scalar

Attend = Callable[..., Tensor]
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FLEX_TYPE = "float32"
_WARMUP_ROUNDS = 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """One shape: B rows of T tokens in canvases of L, H query heads to K key heads of width 64."""

    name: str
    B: int
    H: int
    K: int
    T: int
    L: int
    E: int = 64

    def mask(self, *, streams: int) -> Tensor:
        """Which keys each query sees: of the clean stream, if there are two, then of its own."""
        canvas = torch.arange(self.T) // self.L
        if streams == 1:
            return canvas[:, None] >= canvas
        return torch.cat((canvas[:, None] > canvas, canvas[:, None] == canvas), dim=1)

    def heads(self, dtype: torch.dtype, *, streams: int) -> list[Tensor]:
        """Queries, keys and values as projections leave them; of two streams, clean ones behind."""
        draws = torch.Generator().manual_seed(1)
        counts = [self.H, self.K, self.K, *[self.K] * 2 * (streams - 1)]
        shapes = [(self.B, self.T, n, self.E) for n in counts]
        drawn = (torch.randn(shape, generator=draws).to(dtype) for shape in shapes)
        return [x.transpose(1, 2).requires_grad_() for x in drawn]


LAPTOP = Size(name="laptop", B=32, H=3, K=1, T=128, L=16)
SIZES = (
    LAPTOP,
    Size(name="T512_L64", B=4, H=4, K=2, T=512, L=64),
    Size(name="T4096_L256", B=1, H=2, K=1, T=4096, L=256),
)
FLEX_SIZES = SIZES[1:]  # each form takes seconds to compile
TINY_SIZES = (Size(name="T64_L16", B=1, H=4, K=2, T=64, L=16),)


def main() -> None:
    """Time every way at every size and type, compare results, measure memory, write."""
    options = harness.parser(__doc__, "attention", rounds=3).parse_args()
    harness.begin(options)
    found = _Found(options)
    sizes = TINY_SIZES if options.tiny else SIZES
    cases = [(size, kind, n) for kind in _TYPES for size in sizes for n in (1, 2)]
    for size, kind, n in harness.track(cases, total=len(cases), label="attention"):
        found.time(size, kind, streams=n)
    if not options.tiny:  # a fresh process takes seconds to start
        found.memory(sizes[-1])
    found.ratios["attention/float32/largest_difference"] = found.largest_difference
    harness.finish(options, rows=found.rows, ratios=found.ratios, not_measured=found.not_measured)


class _Found:
    """What has been measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Scalar]] = []
        self.ratios: dict[str, float | None] = {}
        self.not_measured = {
            "flex attention, backward": "torch has no backward pass of it on a CPU",
            "flex attention in bfloat16 and for two streams": "each form takes seconds to compile",
            "softmax by hand for two streams": "twice the square of one stream",
        }
        self.largest_difference = 0.0

    def time(self, size: Size, kind: str, *, streams: int) -> None:
        """Time all ways of one form in turn, forward and with the backward pass."""
        dtype = _TYPES[kind]
        heads = size.heads(dtype, streams=streams)
        ways = dict(_ways(size, kind, streams=streams))
        runs: dict[str, Callable[[], object]] = {}
        for name, attend in ways.items():
            runs[f"{name}/forward"] = functools.partial(_forward, attend, heads)
            if name != "flex attention":
                runs[f"{name}/both"] = _forward_and_backward(attend, heads)
        timings = interleaved_seconds(
            runs,
            device=harness.CPU,
            rounds=self.options.rounds,
            warmup_rounds=_WARMUP_ROUNDS,
        )
        seconds = {name: timing.median_s for name, timing in timings.items()}
        self._add_rows(size, kind, streams, list(ways), seconds)
        if kind == "float32":
            self._compare(ways["ours"], size, heads, streams=streams)

    def memory(self, size: Size) -> None:
        """Bytes beyond the inputs, of forward and backward, over those of one T×T of float32."""
        square = size.T * size.T * 4
        for way in ("ours", "dense mask"):
            for streams in (1, 2):
                extra = harness.fresh_peak_bytes(
                    "attention:prepared", {"size": vars(size), "way": way, "streams": streams}
                )
                over = None if extra is None else extra / square
                self.rows.append(
                    {
                        "size": size.name,
                        "streams": streams,
                        "way": way,
                        "extra_mb": None if extra is None else extra / 1e6,
                        "extra_over_one_square_of_float32": over,
                    }
                )
                if way == "ours":
                    form = _form(size, streams)
                    self.ratios[f"attention/float32/{form}/extra_over_one_square"] = over

    def _add_rows(
        self, size: Size, kind: str, streams: int, ways: list[str], seconds: Mapping[str, float]
    ) -> None:
        dense = seconds["dense mask/both"]
        for way in ways:
            both = seconds.get(f"{way}/both")
            forward = seconds[f"{way}/forward"]
            self.rows.append(
                {
                    "size": size.name,
                    "streams": streams,
                    "type": kind,
                    "way": way,
                    "forward_ms": 1e3 * forward,
                    "forward_backward_ms": None if both is None else 1e3 * both,
                    "forward_over_dense": forward / seconds["dense mask/forward"],
                    "forward_backward_over_dense": None if both is None else both / dense,
                }
            )
        where = f"attention/{kind}/{_form(size, streams)}/threads{self.options.threads}"
        self.ratios[f"{where}/ours_over_dense_mask"] = seconds["ours/both"] / dense

    def _compare(self, attend: Attend, size: Size, heads: list[Tensor], *, streams: int) -> None:
        """How far a few rows of the batch are from the same numbers under a mask in float64."""
        with torch.no_grad():
            few = [x[:1] for x in heads]
            truth = _dense(size.mask(streams=streams))(*(x.double() for x in few))
            distance = (attend(*few) - truth).abs().max().item()
        self.largest_difference = max(self.largest_difference, distance)


def prepared(size: dict[str, int], way: str, streams: int) -> Callable[[], object]:
    """For a fresh process: inputs and one way, of which forward and backward are the work.

    Both have run once at a shorter length, so that the code of the libraries is in memory.
    """
    shape = Size(**size)  # pyright: ignore[reportArgumentType] - what JSON carried
    short = dataclasses.replace(shape, T=2 * shape.L)
    works = []
    for one in (short, shape):
        attend = dict(_ways(one, "bfloat16", streams=streams))[way]  # without flex attention
        works.append(_forward_and_backward(attend, one.heads(torch.float32, streams=streams)))
    works[0]()
    return works[1]


def _form(size: Size, streams: int) -> str:
    return size.name if streams == 1 else f"{size.name}_two_streams"


def _ways(size: Size, kind: str, *, streams: int) -> Iterator[tuple[str, Attend]]:
    """Each way to say the same."""
    seen = size.mask(streams=streams)
    L = size.L
    if streams == 1:
        yield "ours", functools.partial(block_causal_attention, canvas_tokens=L)
    else:
        yield "ours", functools.partial(canvas_attention, canvas_tokens=L, start=0)
    yield "dense mask", _dense(seen)
    yield "loop of calls", functools.partial(_loop, size)
    if streams == 1:
        yield "softmax by hand", functools.partial(_by_hand, seen)
    if kind == _FLEX_TYPE and streams == 1 and size in FLEX_SIZES:
        yield "flex attention", _flex(size)


def _dense(seen: Tensor) -> Attend:
    """A boolean mask over all keys, clean ones first, through ``scaled_dot_product_attention``."""
    return lambda q, *kv: masked_attention(q, *_joined(*kv), seen)


def _loop(size: Size, q: Tensor, *kv: Tensor) -> Tensor:
    """One unmasked call a canvas, each with a copy of the keys that it sees."""
    L, outputs = size.L, []
    for first in range(0, size.T, L):
        own = slice(first, first + L)
        if len(kv) == 2:
            keys, values = (x[:, :, : first + L] for x in kv)
        else:
            k, v, clean_k, clean_v = kv
            keys = torch.cat((clean_k[:, :, :first], k[:, :, own]), dim=2)
            values = torch.cat((clean_v[:, :, :first], v[:, :, own]), dim=2)
        outputs.append(full_attention(q[:, :, own], keys, values))
    return torch.cat(outputs, dim=2)


def _by_hand(seen: Tensor, q: Tensor, *kv: Tensor) -> Tensor:
    """Scores, a fill with minus infinity, softmax and a product, as most code writes it."""
    group = q.shape[1] // kv[0].shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in kv)
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def _flex(size: Size) -> Attend:
    """Flex attention, compiled, with its block mask made beforehand."""
    L = size.L

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key // L <= query // L

    mask = flex.create_block_mask(sees, None, None, size.T, size.T, device="cpu")
    compiled = torch.compile(flex.flex_attention)
    return lambda *heads: compiled(*(x.detach() for x in heads), block_mask=mask, enable_gqa=True)


def _joined(k: Tensor, v: Tensor, *clean: Tensor) -> tuple[Tensor, Tensor]:
    if not clean:
        return k, v
    return torch.cat((clean[0], k), dim=2), torch.cat((clean[1], v), dim=2)


def _forward(attend: Attend, heads: list[Tensor]) -> None:
    with torch.no_grad():
        attend(*heads)


def _forward_and_backward(attend: Attend, heads: list[Tensor]) -> Callable[[], object]:
    draws = torch.Generator().manual_seed(2)
    shape = heads[0].transpose(1, 2).shape
    pull = torch.randn(shape, generator=draws).to(heads[0].dtype).transpose(1, 2)
    return lambda: torch.autograd.grad(attend(*heads), heads, pull)


if __name__ == "__main__":
    main()
