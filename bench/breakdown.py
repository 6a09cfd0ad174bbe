"""Where do the seconds of a training step, and those of the loss, go?

Steps of several shapes, and the loss of a large vocabulary forward and backward, under torch's own
profiler, each operation counted with the time that it spends itself. Shares are of the seconds of
the watched work; what is in no operation of torch's is Python's, autograd's, and the profiler's
own, which costs a little for each operation. `products_share_of_peak` is the rate of the products
over that of a large product of the same type in the same process: nothing can be faster than its
products at that rate. bfloat16 is watched where the processor has tiles for it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from harness import CPU, begin, finish, parser, product_run, track

from canvaslm.device import Precision, multiplies_in_tiles
from canvaslm.measure import seconds
from canvaslm.reporting.benches import Scalar
from loss_forms import draw_inputs, ours
from step_work import Kind, build_step, plan_of

_STEPS: tuple[tuple[str, Kind], ...] = (
    ("laptop", "autoregressive"),
    ("laptop", "two_streams"),
    ("cpu_small", "autoregressive"),
    ("w256", "autoregressive"),
    ("w256", "one_stream"),
    ("w512", "autoregressive"),
)
_LOSSES = ((256, 4096), (1024, 1024))
_IN_TILES = ({("w256", "autoregressive"), ("w512", "autoregressive")}, {(256, 4096), (1024, 1024)})
_VOCAB = 50_257
_TYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCTS = "products"
_CALLS, _OTHER = "calls and Python", "other operations"
_GROUPS = {
    _PRODUCTS: {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv_"},
    "kernels of attention": {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "exponentials": {"exp", "exp_", "_softmax", "_softmax_backward_data", "silu", "silu_backward"},
    "optimiser": {"_fused_adamw_", "_foreach_norm", "_foreach_mul_", "linalg_vector_norm"},
    "copies and fills": {"copy_", "fill_", "zero_", "cat", "index", "index_select", "embedding"},
    "sums and scalings": {
        "add", "add_", "addcmul_", "addcmul", "mul", "mul_", "div", "div_", "sub", "sub_", "sum",
        "neg", "masked_fill_", "pow", "rsqrt_", "square_",
    },
}  # fmt: skip
_GROUP_OF = {f"aten::{name}": group for group, names in _GROUPS.items() for name in names}


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What is watched, and the floating-point operations of its products."""

    name: str
    run: Callable[[], object]
    flops: float
    precision: Precision


def main() -> None:
    """Time and watch each piece of work, print and write."""
    chosen = parser(__doc__, "breakdown", rounds=1).parse_args()
    begin(chosen)
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    works = _tiny_works() if chosen.tiny else _works()
    for work in track(works, total=_count(is_tiny=chosen.tiny), label="work that is watched"):
        product, product_flops = product_run(_TYPES[work.precision])
        work.run()
        found, watched_s = _seconds_by_group(work.run, times=chosen.rounds)
        product()
        product_s = statistics.median(seconds(product, device=CPU) for _ in range(5))
        peak = product_flops / product_s
        for group, group_s in sorted(found.items(), key=lambda item: -item[1]):
            if group_s:
                shares = {"ms": 1e3 * group_s, "share": group_s / watched_s}
                rows.append({"work": work.name, "in": group, **shares})
        place = f"breakdown/{work.name}/threads{chosen.threads}"
        ratios[f"{place}/products_share"] = found[_PRODUCTS] / watched_s
        ratios[f"{place}/products_share_of_peak"] = work.flops / found[_PRODUCTS] / peak
    finish(chosen, rows=rows, ratios=ratios)


def _count(*, is_tiny: bool) -> int:
    if is_tiny:
        return 2
    in_tiles = sum(map(len, _IN_TILES)) if multiplies_in_tiles() else 0
    return len(_STEPS) + len(_LOSSES) + in_tiles


def _tiny_works() -> Iterator[_Work]:
    yield _step("tiny", "two_streams", "float32")
    yield _loss(32, 64, "float32", vocab=1000)


def _works() -> Iterator[_Work]:
    """One after the other, so that no two are in memory at once."""
    for shape, kind in _STEPS:
        yield _step(shape, kind, "float32")
        if (shape, kind) in _IN_TILES[0] and multiplies_in_tiles():
            yield _step(shape, kind, "bfloat16")
    for width, tokens in _LOSSES:
        yield _loss(width, tokens, "float32")
        if (width, tokens) in _IN_TILES[1] and multiplies_in_tiles():
            yield _loss(width, tokens, "bfloat16")


def _step(shape: str, kind: Kind, precision: Precision) -> _Work:
    step = build_step(plan_of(shape, kind, precision=precision))
    name = f"{shape}_{kind}_{precision}"
    return _Work(name=name, run=step.run, flops=step.flops, precision=precision)


def _loss(width: int, tokens: int, precision: Precision, *, vocab: int = _VOCAB) -> _Work:
    return _Work(
        name=f"loss_D{width}_N{tokens}_{precision}",
        run=ours(draw_inputs(width=width, tokens=tokens, vocab=vocab), precision),
        flops=6.0 * width * tokens * vocab,
        precision=precision,
    )


def _seconds_by_group(run: Callable[[], object], *, times: int) -> tuple[dict[str, float], float]:
    """Mean seconds of watched work by what they went into, and all of them."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        started = time.perf_counter()
        for _ in range(times):
            run()
        all_s = (time.perf_counter() - started) / times
    found = dict.fromkeys((*_GROUPS, _OTHER), 0.0)
    for event in watched.key_averages():
        if event.key.startswith("aten::"):
            spent_s = event.self_cpu_time_total / 1e6 / times
            found[_GROUP_OF.get(event.key, _OTHER)] += spent_s
    return found | {_CALLS: all_s - sum(found.values())}, all_s


if __name__ == "__main__":
    main()
