"""Which optimiser steps are compared: of which shapes, and of what?

Shapes come from the profiles, with a batch that takes a step to about a second. Of each shape: the
autoregressive twin, the denoiser of one stream and of two, and the latter as one pass over 2T
tokens under a mask. A step is a learner's own, on the same random tokens each time.

All of them train by one recipe, which is not the default one: a noisy stream that reads its own
token is the only one that one stream and a mask have, and AdamW moves the peers.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from harness import CPU, ROOT

from canvaslm.device import Precision
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.heap import keep_freed_memory
from canvaslm.layout import Layout
from canvaslm.model.attention import masked_attention
from canvaslm.model.backbone import Backbone
from canvaslm.model.layers import Rotation
from canvaslm.model.shape import ModelParams
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.params import compose, parse_section, read_yaml
from canvaslm.randomness import stream
from canvaslm.training.learner import Learner, Objective
from canvaslm.training.plan import ObjectiveKind, PretrainParams, Recipe, recipe

Kind = Literal["autoregressive", "one_stream", "two_streams", "masked"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# What a comparison of streams and of peers needs alike, by section.
_RECIPE: dict[str, dict[str, Any]] = {
    "model": {
        "self_conditioning": "output",
        "likelihood_bias": False,
        "noisy_input": "own",
        "token_shift": False,
        "tilt": 0.0,
    },
    "diffusion": {"next_token_weight": 0.0},
    "pretrain": {"optimizer": "adamw"},
}

_SCORED_ROWS = 512  # tokens whose scores are in memory at once

# The profile that a shape begins with, and what is changed. cpu_small has 5.8 million parameters.
_SHAPES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "tiny": ("ci", {}),
    "laptop": ("laptop", {}),
    "cpu_small": ("cpu_small", {"pretrain": {"windows_per_step": 8, "micro_batch_windows": 8}}),
    "w256": (
        "cpu_small",
        {
            "layout": {"canvas_tokens": 64},
            "pretrain": {"windows_per_step": 4, "micro_batch_windows": 4},
        },
    ),
    "w512": (
        "cpu_small",
        {
            "model": {
                "width": 512,
                "n_layers": 12,
                "n_heads": 8,
                "n_kv_heads": 4,
                "ffn_width": 1536,
            },
            "pretrain": {"windows_per_step": 4, "micro_batch_windows": 4},
        },
    ),
}


def plan_of(shape: str, kind: Kind, *, precision: Precision, **pretrain: Any) -> Recipe:
    """What one row trains.

    Args:
        shape: a key of the table above.
        kind: what is trained.
        precision: arithmetic of the passes.
        pretrain: knobs of ``pretrain`` that are changed besides.
    """
    profile, changes = _SHAPES[shape]
    values = read_yaml(ROOT / "configs/base.yaml")
    for overrides in (read_yaml(ROOT / f"configs/{profile}.yaml"), _RECIPE, changes):
        values = compose(values, overrides, where=shape)
    values["pretrain"] |= {"precision": precision, "device": "cpu", **pretrain}
    one_stream = kind == "one_stream"
    values["diffusion"] |= {"context": "noisy" if one_stream else "clean"}
    values["model"] |= {"clean_mask": "block" if one_stream else "causal"}
    objective: ObjectiveKind = "autoregressive" if kind == "autoregressive" else "diffusion"
    return recipe(
        objective,
        layout=parse_section(values["layout"], Layout, where=shape),
        model=parse_section(values["model"], ModelParams, where=shape),
        diffusion=parse_section(values["diffusion"], DiffusionParams, where=shape),
        pretrain=parse_section(values["pretrain"], PretrainParams, where=shape),
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step that can be taken again and again.

    Attributes:
        run: takes it.
        plan: what is trained.
        learner: who takes it.
        windows: (W, T) int64 ids.
        numbers: (W,) the windows' numbers, of which every second one draws a first guess.
        flops: floating-point operations of its passes, both streams and the first guess included.
    """

    run: Callable[[], object]
    plan: Recipe
    learner: Learner
    windows: np.ndarray
    numbers: np.ndarray
    flops: float

    @property
    def tokens(self) -> int:
        """Tokens of its windows."""
        return self.windows.size


