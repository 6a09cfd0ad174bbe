"""Samplers under every rule, and logits that leave them no doubt."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canvaslm.sampling.acceptance import Acceptance, EntropyBound, Quota, UnchangedOrStronger
from canvaslm.sampling.evidence import Cavity, Evidence, Posterior
from canvaslm.sampling.sampler import CanvasSampler, CanvasStep
from canvaslm.sampling.stopping import Never, Stopping

RULES: dict[str, tuple[Acceptance, float]] = {
    "unchanged_or_stronger": (UnchangedOrStronger(), 0.0),
    "entropy_bound": (EntropyBound(bound=0.3), 0.3),
    "quota": (Quota(threshold=0.9), 0.9),
}
EVIDENCES: dict[str, Evidence] = {"posterior": Posterior(), "cavity": Cavity()}
EOT = 36


def make_sampler(
    model: Any,
    *,
    acceptance: Acceptance | None = None,
    stopping: Stopping | None = None,
    denoise_steps: int = 4,
    temperatures: tuple[float, float] = (0.8, 0.4),
    eot_id: int | None = None,
    evidence: str | None = None,
    on_step: Callable[[CanvasStep], None] | None = None,
) -> CanvasSampler:
    extra: dict[str, Any] = {} if on_step is None else {"on_step": on_step}
    if evidence is not None:
        extra["evidence"] = EVIDENCES[evidence]
    return CanvasSampler(
        model=model,
        acceptance=acceptance or Quota(threshold=1.0),
        stopping=stopping or Never(),
        denoise_steps=denoise_steps,
        start_temperature=temperatures[0],
        end_temperature=temperatures[1],
        eot_id=eot_id,
        vocab_chunk=10,
        **extra,
    )


def sure_of(ids: Sequence[int], vocab_size: int = 37, by: float = 60.0) -> Tensor:
    """Logits (L, V) that leave no doubt."""
    logits = torch.zeros(len(ids), vocab_size)
    logits[torch.arange(len(ids)), torch.tensor(ids)] = by
    return logits
