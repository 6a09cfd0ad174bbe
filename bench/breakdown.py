"""Where do the seconds of a training step, and those of the loss, go?

Steps of the profile `laptop`, and the loss of a large vocabulary forward and backward, under
torch's own profiler, each operation counted with the time that it spends itself. Shares are of the
seconds of the watched work; what is in no operation of torch's is Python's, autograd's, and the
profiler's own, which costs a little for each operation. `products_share_of_peak` is the rate of the
products over that of a large product in the same process: nothing can be faster than its
products at that rate.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from harness import CPU, begin, finish, parser, product_run, track

from canvaslm.measure import interleaved_seconds
from canvaslm.reporting.benches import Scalar
from loss_forms import draw_inputs, ours
from step_work import Kind, build_step, plan_of

_KINDS: tuple[Kind, ...] = ("autoregressive", "two_streams")
_WATCHED = 3
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


def main() -> None:
    """Time and watch each piece of work, print and write."""
    chosen = parser(__doc__, "breakdown", rounds=9, threads=2).parse_args()
    begin(chosen)
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    works = _works(is_tiny=chosen.tiny)
    for work in track(works, total=len(_KINDS) + 1, label="work that is watched"):
        product, product_flops = product_run(torch.float32)
        timings = interleaved_seconds(
            {"work": work.run, "product": product},
            device=CPU,
            rounds=chosen.rounds,
            warmup_rounds=1,
        )
        work_s = timings["work"].median_s
        peak = product_flops / timings["product"].median_s
        found, watched_s = _seconds_by_group(work.run)
        for group, group_s in sorted(found.items(), key=lambda item: -item[1]):
            if group_s:
                shares = {"ms": 1e3 * group_s, "share": group_s / watched_s}
                rows.append({"work": work.name, "in": group, **shares})
        place = f"breakdown/{work.name}/threads{chosen.threads}"
        ratios[f"{place}/products_share"] = found[_PRODUCTS] / watched_s
        ratios[f"{place}/products_share_of_peak"] = work.flops / found[_PRODUCTS] / peak
        ratios[f"{place}/share_of_peak"] = work.flops / work_s / peak
    finish(chosen, rows=rows, ratios=ratios)


def _works(*, is_tiny: bool) -> Iterator[_Work]:
    """One after the other, so that no two are in memory at once."""
    shape = "tiny" if is_tiny else "laptop"
    for kind in _KINDS:
        step = build_step(plan_of(shape, kind, precision="float32"))
        yield _Work(name=f"{shape}_{kind}", run=step.run, flops=step.flops)
    width, tokens, vocab = (32, 64, 1000) if is_tiny else (256, 1024, 50_257)
    inputs = draw_inputs(width=width, tokens=tokens, vocab=vocab)
    flops = 6.0 * width * tokens * vocab
    yield _Work(name=f"loss_D{width}_N{tokens}_V{vocab}", run=ours(inputs, "float32"), flops=flops)


def _seconds_by_group(run: Callable[[], object]) -> tuple[dict[str, float], float]:
    """Mean seconds of watched work by what they went into, and all of them."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        started = time.perf_counter()
        for _ in range(_WATCHED):
            run()
        all_s = (time.perf_counter() - started) / _WATCHED
    found = dict.fromkeys((*_GROUPS, _OTHER), 0.0)
    for event in watched.key_averages():
        if event.key.startswith("aten::"):
            spent_s = event.self_cpu_time_total / 1e6 / _WATCHED
            found[_GROUP_OF.get(event.key, _OTHER)] += spent_s
    return found | {_CALLS: all_s - sum(found.values())}, all_s


if __name__ == "__main__":
    main()
