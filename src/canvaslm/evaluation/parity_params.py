"""How is the comparison of likelihoods set up?"""

from pydantic import Field

from canvaslm.params import Params


class EvalLossParityParams(Params):
    """How held-out text is scored by both models."""

    seed: int = Field(ge=0, description="seed of the noise in the bound")
    device: str = Field(description="auto, cpu or cuda")
    n_times: int = Field(ge=1, description="diffusion times of the bound; each costs one pass")
    max_windows: int | None = Field(
        ge=1, description="held-out windows that are scored, spread over the split; null: all"
    )
    batch_windows: int = Field(ge=1, description="windows scored at once; changes no value")
    vocab_chunk: int = Field(
        ge=1, description="vocabulary entries whose logits exist at one time; changes no value"
    )
    max_gap_percent: float = Field(
        description="verdict pass up to this gap of the bound over the autoregressive loss"
    )
