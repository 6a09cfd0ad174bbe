import math

import numpy as np
import pytest

from canvaslm.ablation.interval import paired_interval, student_quantile

TOKENS = np.array([100.0, 40.0, 250.0, 10.0, 80.0])


def interval(arm: np.ndarray, baseline: np.ndarray, tokens: np.ndarray = TOKENS):
    return paired_interval(arm, baseline, tokens, confidence=0.95)


@pytest.mark.parametrize(
    ("confidence", "freedom", "known"),
    [(0.95, 1, 12.70620), (0.95, 2, 4.302653), (0.95, 10, 2.228139), (0.95, 120, 1.979930),
     (0.99, 2, 9.924843), (0.5, 3, 0.7648923), (0.95, 1e9, 1.960)],
)  # fmt: skip
def test_quantiles_are_those_of_the_printed_tables(
    confidence: float, freedom: float, known: float
) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(known, rel=2e-4)


def test_on_one_document_it_is_the_paired_t_interval() -> None:
    arm, baseline = np.array([[3.0], [3.4], [3.1]]), np.array([[3.5], [3.6], [3.7]])
    found = interval(arm, baseline, np.ones(1))
    differences = (arm - baseline)[:, 0]
    half = 4.302653 * differences.std(ddof=1) / math.sqrt(3)
    assert found.difference == pytest.approx(differences.mean())
    ends = (found.difference - half, found.difference + half)
    assert (found.low, found.high) == pytest.approx(ends, rel=1e-4)


def test_with_one_seed_it_is_the_ratio_over_documents() -> None:
    amounts = np.array([[30.0, 8.0, 90.0, 4.0, 20.0]])
    found = interval(amounts, np.zeros((1, 5)))
    ratio = amounts.sum() / TOKENS.sum()
    residuals = amounts[0] - ratio * TOKENS
    error = math.sqrt(5 / 4 * (residuals**2).sum()) / TOKENS.sum()
    assert found.difference == pytest.approx(ratio)
    assert found.high - found.difference == pytest.approx(2.776445 * error, rel=1e-4)
    assert found.n_seeds == 1


def test_what_both_arms_share_changes_nothing() -> None:
    draws = np.random.default_rng(0)
    arm, baseline = draws.normal(3, 1, (2, 3, 5)) * TOKENS
    hard = draws.normal(0, 50, (3, 5)) * TOKENS
    plain, shifted = interval(arm, baseline), interval(arm + hard, baseline + hard)
    assert vars(shifted) == pytest.approx(vars(plain), rel=1e-9)


def test_with_one_seed_and_one_document_there_is_no_interval() -> None:
    found = interval(np.ones((1, 1)), np.zeros((1, 1)), np.ones(1))
    assert found.difference == 1.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize(("over_seeds", "over_documents"), [(1.0, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_it_holds_the_truth_as_often_as_it_says(over_seeds: float, over_documents: float) -> None:
    """Seeds and documents are drawn anew each time, each with an effect of its own."""
    draws, tokens, held, n = np.random.default_rng(1), np.full(12, 50.0), 0, 400
    for _ in range(n):
        effects = (
            0.3
            + over_seeds * draws.normal(size=(3, 1))
            + over_documents * draws.normal(size=(1, 12))
            + 0.1 * draws.normal(size=(3, 12))
        )
        found = interval(effects * tokens, np.zeros((3, 12)), tokens)
        held += found.low <= 0.3 <= found.high
    assert held / n > 0.95 - 3 * math.sqrt(0.95 * 0.05 / n)
