"""How many tokens a second does a step train, how near is that to the machine's peak, and to peers?

Whole optimiser steps of the autoregressive twin, of the denoiser of one stream and of two, at the
shapes of `laptop`, `cpu_small`, the latter with windows of 512 (w256), and 12 layers of width 512
(w512), in turn with a large matrix product of the same type. The share of peak counts the
arithmetic of the passes, both streams and the first pass of self-conditioning included, and nothing
else. Peers are transformers' Llama and a GPT of nanochat's shape under the same loop; a pass over
2T tokens under a mask is what two streams save. Then what two threads give, what memory a step
takes against the estimate made before it, and what is not arithmetic.
"""

import argparse
import os
from dataclasses import asdict

from harness import CPU, begin, finish, fresh_peak_bytes, parser, refuse, track

from canvaslm.device import Precision
from canvaslm.measure import seconds
from canvaslm.training.memory import estimate_memory
from step_overheads import measure_overheads
from step_rates import Found, Group, time_group
from step_work import KINDS, Kind, build_step, plan_of, seconds_in_fresh_process

_FLOAT32: Precision = "float32"
_BFLOAT16: Precision = "bfloat16"
_PLAIN: tuple[Kind, ...] = ("autoregressive", "one_stream", "two_streams")
_DENSE: tuple[Kind, ...] = ("autoregressive", "one_stream")


_GROUPS = (
    Group(shape="laptop", precision=_FLOAT32, kinds=_PLAIN),
    Group(shape="cpu_small", precision=_FLOAT32, kinds=_PLAIN),
    Group(shape="w256", precision=_FLOAT32, kinds=KINDS, has_peers=True),
    Group(shape="w256", precision=_BFLOAT16, kinds=_DENSE, has_peers=True, more_in_tiles=2),
    Group(shape="w512", precision=_FLOAT32, kinds=_DENSE, most_rounds=2),
    Group(shape="w512", precision=_BFLOAT16, kinds=_DENSE, most_rounds=2),
)
_TWO_THREADS = (
    Group(shape="w256", precision=_FLOAT32, kinds=_DENSE, threads=(1, 2)),
    Group(shape="w256", precision=_BFLOAT16, kinds=_DENSE, threads=(1, 2)),
)
_TINY = (Group(shape="tiny", precision=_FLOAT32, kinds=KINDS, has_peers=True),)
_MEMORY: tuple[tuple[str, Kind, Precision], ...] = (
    ("laptop", "two_streams", _FLOAT32),
    ("w256", "autoregressive", _FLOAT32),
    ("w256", "one_stream", _BFLOAT16),
)


def main() -> None:
    """Measure group by group, print and write."""
    options = parser(__doc__, "step", rounds=3)
    options.add_argument(
        "--only", help="the shape of the only groups that are timed; goes to partial/"
    )
    chosen = options.parse_args()
    begin(chosen)
    found, groups = Found(), _groups_of(chosen)
    if not groups:
        shapes = ", ".join(dict.fromkeys(group.shape for group in _GROUPS))
        refuse(f"--only: expected one of {shapes}, got {chosen.only!r}; name one of them")
    for group in track(groups, total=len(groups), label="groups of steps"):
        time_group(group, found, rounds=chosen.rounds, threads=chosen.threads)
    if chosen.only is None:
        _measure_overheads(chosen, found)
        if not chosen.tiny:  # each takes processes that import torch
            _measure_memory(found)
            _compare_allocators(chosen, found)
    finish(chosen, rows=found.rows, ratios=found.ratios, not_measured=found.not_measured)


def _groups_of(options: argparse.Namespace) -> list[Group]:
    if options.tiny:
        return list(_TINY)
    groups = _GROUPS
    if options.threads == 1 and len(os.sched_getaffinity(0)) > 1:
        groups += _TWO_THREADS
    return [group for group in groups if options.only in (None, group.shape)]


def _measure_memory(found: Found) -> None:
    """Peak bytes of three steps in a fresh process over what was estimated before them."""
    for shape, kind, precision in _MEMORY:
        plan = plan_of(shape, kind, precision=precision)
        estimate = estimate_memory(plan, sliced_attention=True).total
        arguments = {"shape": shape, "kind": kind, "precision": precision}
        peak = fresh_peak_bytes("step_work:memory_work", arguments, processes=1)
        name = f"step/{shape}/{precision}/{kind}_peak_memory_over_estimate"
        found.ratios[name] = None if peak is None else peak / estimate
        if peak is None:
            found.not_measured[name] = "this machine does not tell a process's peak"
        found.rows.append(
            {
                "shape": shape,
                "precision": precision,
                "step": kind,
                "peak_bytes": peak,
                "estimated_bytes": estimate,
            }
        )


def _measure_overheads(options: argparse.Namespace, found: Found) -> None:
    """What is not arithmetic, as shares of a step of two streams."""
    for shape in ("tiny",) if options.tiny else ("laptop", "w512"):
        step = build_step(plan_of(shape, "two_streams", precision=_FLOAT32))
        step.run()
        step_s = seconds(step.run, device=CPU)
        spent = measure_overheads(step, saves=3 if shape == "w512" else 9)
        found.rows.append({"shape": shape, "step_s": step_s, **asdict(spent)})
        place = f"step/{shape}/float32/threads{options.threads}"
        found.ratios |= {
            f"{place}/data_and_draws_share": (spent.data_s + spent.draws_s) / step_s,
            f"{place}/draws_share": spent.draws_s / step_s,
            f"{place}/logging_share": spent.logging_s / step_s,
            f"{place}/checkpoint_stall_over_write": spent.save_s / spent.write_s,
            f"{place}/checkpoint_finite_over_write": spent.finite_s / spent.write_s,
            f"{place}/checkpoint_hash_over_write": spent.hash_s / spent.write_s,
            f"{place}/checkpoint_copy_over_write": spent.copy_s / spent.write_s,
            f"{place}/checkpoints_share": spent.save_s / step_s / step.plan.pretrain.save_every,
        }


def _compare_allocators(options: argparse.Namespace, found: Found) -> None:
    """A step where freed memory stays in the process over one where the kernel gets it back."""
    shape, taken = "laptop", {}
    for keeps in (True, False):
        taken[keeps] = seconds_in_fresh_process(shape, keeps_memory=keeps, steps=3)
        found.rows.append({"shape": shape, "keeps_freed_memory": keeps, "step_s": taken[keeps]})
    found.ratios[f"step/{shape}/float32/threads{options.threads}/kept_memory_over_returned"] = (
        taken[True] / taken[False]
    )


if __name__ == "__main__":
    main()