def build_step(plan: Recipe, *, masked: bool = False) -> Step:
    """A learner and the tokens of its step.

    Args:
        plan: what is trained.
        masked: one pass over 2T tokens under a mask in place of two streams.
    """
    objective = build_objective(plan)
    learner = Learner(plan, objective, CPU)
    if masked:
        _pass_under_mask(learner.model)
    windows, numbers = random_windows(plan), _balanced_numbers(plan)
    step = plan.pretrain.warmup_steps
    return Step(
        run=lambda: learner.take_step(step, windows, numbers),
        plan=plan,
        learner=learner,
        windows=windows,
        numbers=numbers,
        flops=objective.flops_of_first(plan.model, len(windows)),
    )


def bare_products(plan: Recipe) -> tuple[Callable[[], object], float]:
    """The matrix products of a step's linear layers and head alone, forward and backward.

    Each writes into a buffer that is used again, so that a step cannot be faster than these; those
    of attention are left out.

    Returns:
        The work, and its floating-point operations.
    """
    model, n = plan.model, plan.pretrain.windows_per_step * plan.layout.window_tokens
    dtype = torch.bfloat16 if plan.pretrain.precision == "bfloat16" else torch.float32
    D, E, F = model.width, model.head_width, model.ffn_width
    block = [(D, (model.n_heads + 2 * model.n_kv_heads) * E), (model.n_heads * E, D)]
    block += [(D, 2 * F), (F, D)]
    layers = [_Linear(n, *shape, dtype) for shape in block * model.n_layers]
    rows = min(n, _SCORED_ROWS)
    heads = [_Linear(rows, D, plan.layout.vocab_size, dtype)] * (n // rows)

    def run() -> None:
        for layer in (*layers, *heads):
            layer.forward_and_backward()

    return run, sum(layer.flops for layer in (*layers, *heads))


class _Linear:
    """A matrix, its input and its output, with room for the gradients of all three."""

    def __init__(self, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self._x, self._dx = (torch.randn(rows, inputs).to(dtype) for _ in range(2))
        self._y = torch.randn(rows, outputs).to(dtype)
        self._weight, self._dweight = (torch.randn(outputs, inputs).to(dtype) for _ in range(2))
        self.flops = 6.0 * rows * inputs * outputs

    def forward_and_backward(self) -> None:
        torch.mm(self._x, self._weight.T, out=self._y)
        torch.mm(self._y, self._weight, out=self._dx)
        torch.mm(self._y.T, self._x, out=self._dweight)


def build_objective(plan: Recipe) -> Objective:
    """The objective of a recipe, with the end of text at id 0."""
    chunk = plan.pretrain.vocab_chunk
    if plan.diffusion is None:
        return NextToken(layout=plan.layout, eot_id=0, vocab_chunk=chunk)
    return Denoising(
        layout=plan.layout, diffusion=plan.diffusion, seed=plan.pretrain.seed, vocab_chunk=chunk
    )


def random_windows(plan: Recipe) -> np.ndarray:
    """The windows (W, T) of one step."""
    shape = (plan.pretrain.windows_per_step, plan.layout.window_tokens)
    return stream(1, "bench").integers(plan.layout.vocab_size, size=shape)


def _balanced_numbers(plan: Recipe) -> np.ndarray:
    """Window numbers whose coins for a first guess fall as their share says, in turn.

    The arithmetic of a step is counted for the mean over all windows, so a step of four windows
    must have the mean's share of guesses.
    """
    n = plan.pretrain.windows_per_step
    if plan.diffusion is None or plan.model.self_conditioning == "off":
        return np.arange(n)
    share, seed = plan.diffusion.self_conditioning_share, plan.pretrain.seed
    wanted = round(share * n)
    kept: dict[bool, list[int]] = {True: [], False: []}
    number = 0
    while len(kept[True]) < wanted or len(kept[False]) < n - wanted:
        kept[bool(stream(seed, "self_conditioning", number).random() < share)].append(number)
        number += 1
    return np.sort(np.array(kept[True][:wanted] + kept[False][: n - wanted]))


def memory_work(
    shape: str, kind: Kind, precision: Precision, **pretrain: Any
) -> Callable[[], object]:
    """For a fresh process: build a learner of :func:`plan_of` and let it take three steps."""
    plan = plan_of(shape, kind, precision=precision, **pretrain)

    def work() -> None:
        step = build_step(plan)
        for _ in range(3):
            step.run()

    return work


def seconds_in_fresh_process(shape: str, *, keeps_memory: bool, steps: int) -> float:
    """Median seconds of a step of the two streams in a process with one allocator or the other.

    Args:
        shape: a key of the table above.
        keeps_memory: whether freed memory stays in the process.
        steps: how many are timed after the first two.
    """
    words = [shape, json.dumps(keeps_memory), str(steps), str(torch.get_num_threads())]
    ran = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=True
    )
    return float(ran.stdout.splitlines()[-1])


@dataclass(frozen=True)
class _CleanIds:
    """What stands for the context where both streams go through in one pass."""

    ids: Tensor

    @property
    def start(self) -> int:
        return 0

    def rows(self, index: Tensor) -> "_CleanIds":
        return _CleanIds(self.ids[index])


def _pass_under_mask(model: Backbone) -> None:
    """Let a denoiser read noisy and clean tokens at once, under a boolean mask of 2T x 2T.

    As Arriola et al. 2025 (arXiv 2503.09573, section 4.2) train.
    """

    def denoise(
        noisy: Tensor,
        times: Tensor,
        *,
        context: _CleanIds,
        guess: Tensor | None,
        has_guess: Tensor | None,
    ) -> Tensor:
        T, L = noisy.shape[1], model.layout.canvas_tokens
        x = model.embedding(torch.cat((noisy, context.ids), dim=1))
        assert model.time_embedding is not None
        embedded = model.time_embedding(torch.cat((times, torch.zeros_like(times)), dim=1))
        x = x + embedded.repeat_interleave(L, dim=1)
        rotation = Rotation([range(T)], model.params, dtype=torch.float32, device=x.device)
        rotation.cos, rotation.sin = (table.repeat(2, 1) for table in (rotation.cos, rotation.sin))
        seen = _seen_by_both(T, L)
        for block in model.blocks:
            x = block(x, rotation, lambda q, k, v: masked_attention(q, k, v, seen))[0]
        hidden = model.final_norm(x[:, :T])
        if guess is None:
            return hidden
        assert model.self_conditioning is not None
        return hidden + model.self_conditioning(guess, has_guess)

    vars(model).update(encode=_CleanIds, encode_context=_CleanIds, denoise=denoise)


def _seen_by_both(T: int, L: int) -> Tensor:
    """(2T, 2T) bool: noisy queries and keys first, then the clean ones."""
    place = torch.arange(T)
    canvas = place // L
    own = canvas[:, None] == canvas[None, :]
    before = canvas[:, None] > canvas[None, :]
    causal = place[:, None] >= place[None, :]
    noisy = torch.cat((own, before), dim=1)
    clean = torch.cat((torch.zeros_like(causal), causal), dim=1)
    return torch.cat((noisy, clean))


def _main_of_fresh_process() -> None:
    shape, keeps_memory, steps, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if json.loads(keeps_memory):
        keep_freed_memory()
    step = build_step(plan_of(shape, "two_streams", precision="float32"))
    found = []
    for _ in range(int(steps) + 2):
        started = time.perf_counter()
        step.run()
        found.append(time.perf_counter() - started)
    print(np.median(found[2:]))


if __name__ == "__main__":
    _main_of_fresh_process()
