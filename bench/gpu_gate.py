"""What is a gate on a GPU given, and what does it find?

A gate is a function of a :class:`Place` that returns what it :class:`Found`. All of them run at the
production shape on a GPU, and at the shape of profile ``ci`` in the tiny form, where every line but
the capture of a graph also runs on a CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness import ROOT

from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.layout import Layout
from canvaslm.measure import Timing, interleaved_seconds
from canvaslm.model.shape import ModelParams
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.params import compose, parse_section, read_yaml
from canvaslm.randomness import stream
from canvaslm.reporting.benches import Scalar
from canvaslm.training.learner import Learner, Objective
from canvaslm.training.plan import ObjectiveKind, PretrainParams, Recipe, recipe

CLOSE = 2e-2  # relative, of gradients and losses in bfloat16
EOT = 0  # the end-of-text id of a text that has no end


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a gate works, and at which sizes."""

    device: torch.device
    tiny: bool
    rounds: int

    def plan(
        self,
        objective: ObjectiveKind = "diffusion",
        *,
        layout: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        **pretrain: Any,
    ) -> Recipe:
        """What is trained: the production shape, or the tiny one, with some values changed."""
        name = "ci" if self.tiny else "gpu_343m"
        file = ROOT / "configs" / f"{name}.yaml"
        values = compose(read_yaml(ROOT / "configs/base.yaml"), read_yaml(file), where=str(file))
        changed = {"layout": layout, "model": model, "pretrain": pretrain}
        for section, changes in changed.items():
            values[section] = values[section] | dict(changes or {})
        return recipe(
            objective,
            layout=parse_section(values["layout"], Layout, where="layout"),
            model=parse_section(values["model"], ModelParams, where="model"),
            diffusion=parse_section(values["diffusion"], DiffusionParams, where="diffusion"),
            pretrain=parse_section(values["pretrain"], PretrainParams, where="pretrain"),
        )

    def choose(self, full: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else full

    def time(
        self, runs: Mapping[str, Any], *, rounds: int | None = None, warmup_rounds: int = 2
    ) -> dict[str, Timing]:
        """Time pieces of work in turn; the first calls, of which one compiles, are not kept."""
        rounds, warmup_rounds = (1, 1) if self.tiny else (rounds or self.rounds, warmup_rounds)
        return interleaved_seconds(
            runs, device=self.device, rounds=rounds, warmup_rounds=warmup_rounds
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a gate found.

    Attributes:
        rows: figures, flat, with units in the keys.
        ratios: by the end of their ids, which begin with ``gpu/NAME/``; None with a reason.
        not_measured: why, by a part of an id or by a peer.
        fallbacks: what fell back.
        broken: what is not as it must be, whatever the speed; empty where all is well.
    """

    rows: list[dict[str, Scalar]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def objective_of(plan: Recipe) -> Objective:
    """The objective of a plan."""
    chunk = plan.pretrain.vocab_chunk
    if plan.diffusion is None:
        return NextToken(layout=plan.layout, eot_id=EOT, vocab_chunk=chunk)
    return Denoising(
        layout=plan.layout, diffusion=plan.diffusion, seed=plan.pretrain.seed, vocab_chunk=chunk
    )


def learner_of(plan: Recipe, place: Place) -> Learner:
    """A learner at the start of a run."""
    return Learner(plan, objective_of(plan), place.device)


def windows_of(plan: Recipe, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random windows of one optimiser step, and their numbers in the run."""
    n_windows = plan.pretrain.windows_per_step
    shape = (n_windows, plan.layout.window_tokens)
    windows = stream(1, "bench", step).integers(plan.layout.vocab_size, size=shape)
    return windows, np.arange(step * n_windows, (step + 1) * n_windows)


def told(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
