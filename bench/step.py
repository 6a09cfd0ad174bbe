"""How many tokens a second does a step train, and how near is that to the machine's peak?

One step of each objective at the shape of ``params.yaml``, on random tokens, in turn with a large
matrix product. The share of peak counts the arithmetic of the passes (both streams and the first
pass of self-conditioning) and nothing else. Prints a table on stdout and writes JSON.
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
from canvaslm.training.learner import Learner, Objective
from canvaslm.training.plan import ObjectiveKind, PretrainParams, Recipe, recipe

CPU = torch.device("cpu")
PRODUCT = 2048  # rows and columns of the product that stands for the peak


def main() -> None:
    """Time both objectives and the product, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reports/bench/step.json"))
    options = parser.parse_args()
    left = torch.randn(PRODUCT, PRODUCT)
    runs: dict[str, Callable[[], object]] = {"product": lambda: left @ left}
    flops = {"product": 2.0 * PRODUCT**3}
    tokens = {}
    kinds: tuple[ObjectiveKind, ...] = ("autoregressive", "diffusion")
    for kind in kinds:
        plan = _recipe(options.params, kind)
        objective = _objective(plan)
        n_windows = plan.pretrain.windows_per_step
        runs[kind] = _step(Learner(plan, objective, CPU), plan)
        flops[kind] = objective.flops_per_window(plan.model) * n_windows
        tokens[kind] = plan.layout.window_tokens * n_windows
    print(f"one step at the shape of {options.params}, against a product of {PRODUCT} squared")
    timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=1)
    peak = flops["product"] / timings["product"].median_s
    rows = {}
    for kind, n_tokens in tokens.items():
        median_s = timings[kind].median_s
        share = flops[kind] / median_s / peak
        rows[kind] = {"share_of_peak": share, "tokens_per_s": n_tokens / median_s}
        print(f"{kind:15} {n_tokens / median_s:9.0f} tokens/s  {share:6.1%} of the product's rate")
    write_json(options.out, {"machine": describe_machine(CPU), "rows": rows})


def _recipe(params: Path, kind: ObjectiveKind) -> Recipe:
    return recipe(
        kind,
        layout=load_section(params, "layout", Layout),
        model=load_section(params, "model", ModelParams),
        diffusion=load_section(params, "diffusion", DiffusionParams),
        pretrain=load_section(params, "pretrain", PretrainParams),
    )


def _objective(plan: Recipe) -> Objective:
    chunk = plan.pretrain.vocab_chunk
    if plan.diffusion is None:
        return NextToken(layout=plan.layout, eot_id=0, vocab_chunk=chunk)
    return Denoising(
        layout=plan.layout, diffusion=plan.diffusion, seed=plan.pretrain.seed, vocab_chunk=chunk
    )


def _step(learner: Learner, plan: Recipe) -> Callable[[], object]:
    """One optimiser step on the same random windows each time."""
    shape = (plan.pretrain.windows_per_step, plan.layout.window_tokens)
    windows = stream(1, "bench").integers(plan.layout.vocab_size, size=shape)
    return lambda: learner.take_step(plan.pretrain.warmup_steps, windows, np.arange(shape[0]))


if __name__ == "__main__":
    main()
