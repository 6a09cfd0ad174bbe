"""What do the costs of single tokens come to: scores, the gap to the twin and its shares, curves?

The gap of a bound is what it lies above the twin's loss on the same tokens. Its shares are
differences of measured means and add up to it by construction; ``docs/bound.md`` says what each of
them is and is not. All errors are over documents.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from canvaslm.diffusion.levels import GridLevels
from canvaslm.evaluation.document_ratios import DocumentSums, Ratio
from canvaslm.evaluation.token_costs import BoundCosts, TokenCosts


@dataclass(frozen=True, kw_only=True)
class BoundScore:
    """One bound on the held-out tokens.

    Attributes:
        costs: whose it is.
        per_token: nats per token.
        gap: nats per token above the twin.
        over_twin: the bound over the twin's loss, less 1.
        over_off: nats per token above the bound without self-conditioning, of the same draws.
        bits_per_byte: all bits over all bytes of text; NaN where there are none.
        diagnostic: mean cross-entropy over levels, no likelihood.
    """

    costs: BoundCosts
    per_token: Ratio
    gap: Ratio
    over_twin: Ratio
    over_off: Ratio
    bits_per_byte: float
    diagnostic: float


@dataclass(frozen=True, kw_only=True)
class GapShares:
    """Where the gap of one bound lies, in nats per token.

    Attributes:
        gap: the bound less the twin's loss.
        discretisation: the bound less that in continuous time.
        context: at the first token of a canvas of pure noise, the cross-entropy less the twin's.
        model: the rest.
    """

    gap: Ratio
    discretisation: Ratio
    context: Ratio
    model: Ratio


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The tokens of one place: what a bound and the twin cost there, in nats per token."""

    place: int
    n_tokens: int
    bound: Ratio
    twin: Ratio


def twin_score(costs: TokenCosts) -> Ratio:
    """The twin's nats per token."""
    sums = DocumentSums(costs.documents)
    return Ratio.of(sums.of(costs.twin), sums.counts())


def bound_scores(costs: TokenCosts) -> tuple[BoundScore, ...]:
    """One score for each sweep and way of self-conditioning, in the order of ``costs.bounds``."""
    sums = DocumentSums(costs.documents)
    tokens, twin = sums.counts(), sums.of(costs.twin)
    off = {id(x.levels): sums.of(x.nats) for x in costs.bounds if x.conditioning == "off"}

    def score(bound: BoundCosts) -> BoundScore:
        nats = sums.of(bound.nats)
        return BoundScore(
            costs=bound,
            per_token=Ratio.of(nats, tokens),
            gap=Ratio.of(nats - twin, tokens),
            over_twin=Ratio.of(nats - twin, twin),
            over_off=Ratio.of(nats - off[id(bound.levels)], tokens),
            bits_per_byte=bits_per_byte(bound.nats, costs.text_bytes),
            diagnostic=float(bound.by_level[:, 1].mean()),
        )

    return tuple(score(bound) for bound in costs.bounds)


def bits_per_byte(nats: np.ndarray, text_bytes: np.ndarray) -> float:
    """All bits over all bytes of text."""
    n_bytes = int(text_bytes.sum())
    return float(nats.sum()) / math.log(2) / n_bytes if n_bytes else math.nan


def gap_shares(costs: TokenCosts) -> dict[str, GapShares]:
    """The shares of the gap of each bound on a grid, without self-conditioning, by its sweep."""
    sums = DocumentSums(costs.documents)
    tokens = sums.counts()
    is_first = costs.positions == 0
    off = [bound for bound in costs.bounds if bound.conditioning == "off"]
    (continuous,) = (x for x in off if not isinstance(x.levels, GridLevels))
    found = {}
    for bound in off:
        if not isinstance(bound.levels, GridLevels):
            continue
        gap = Ratio.of(sums.of(bound.nats - costs.twin), tokens)
        discretisation = Ratio.of(sums.of(bound.nats - continuous.nats), tokens)
        worse = sums.of(bound.from_noise - costs.twin, where=is_first)
        context = Ratio.of(worse, sums.counts(where=is_first))
        found[bound.levels.name] = GapShares(
            gap=gap,
            discretisation=discretisation,
            context=context,
            model=gap - discretisation - context,
        )
    return found


def curve(costs: TokenCosts, bound: BoundCosts, places: np.ndarray) -> Iterator[CurvePoint]:
    """What a bound and the twin cost at each place.

    Args:
        costs: all tokens.
        bound: one of its bounds.
        places: (W, T) the place of each token, such as ``costs.positions``.
    """
    sums = DocumentSums(costs.documents)
    for place in np.unique(places).tolist():
        here = places == place
        tokens = sums.counts(where=here)
        yield CurvePoint(
            place=place,
            n_tokens=int(here.sum()),
            bound=Ratio.of(sums.of(bound.nats, where=here), tokens),
            twin=Ratio.of(sums.of(costs.twin, where=here), tokens),
        )
