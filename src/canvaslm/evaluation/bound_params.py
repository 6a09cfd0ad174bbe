"""How thoroughly is the likelihood bound taken?"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from canvaslm.params import Params


class EvalBoundParams(Params):
    """At which levels of noise, and on how much held-out text, the bound is taken."""

    seed: int = Field(ge=0, description="seed of the noise in the bounds")
    device: str = Field(description="auto, cpu or cuda")
    n_times: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, description="numbers of diffusion times (N), a bound for each; N passes each"
    )
    continuous_passes: int = Field(
        ge=1,
        description="passes of the bound in continuous time, a random time in each K-th of it; "
        "under a tilt a token moves in 1/(1 + tilt) of the time, so take twice 1 + tilt or more",
    )
    told_times: Literal["trained", "exact"] = Field(
        description="what the network is told of a time: the next one that it was trained at "
        "(trained), or the time itself (exact)"
    )
    max_windows: int | None = Field(
        ge=1, description="held-out windows that are scored, spread over the split; null: all"
    )
    batch_windows: int = Field(ge=1, description="windows scored at once; changes no value")
    vocab_chunk: int = Field(
        ge=1, description="vocabulary entries whose logits exist at one time; changes no value"
    )
    proof_windows: int = Field(
        ge=0,
        description="windows on which the twin's predictions, taken as the cavity of canvases of "
        "one token, must give the twin's loss; 0: no proof",
    )

    @field_validator("n_times")
    @classmethod
    def _are_different(cls, n_times: list[int]) -> list[int]:
        if len(set(n_times)) < len(n_times):
            raise ValueError("different numbers")
        return n_times
