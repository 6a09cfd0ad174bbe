"""Which decoders are compared?

Two fixed schedules of 16 and 32 steps, one that stops by itself within 32, and the twin, token by
token. Where the denoiser's clean stream was trained to predict the next token, two more decode with
its weights alone: one whose drafted canvases are verified, and the same law token by token.
"""

from collections.abc import Sequence
from typing import Protocol

from canvaslm.evaluation.speedup_params import EvalSpeedupParams
from canvaslm.model.backbone import Backbone
from canvaslm.sampling.acceptance import EntropyBound
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.drafting import Drafter
from canvaslm.sampling.evidence import Cavity, Evidence, Posterior
from canvaslm.sampling.request import Generated
from canvaslm.sampling.sampler import CanvasSampler
from canvaslm.sampling.stopping import Never, StableAndConfident, Stopping
from canvaslm.sampling.verified import VerifiedSampler

TOKEN_BY_TOKEN = ("autoregressive", "companion")  # rows that denoise no canvas
EVIDENCES: dict[str, Evidence] = {"posterior": Posterior(), "cavity": Cavity()}


class Decoder(Protocol):
    """Whatever continues prompts."""

    @property
    def model(self) -> Backbone:
        """The network that it runs."""
        ...

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int | None, seeds: Sequence[int]
    ) -> list[Generated]:
        """Answer each prompt."""
        ...


def build_decoders(
    denoiser: Backbone,
    twin: Backbone,
    params: EvalSpeedupParams,
    *,
    eot_id: int | None,
    bos_id: int,
) -> dict[str, Decoder]:
    """Set up the decoders that any two models have, by the name of their row.

    Args:
        denoiser: the diffusion model.
        twin: the autoregressive model.
        params: rules and temperatures.
        eot_id: the id that ends a text; ``None`` where a text has no end.
        bos_id: the id before every window of the twin.
    """

    def canvases(steps: int, stopping: Stopping) -> CanvasSampler:
        return CanvasSampler(
            model=denoiser,
            acceptance=EntropyBound(bound=params.entropy_bound),
            stopping=stopping,
            denoise_steps=steps,
            start_temperature=params.start_temperature,
            end_temperature=params.end_temperature,
            eot_id=eot_id,
            vocab_chunk=params.vocab_chunk,
            evidence=EVIDENCES[params.evidence],
        )

    sure = StableAndConfident(threshold=params.stop_entropy, patience=params.stop_patience)
    return {
        "fixed_16": canvases(16, Never()),
        "fixed_32": canvases(32, Never()),
        "adaptive_32": canvases(32, sure),
        "autoregressive": AutoregressiveSampler(
            model=twin,
            temperature=params.autoregressive_temperature,
            bos_id=bos_id,
            eot_id=eot_id,
        ),
    }


def build_companion_decoders(
    denoiser: Backbone, params: EvalSpeedupParams, *, eot_id: int | None, bos_id: int
) -> dict[str, Decoder]:
    """Set up the decoders that follow the law of a denoiser's companion, by the name of their row.

    Args:
        denoiser: a diffusion model whose clean stream predicts the next token.
        params: rules and temperatures; the law's is that of the twin.
        eot_id: the id that ends a text; ``None`` where a text has no end.
        bos_id: what an empty prompt is read as.
    """
    drafter = Drafter(
        model=denoiser,
        acceptance=EntropyBound(bound=params.entropy_bound),
        evidence=EVIDENCES[params.evidence],
        steps=params.draft_steps,
        temperature=params.draft_temperature,
        vocab_chunk=params.vocab_chunk,
    )
    temperature = params.autoregressive_temperature
    return {
        "verified": VerifiedSampler(
            drafter=drafter, temperature=temperature, bos_id=bos_id, eot_id=eot_id
        ),
        "companion": AutoregressiveSampler(
            model=denoiser,
            temperature=temperature,
            bos_id=bos_id,
            eot_id=eot_id,
            bos="if_empty",
        ),
    }
