"""What does it cost a training step to leave samples for a trace?

One learner that keeps samples and one that keeps none take the same steps in turn, at the shape of
``params.yaml``, for both objectives, once the memory of the samples is in use again. The price is
the ratio of their median seconds. Prints a table on stdout and writes JSON.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from canvaslm.device import describe_machine
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.layout import Layout
from canvaslm.measure import interleaved_seconds
from canvaslm.model.shape import ModelParams
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.params import load_section
from canvaslm.randomness import stream
from canvaslm.reporting.files import write_json
from canvaslm.training.learner import Learner
from canvaslm.training.plan import ObjectiveKind, PretrainParams, Recipe, recipe

CPU = torch.device("cpu")
KINDS: tuple[ObjectiveKind, ...] = ("autoregressive", "diffusion")


def main() -> None:
    """Time steps with samples and without, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("reports/bench/trace.json"))
    options = parser.parse_args()
    pretrain = load_section(options.params, "pretrain", PretrainParams)
    assert pretrain.trace_steps, "pretrain.trace_steps is 0: there is nothing to measure"
    print(f"one step at the shape of {options.params}, with the samples of a trace and without")
    warmup = pretrain.trace_steps + 2
    rows = {}
    for kind in KINDS:
        plans = {name: _recipe(options.params, kind, steps) for name, steps in _choices(pretrain)}
        runs = {name: _step(plan) for name, plan in plans.items()}
        timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=warmup)
        plain, sampling = timings["plain"], timings["sampling"]
        rows[kind] = {
            "plain_median_s": plain.median_s,
            "sampling_median_s": sampling.median_s,
            "extra_share": sampling.median_s / plain.median_s - 1,
            "extra_share_of_fastest": sampling.fastest_s / plain.fastest_s - 1,
        }
        print(
            f"{kind:15} {plain.median_s * 1e3:8.1f} ms  {rows[kind]['extra_share']:+7.2%} "
            f"(fastest rounds {rows[kind]['extra_share_of_fastest']:+.2%})"
        )
    write_json(
        options.out, {"machine": describe_machine(CPU), "rounds": options.rounds, "rows": rows}
    )


def _choices(pretrain: PretrainParams) -> tuple[tuple[str, int], ...]:
    return (("plain", 0), ("sampling", pretrain.trace_steps))


def _recipe(params: Path, kind: ObjectiveKind, trace_steps: int) -> Recipe:
    pretrain = load_section(params, "pretrain", PretrainParams)
    return recipe(
        kind,
        layout=load_section(params, "layout", Layout),
        model=load_section(params, "model", ModelParams),
        diffusion=load_section(params, "diffusion", DiffusionParams),
        pretrain=pretrain.model_copy(update={"trace_steps": trace_steps}),
    )


def _step(plan: Recipe) -> Callable[[], object]:
    """One optimiser step on the same random windows each time."""
    chunk = plan.pretrain.vocab_chunk
    if plan.diffusion is None:
        objective = NextToken(layout=plan.layout, eot_id=0, vocab_chunk=chunk)
    else:
        objective = Denoising(
            layout=plan.layout, diffusion=plan.diffusion, seed=plan.pretrain.seed, vocab_chunk=chunk
        )
    learner = Learner(plan, objective, CPU)
    shape = (plan.pretrain.windows_per_step, plan.layout.window_tokens)
    windows = stream(1, "bench").integers(plan.layout.vocab_size, size=shape)
    return lambda: learner.take_step(plan.pretrain.warmup_steps, windows, np.arange(shape[0]))


if __name__ == "__main__":
    main()
