"""Which samplers are held against each other for the quality of their samples, and on what?"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from canvaslm.evaluation.speedup_params import AcceptanceName, StoppingName
from canvaslm.params import Params

_Temperature = Annotated[float, Field(ge=0)]
_Pair = Annotated[list[_Temperature], Field(min_length=2, max_length=2)]


class EvalSamplesParams(Params):
    """Rules, numbers of steps and temperatures of the samplers, and what they continue."""

    seed: int = Field(ge=0, description="seed of the samples")
    device: str = Field(description="auto, cpu or cuda")
    n_prompts: int = Field(ge=1, description="held-out windows whose beginnings are continued")
    batch_rows: int = Field(ge=1, description="prompts that are decoded at once")
    prompt_tokens: int = Field(ge=0, description="tokens of a prompt")
    new_tokens: int = Field(ge=4, description="tokens asked for")
    acceptances: list[AcceptanceName] = Field(
        min_length=1, description="which positions keep their token after a step, rule by rule"
    )
    stoppings: list[StoppingName] = Field(
        min_length=1, description="when a canvas is done before its last step, rule by rule"
    )
    denoise_steps: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, description="the most steps that a canvas takes, number by number"
    )
    reference_steps: int = Field(
        ge=1,
        description="steps of the sample of each acceptance rule that its others are held against",
    )
    temperatures: list[_Pair] = Field(
        min_length=1,
        description="temperatures of a canvas's first and last step: the first pair for all rules "
        "and steps, each other for the first rules at the last number of steps",
    )
    entropy_bound: float = Field(ge=0, description="entropy_bound: joint entropy accepted, nats")
    quota_threshold: float = Field(
        ge=0, le=1, description="quota: confidence above which a token is accepted early"
    )
    stop_entropy: float = Field(ge=0, description="mean entropy of a canvas that stops, nats")
    stop_patience: int = Field(
        ge=0,
        description="mean_entropy: steps running (at least 1); stable_and_confident: extra repeats",
    )
    evidence: Literal["posterior", "cavity"] = Field(
        description="which noisy tokens are evidence: all (posterior), or those accepted (cavity)"
    )
    autoregressive_temperature: float = Field(ge=0, description="temperature of the twin's tokens")
    min_diversity_share: float = Field(
        ge=0,
        le=1,
        description="below this share of held-out text's diversity, nats were won by repetition",
    )
    max_excess_nats: float = Field(
        ge=0,
        description="above held-out text's nats per token by more than this, samples are noise",
    )
    vocab_chunk: int = Field(
        ge=1, description="vocabulary entries of one product of a step's head; changes no value"
    )

    @field_validator("acceptances", "stoppings", "denoise_steps", "temperatures")
    @classmethod
    def _are_different(cls, values: Sequence[object]) -> Sequence[object]:
        if any(value in values[:place] for place, value in enumerate(values)):
            raise ValueError("different entries")
        return values

    @model_validator(mode="after")
    def _mean_entropy_waits_for_a_step(self) -> Self:
        if "mean_entropy" in self.stoppings and self.stop_patience < 1:
            raise ValueError("stop_patience of at least 1 where mean_entropy is among stoppings")
        return self
