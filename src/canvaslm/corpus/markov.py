"""What is the least that a text can cost, where the law that made it is known?

Only a text that was drawn from a known chain has a known floor: the chain's entropy rate, and the
cost of the very documents under the chain. ``collect_documents`` measures both in nats per byte,
and whoever holds a loss against them reads them back here. Of any other text nobody knows a floor;
the figures are then called ``not_measured``.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from canvaslm.corpus.chain import Chain
from canvaslm.corpus.documents import SPLITS, read_texts
from canvaslm.corpus.written import parse_written, read_written
from canvaslm.reporting.progress import Track

_RATE = "entropy_rate_nats_per_byte"
_COST = "chain_nats_per_byte"
_NOT_MEASURED = "not_measured"
_FIX = "run stages/collect_documents.py again"


class _Figures(BaseModel):
    """What is read here of the report of collect_documents; there is more in it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    entropy_rate_nats_per_byte: Annotated[float, Field(ge=0)] | Literal["not_measured"]


def measure_floor(chain: Chain | None, documents: Path, *, track: Track) -> dict[str, Any]:
    """What the chain itself pays for its documents.

    Args:
        chain: the one that made the corpus; None when no chain did.
        documents: ``data/documents``.
        track: shows documents done.

    Returns:
        ``entropy_rate_nats_per_byte``, and ``chain_nats_per_byte`` of each split: −log of the
        probability of its texts over their bytes. Both are ``not_measured`` without a chain.

    Raises:
        InputError: the documents cannot be read, or the chain cannot have made them.
    """
    if chain is None:
        return {_RATE: _NOT_MEASURED, _COST: _NOT_MEASURED}
    costs = {}
    for split in SPLITS:
        nats, n_bytes = 0.0, 0
        for text in read_texts(documents / f"{split}.parquet", track=track):
            nats += chain.nats_of(text)
            n_bytes += len(text)  # of symbols that are one byte each
        costs[split] = nats / n_bytes
    return {_RATE: chain.entropy_rate_nats, _COST: costs}


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
