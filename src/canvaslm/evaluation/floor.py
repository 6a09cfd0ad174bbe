"""Does a model lose less than its text can cost?

Then it has seen what it was to predict, or its loss is counted wrongly: no model can beat the law
that made the text. Losses are in nats per token and floors in nats per byte, so both are brought to
bytes. A model that has learned nothing lies above any floor, hence the twin must also come near it.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from canvaslm.corpus.written import parse_written, read_written
from canvaslm.errors import InputError

_SCORED_SHARE = (
    0.95  # of the held-out bytes: the floor is theirs, and a window's tail is not scored
)
_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]
_Model = Literal["twin", "bound"]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class FloorCheck:
    """One model's loss on the held-out texts against what their own law pays for them.

    Attributes:
        model: ``twin`` or ``bound``.
        loss_nats_per_byte: all that the windows cost, over their bytes of text.
        standard_error_nats: of that loss, over documents.
        floor_nats_per_byte: what the chain pays for the same documents.
        fault: what is wrong with the loss; empty when nothing is.
    """

    model: _Model
    loss_nats_per_byte: float
    standard_error_nats: float
    floor_nats_per_byte: float
    fault: str

    def __str__(self) -> str:
        """The figures in one line."""
        above = self.loss_nats_per_byte - self.floor_nats_per_byte
        return (
            f"{self.model}: {self.loss_nats_per_byte:.4f} nats per byte, "
            f"{self.loss_nats_per_byte / self.floor_nats_per_byte:.4f} of the floor "
            f"{self.floor_nats_per_byte:.4f}, {above:+.4f} ± {self.standard_error_nats:.4f} from it"
        )


class _Part(BaseModel):
    """What is read here of a report; there is more in it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class _Val(_Part):
    val: _Positive


class _Bytes(_Part):
    val: _Count


class _Corpus(_Part):
    chain_nats_per_byte: _Val | Literal["not_measured"]
    text_bytes: _Bytes


class _Twin(_Part):
    nats_per_token: float
    standard_error_nats: _Positive


class _Bound(_Part):
    bound_nats_per_token: float
    standard_error_nats: _Positive


class _Parity(_Part):
    autoregressive: _Twin
    diffusion: _Bound
    n_text_bytes: _Count
    n_tokens: _Count


def check_floor(
    collect_metrics: Path, parity_metrics: Path, *, n_errors: float, max_twin_ratio: float
) -> tuple[FloorCheck, ...]:
    """Hold the twin's loss and the diffusion bound against the floor of the held-out texts.

    Args:
        collect_metrics: ``reports/collect_documents/metrics.json``.
        parity_metrics: ``reports/eval_loss_parity/metrics.json``.
        n_errors: standard errors that a loss may lie below the floor by chance.
        max_twin_ratio: how many times the floor the twin's loss may be.

    Raises:
        InputError: a report is not there or not whole, the law of the corpus is not known, or the
            losses are of other texts than the floor.
    """
    corpus = _read(collect_metrics, _Corpus)
    parity = _read(parity_metrics, _Parity)
    if corpus.chain_nats_per_byte == "not_measured":
        raise InputError(
            f"{collect_metrics}:chain_nats_per_byte",
            expected="a corpus whose law is known",
            got="not_measured",
            fix="run `make profile NAME=markov` and `make repro`",
        )
    _refuse_other_texts(parity_metrics, parity.n_text_bytes, corpus.text_bytes.val)
    twin, bound = parity.autoregressive, parity.diffusion
    scores: dict[_Model, tuple[float, float]] = {
        "twin": (twin.nats_per_token, twin.standard_error_nats),
        "bound": (bound.bound_nats_per_token, bound.standard_error_nats),
    }
    limits = {"twin": max_twin_ratio, "bound": math.inf}
    tokens_per_byte = parity.n_tokens / parity.n_text_bytes
    return tuple(
        _judge(
            model,
            loss=loss * tokens_per_byte,
            error=error * tokens_per_byte,
            floor=corpus.chain_nats_per_byte.val,
            n_errors=n_errors,
            max_ratio=limits[model],
        )
        for model, (loss, error) in scores.items()
    )


def _judge(
    model: _Model, *, loss: float, error: float, floor: float, n_errors: float, max_ratio: float
) -> FloorCheck:
    """Find the fault of a loss that no model can have, or that teaches nothing."""
    fault = ""
    if loss < floor - n_errors * error:
        fault = f"more than {n_errors:g} standard errors below the floor, which is a leak"
    elif loss > max_ratio * floor:
        fault = f"more than {max_ratio:g} times the floor, so that it has learned too little"
    return FloorCheck(
        model=model,
        loss_nats_per_byte=loss,
        standard_error_nats=error,
        floor_nats_per_byte=floor,
        fault=fault,
    )


def _refuse_other_texts(where: Path, scored: int, held_out: int) -> None:
    """Documents differ in what they cost, so the floor of all of them is not that of a part."""
    if not _SCORED_SHARE * held_out <= scored <= held_out:
        raise InputError(
            f"{where}:n_text_bytes",
            expected=f"the {held_out} bytes of held-out text, or nearly",
            got=str(scored),
            fix="set eval_loss_parity.max_windows: null and run the pipeline again",
        )


def _read(path: Path, model: type[M]) -> M:
    fix = "run the pipeline again"
    content = read_written(path, expected="a report", missing="no such file", fix=fix)
    return parse_written(content, path, model, expected="a report", broken="another one", fix=fix)
