"""What is the least that a text can cost, where the law that made it is known?

Only a text that was drawn from a known chain has a known floor: the chain's entropy rate, and the
cost of the very documents under the chain. ``collect_documents`` measures both in nats per byte,
and whoever holds a loss against them reads them back here. Of any other text nobody knows a floor;
the figures are then called ``not_measured``.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from canvaslm.corpus.written import parse_written, read_written

_RATE = "entropy_rate_nats_per_byte"
_FIX = "run stages/collect_documents.py again"


class _Figures(BaseModel):
    """What is read here of the report of collect_documents; there is more in it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    entropy_rate_nats_per_byte: Annotated[float, Field(ge=0)] | Literal["not_measured"]


def read_entropy_rate(collect_metrics: Path) -> float | None:
    """The exact entropy rate of the corpus, in nats per byte of text; None where none is known.

    Args:
        collect_metrics: ``reports/collect_documents/metrics.json``.

    Raises:
        InputError: there is no such report, or it does not say.
    """
    expected = f"a report with {_RATE}"
    content = read_written(
        collect_metrics, expected=expected, missing="no such file", fix="run the pipeline"
    )
    figures = parse_written(
        content, collect_metrics, _Figures, expected=expected, broken="another one", fix=_FIX
    )
    rate = figures.entropy_rate_nats_per_byte
    return None if rate == "not_measured" else rate
