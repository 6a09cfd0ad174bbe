"""How is decoding set up: for the comparison of speeds, and for a prompt given by hand?"""

from typing import Literal, Self

from pydantic import Field, model_validator

from canvaslm.params import Params

AcceptanceName = Literal["unchanged_or_stronger", "entropy_bound", "quota"]
StoppingName = Literal["never", "mean_entropy", "stable_and_confident"]
_DRAFT_STEPS = "forwards that draft a canvas"
_DRAFT_TEMPERATURE = "temperature of drafted tokens; 0: the most probable ones"
_EVIDENCE = "which noisy tokens are evidence: all (posterior), or those accepted (cavity)"


class EvalSpeedupParams(Params):
    """How decoders are compared: on which prompts, how long, how often, by which rules."""

    seed: int = Field(ge=0, description="seed of the samples")
    device: str = Field(description="auto, cpu or cuda")
    n_prompts: int = Field(ge=1, description="held-out windows whose beginnings are continued")
    batch_rows: int = Field(ge=1, description="prompts that are decoded at once")
    prompt_tokens: int = Field(ge=0, description="tokens of a prompt")
    new_tokens: int = Field(ge=2, description="tokens asked for")
    short_new_tokens: int = Field(
        ge=2, description="tokens asked for in a second, short comparison"
    )
    rounds: int = Field(ge=1, description="timed rounds; each runs every decoder once")
    warmup_rounds: int = Field(
        ge=1, description="rounds before them that are not timed; forwards are counted in the first"
    )
    entropy_bound: float = Field(ge=0, description="joint entropy accepted in a step, nats")
    stop_entropy: float = Field(ge=0, description="adaptive row: mean entropy that stops, nats")
    stop_patience: int = Field(ge=0, description="adaptive row: extra repeats before it stops")
    evidence: Literal["posterior", "cavity"] = Field(description=_EVIDENCE)
    start_temperature: float = Field(ge=0, description="temperature of a canvas's first step")
    end_temperature: float = Field(ge=0, description="temperature of a canvas's last step")
    autoregressive_temperature: float = Field(
        ge=0, description="temperature of the twin's tokens, and of the law that verifies drafts"
    )
    draft_steps: int = Field(ge=1, description="verified row: " + _DRAFT_STEPS)
    draft_temperature: float = Field(ge=0, description="verified row: " + _DRAFT_TEMPERATURE)
    min_diversity_share: float = Field(
        ge=0,
        le=1,
        description="below this share of held-out text's entropy or distinct-n, samples repeat",
    )
    max_excess_nats: float = Field(
        ge=0,
        description="above held-out text's nats per token by more than this, samples are noise",
    )
    vocab_chunk: int = Field(
        ge=1, description="vocabulary entries of one product of a step's head; changes no value"
    )


class GenerateParams(Params):
    """How one prompt is continued by hand."""

    seed: int = Field(ge=0, description="seed of the sample")
    device: str = Field(description="auto, cpu or cuda")
    mode: Literal["canvas", "verified"] = Field(
        description="whether canvases are the text, or drafts that the clean stream's next-token "
        "law verifies, which takes a checkpoint that was trained for it"
    )
    acceptance: AcceptanceName = Field(description="which positions keep their token after a step")
    quota_threshold: float = Field(
        ge=0, le=1, description="quota: confidence above which a token is accepted early"
    )
    entropy_bound: float = Field(ge=0, description="entropy_bound: joint entropy accepted, nats")
    stopping: StoppingName = Field(description="when a canvas is done before its last step")
    stop_entropy: float = Field(ge=0, description="mean entropy of a canvas that stops, nats")
    stop_patience: int = Field(
        ge=0,
        description="mean_entropy: steps running (at least 1); stable_and_confident: extra repeats",
    )
    denoise_steps: int = Field(ge=1, description="the most steps that a canvas takes")
    evidence: Literal["posterior", "cavity"] = Field(description=_EVIDENCE)
    start_temperature: float = Field(
        ge=0,
        description="temperature of a canvas's first step, of the twin's tokens, and of the law "
        "that verifies drafts",
    )
    end_temperature: float = Field(ge=0, description="temperature of a canvas's last step")
    draft_steps: int = Field(ge=1, description="verified: " + _DRAFT_STEPS)
    draft_temperature: float = Field(ge=0, description="verified: " + _DRAFT_TEMPERATURE)
    vocab_chunk: int = Field(
        ge=1, description="vocabulary entries of one product of a step's head; changes no value"
    )

    @model_validator(mode="after")
    def _mean_entropy_waits_for_a_step(self) -> Self:
        if self.stopping == "mean_entropy" and self.stop_patience < 1:
            raise ValueError("stop_patience of at least 1 where stopping is mean_entropy")
        return self
