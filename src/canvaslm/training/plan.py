"""What will a pretraining run do, step by step, before anything runs?

Nothing here imports torch, so that every stage can check the whole params file quickly.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams
from canvaslm.params import Params, Switch

ObjectiveKind = Literal["diffusion", "autoregressive"]


class PretrainParams(Params):
    """How a model is trained: length, batch, learning rate, arithmetic, and when to write."""

    seed: int = Field(ge=0, description="names every random draw of the run")
    steps: int = Field(ge=1, description="optimiser steps")
    windows_per_step: int = Field(ge=1, description="windows in one optimiser step")
    micro_batch_windows: int = Field(
        ge=1, description="windows in one forward and backward pass; costs memory, buys speed"
    )
    optimizer: Literal["adamw", "muon"] = Field(
        description="AdamW for all, or Muon for the matrices of the blocks and AdamW for the rest"
    )
    learning_rate: float = Field(gt=0, description="the highest learning rate")
    muon_learning_rate: float = Field(
        gt=0, description="the highest learning rate of Muon's matrices; falls as the other does"
    )
    final_learning_rate_share: float = Field(
        ge=0, le=1, description="the last step's learning rate, as a share of the highest"
    )
    schedule: Literal["cosine", "warmup_stable_decay"] = Field(
        description="shape of the learning rate after the warm-up"
    )
    warmup_steps: int = Field(ge=0, description="optimiser steps of linear rise")
    decay_steps: int = Field(
        ge=0, description="optimiser steps of linear fall (warmup_stable_decay only)"
    )
    weight_decay: float = Field(ge=0, description="decoupled decay of weight matrices")
    beta1: float = Field(ge=0, lt=1, description="AdamW: memory of the gradient's mean")
    beta2: float = Field(ge=0, lt=1, description="AdamW: memory of the gradient's square")
    adam_eps: float = Field(gt=0, description="AdamW: added to the root of the second moment")
    muon_momentum: float = Field(ge=0, lt=1, description="Muon: memory of the gradient's mean")
    ema_decay: float = Field(
        ge=0,
        lt=1,
        description="memory of the average of the weights that is evaluated; 0: no average",
    )
    max_gradient_norm: float = Field(gt=0, description="gradients are scaled down to this norm")
    max_consecutive_bad_steps: int = Field(
        ge=1, description="after so many bad steps in a row the run goes back to a checkpoint"
    )
    max_rollbacks: int = Field(
        ge=0, description="how often a run may go back; one more ends it with exit 1"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(description="where to train")
    precision: Literal["float32", "bfloat16"] = Field(
        description="arithmetic of the passes; weights and moments stay float32"
    )
    compile: Switch = Field(description="let torch.compile fuse the blocks")
    gradient_checkpointing: Switch = Field(
        description="recompute each block in the backward pass: less memory, a third more time"
    )
    vocab_chunk: int = Field(ge=1, description="vocabulary rows per chunk of the loss")
    log_every: int = Field(ge=1, description="optimiser steps per row of loss.csv")
    save_every: int = Field(ge=1, description="optimiser steps between checkpoints")
    trace_steps: int = Field(
        ge=0,
        le=100,
        description="good steps of which samples are kept in memory, to be shown when one is bad",
    )
    keep_last: int | None = Field(
        ge=1, description="checkpoints that stay in the run's own folder; null keeps all"
    )
    keep_best: int = Field(
        ge=0, description="checkpoints that stay besides, those with the lowest training loss"
    )
    loader_workers: int = Field(
        ge=0, description="threads that read the windows of the coming steps; 0 reads in line"
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> "PretrainParams":
        if self.micro_batch_windows > self.windows_per_step:
            raise ValueError(
                f"micro_batch_windows ({self.micro_batch_windows}) at most "
                f"windows_per_step ({self.windows_per_step})"
            )
        decay = self.decay_steps if self.schedule == "warmup_stable_decay" else 0
        if self.warmup_steps + decay > self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({decay}) "
                f"to fit in steps ({self.steps})"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is trained; built by :func:`recipe`."""

    objective: ObjectiveKind
    layout: Layout
    model: ModelParams
    diffusion: DiffusionParams | None  # None for the autoregressive twin
    pretrain: PretrainParams

    @property
    def first_phase_windows(self) -> int:
        """Windows of the run that belong to its first phase: whole optimiser steps of them."""
        if self.diffusion is None:
            return 0
        steps = round(self.diffusion.first_phase_share * self.pretrain.steps)
        return steps * self.pretrain.windows_per_step


def recipe(
    objective: ObjectiveKind,
    *,
    layout: Layout,
    model: ModelParams,
    diffusion: DiffusionParams,
    pretrain: PretrainParams,
) -> Recipe:
    """Choose what one objective trains.

    The autoregressive twin is the same backbone with one token per canvas, no time and no
    self-conditioning: how a window is cut into canvases, and the corruption, do not reach it, so a
    change of either gives the same recipe and retrains nothing.
    """
    if objective == "diffusion":
        return Recipe(
            objective=objective, layout=layout, model=model, diffusion=diffusion, pretrain=pretrain
        )
    one_token = Layout(
        canvas_tokens=1, canvases_per_window=layout.window_tokens, vocab_size=layout.vocab_size
    )
    return Recipe(
        objective=objective,
        layout=one_token,
        model=model.twin(),
        diffusion=None,
        pretrain=pretrain,
    )


def learning_rate(step: int, params: PretrainParams) -> float:
    """The learning rate of optimiser step ``step``, counted from 0: a function of nothing else.

    The rise reaches the highest rate on step ``warmup_steps - 1``; the fall reaches the final
    share on the last step. ``cosine`` falls all the way from the warm-up to the end (Loshchilov
    and Hutter 2017, arXiv 1608.03983, eq. 5, without restarts); ``warmup_stable_decay`` stays
    high and falls linearly over the last ``decay_steps`` (Hu et al. 2024, arXiv 2404.06395).
    """
    assert 0 <= step < params.steps, f"step {step} of {params.steps}"
    if step < params.warmup_steps:
        return params.learning_rate * (step + 1) / params.warmup_steps
    return params.learning_rate * _FALLS[params.schedule](step, params)


def _cosine(step: int, params: PretrainParams) -> float:
    """Share of the highest rate under the cosine."""
    done = (step + 1 - params.warmup_steps) / (params.steps - params.warmup_steps)
    final = params.final_learning_rate_share
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def _stable_then_linear(step: int, params: PretrainParams) -> float:
    """Share of the highest rate under a plateau and a linear fall."""
    falling = step + 1 - (params.steps - params.decay_steps)
    if falling <= 0:
        return 1.0
    return 1 - (1 - params.final_learning_rate_share) * falling / params.decay_steps


_FALLS = {"cosine": _cosine, "warmup_stable_decay": _stable_then_linear}
