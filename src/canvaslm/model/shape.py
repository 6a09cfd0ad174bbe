"""How large is the network, and how many parameters is that?"""

from typing import Literal, Self

from pydantic import Field, model_validator

from canvaslm.layout import Layout
from canvaslm.params import Params, Switch


class ModelParams(Params):
    """The section ``model``: everything that decides the shape of the weights."""

    width: int = Field(ge=1, description="width of the residual stream (D)")
    n_layers: int = Field(ge=1, description="transformer blocks")
    n_heads: int = Field(ge=1, description="query heads (H)")
    n_kv_heads: int = Field(ge=1, description="key-value heads (K); divides the query heads")
    head_width: int = Field(ge=2, multiple_of=2, description="width of a head (E)")
    ffn_width: int = Field(ge=1, description="inner width of the feed-forward")
    time_width: int = Field(
        ge=0, multiple_of=2, description="sinusoidal features of the time; 0: no time input"
    )
    bias: Switch = Field(description="whether linear layers have a bias")
    qk_norm: Switch = Field(description="whether queries and keys are normed per head")
    rope_base: float = Field(gt=1, description="base of the rotary frequencies")
    norm_eps: float = Field(gt=0, description="added to the mean square inside RMSNorm")
    self_conditioning: Literal["off", "input", "output"] = Field(
        description="where a first guess enters the second pass"
    )
    self_conditioning_form: Literal["linear", "gated"] = Field(
        description="what a guess passes on its way: one matrix, or a gated layer of width D"
    )
    likelihood_bias: Switch = Field(
        description="whether the known evidence of the noisy token is added to its logit, so that "
        "the network gives the cavity, or is left to the network to learn"
    )
    noisy_input: Literal["own", "previous"] = Field(
        description="which token the network reads where it predicts one: the noisy one itself, or "
        "the one before it, as a next-token model does"
    )
    token_shift: Switch = Field(
        description="whether a token brings along what a matrix makes of the token before it"
    )
    tilt: float = Field(
        ge=0,
        le=1000,
        description="how much earlier the left of a canvas is cleared than its right: a token "
        "passes from clean to noise in 1/(1 + tilt) of the canvas's time, the last one first; "
        "0: all of them at once",
    )
    tied: Switch = Field(description="whether the head is the token table")
    clean_mask: Literal["causal", "block"] = Field(
        description="what a clean token may see: itself and earlier tokens, or its whole canvas too"
    )
    vocab_multiple: int = Field(
        ge=1, description="rows of the token table are rounded up to a multiple of this"
    )

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads to be a multiple of n_kv_heads ({self.n_heads}, {self.n_kv_heads})"
            )
        return self

    @model_validator(mode="after")
    def _own_token_is_heard(self) -> Self:
        if self.noisy_input == "own":
            return self
        if not self.likelihood_bias:
            raise ValueError(
                "likelihood_bias true where noisy_input is previous: a position does not read its "
                "own noisy token, so what that token says has to be added"
            )
        if self.clean_mask == "block":
            raise ValueError(
                "clean_mask causal where noisy_input is previous: the noisy stream reads as a "
                "next-token model does, and so has the clean one to"
            )
        return self

    def twin(self) -> "ModelParams":
        """The same backbone as an autoregressive model: no time, no guess, a causal mask."""
        changes = {
            "time_width": 0,
            "self_conditioning": "off",
            "self_conditioning_form": "linear",
            "clean_mask": "causal",
            "likelihood_bias": False,
            "noisy_input": "own",
            "tilt": 0.0,
        }
        return self.model_copy(update=changes)

    def table_rows(self, vocab_size: int) -> int:
        """Rows of the token table: ``vocab_size`` rounded up to ``vocab_multiple``."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


def count_parameters(params: ModelParams, layout: Layout) -> int:
    """Number of parameters in closed form, a tied head counted once."""
    D = params.width
    total = params.table_rows(layout.vocab_size) * D + D  # token table, final norm
    total += params.n_layers * _block_parameters(params)
    if params.time_width:
        total += _linear(params.time_width, D, params) + _linear(D, D, params)
    if not params.tied:
        total += layout.vocab_size * D
    if params.token_shift:
        total += D * D
    if params.noisy_input == "previous":
        total += D  # what stands before the first token
    return total + guess_layers(params) * _linear(D, D, params)


def guess_layers(params: ModelParams) -> int:
    """Linear layers, each D×D, that a guess passes."""
    if params.self_conditioning == "off":
        return 0
    return 3 if params.self_conditioning_form == "gated" else 1


def _block_parameters(params: ModelParams) -> int:
    D, E = params.width, params.head_width
    attention = _linear(D, params.n_heads * E, params) + _linear(params.n_heads * E, D, params)
    attention += 2 * _linear(D, params.n_kv_heads * E, params)
    if params.qk_norm:
        attention += 2 * E
    feed_forward = 2 * _linear(D, params.ffn_width, params) + _linear(params.ffn_width, D, params)
    return 2 * D + attention + feed_forward


def _linear(inputs: int, outputs: int, params: ModelParams) -> int:
    return inputs * outputs + (outputs if params.bias else 0)
