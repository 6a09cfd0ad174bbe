"""Where do the seconds of a training step go?

Steps of the profile `laptop` under torch's own profiler, each operation counted with the time that
it spends itself. A share is of the seconds of a step that is not watched, since watching costs a
little for each operation. What is neither in an operation nor in a kernel of one is Python's.
`share_of_peak` of the products is their rate over that of a large product in the same process:
no step can be faster than its products at that rate.
"""

import torch
from torch.profiler import ProfilerActivity, profile

from canvaslm.measure import interleaved_seconds
from canvaslm.reporting.benches import Scalar
from harness import CPU, begin, finish, parser, product_run, track
from step_work import Kind, Step, build_step, plan_of

_KINDS: tuple[Kind, ...] = ("autoregressive", "two_streams")
_WATCHED_STEPS = 3
_PRODUCTS = "products"
_CALLS = "calls and Python"
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


def main() -> None:
    """Time and watch steps of both kinds, print and write."""
    chosen = parser(__doc__, "breakdown", rounds=9, threads=2).parse_args()
    begin(chosen)
    shape = "tiny" if chosen.tiny else "laptop"
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    for kind in track(_KINDS, total=len(_KINDS), label="steps that are watched"):
        step = build_step(plan_of(shape, kind, precision="float32"))
        product, product_flops = product_run(torch.float32)
        timings = interleaved_seconds(
            {"step": step.run, "product": product},
            device=CPU,
            rounds=chosen.rounds,
            warmup_rounds=1,
        )
        step_s = timings["step"].median_s
        peak = product_flops / timings["product"].median_s
        found = _seconds_by_group(step)
        found[_CALLS] += max(0.0, step_s - sum(found.values()))
        for group, group_s in sorted(found.items(), key=lambda item: -item[1]):
            rows.append(
                {"shape": shape, "step": kind, "in": group, "ms": 1e3 * group_s}
                | {"share": group_s / step_s}
            )
        place = f"breakdown/{shape}/threads{chosen.threads}/{kind}"
        ratios[f"{place}_products_share"] = found[_PRODUCTS] / step_s
        ratios[f"{place}_products_share_of_peak"] = step.flops / found[_PRODUCTS] / peak
        ratios[f"{place}_share_of_peak"] = step.flops / step_s / peak
    finish(chosen, rows=rows, ratios=ratios)


def _seconds_by_group(step: Step) -> dict[str, float]:
    """Mean seconds of a watched step by what they went into."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(_WATCHED_STEPS):
            step.run()
    found = dict.fromkeys((*_GROUPS, _CALLS), 0.0)
    for event in watched.key_averages():
        spent_s = event.self_cpu_time_total / 1e6 / _WATCHED_STEPS
        found[_GROUP_OF.get(event.key, _CALLS)] += spent_s
    return found


if __name__ == "__main__":
    main()
