import math

import numpy as np
import pytest

from canvaslm.evaluation.document_ratios import DocumentSums, Ratio

RNG = np.random.default_rng(0)


def test_the_error_of_a_ratio_is_that_of_its_residuals_over_documents() -> None:
    amounts, sizes = np.array([3.0, 7, 9, 21]), np.array([3.0, 7, 3, 7])
    ratio = Ratio.of(amounts, sizes)
    assert ratio.value == 2
    expected = math.sqrt(4 / 3 * np.sum((amounts - 2 * sizes) ** 2)) / 20
    assert ratio.standard_error == pytest.approx(expected, rel=1e-14)


def test_a_difference_over_the_same_tokens_has_the_error_of_the_paired_documents() -> None:
    sizes = RNG.integers(1, 9, size=30).astype(float)
    hard = 5 * RNG.random(30) * sizes  # what makes a document hard for both
    first, second = hard + sizes + RNG.random(30), hard + RNG.random(30)
    one, other = Ratio.of(first, sizes), Ratio.of(second, sizes)
    paired, difference = Ratio.of(first - second, sizes), one - other
    assert difference.value == pytest.approx(paired.value, rel=1e-13)
    assert difference.standard_error == pytest.approx(paired.standard_error, rel=1e-10)
    assert difference.standard_error < 0.2 * one.standard_error


def test_the_printed_error_is_how_far_ratios_of_fresh_documents_lie_apart() -> None:
    """Also for a difference of two ratios of which one counts only some tokens."""
    values, errors = [], []
    for _ in range(2000):
        sizes = RNG.integers(1, 9, size=60).astype(float)
        some = RNG.binomial(sizes.astype(int), 0.25).astype(float)
        level = RNG.random(60)
        difference = Ratio.of(level * sizes, sizes) - Ratio.of(2 * level * some, some)
        values.append(difference.value)
        errors.append(difference.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.06)


@pytest.mark.parametrize(("amounts", "sizes"), [([2.0], [4.0]), ([0.0, 3.0], [0.0, 4.0])])
def test_one_document_has_no_error(amounts: list[float], sizes: list[float]) -> None:
    ratio = Ratio.of(np.array(amounts), np.array(sizes))
    assert ratio.value == amounts[-1] / sizes[-1]
    assert math.isnan(ratio.standard_error)


@pytest.mark.parametrize("amount", [math.nan, math.inf])
def test_a_sum_that_is_no_number_has_no_error(amount: float) -> None:
    ratio = Ratio.of(np.array([amount, 1.0, 2.0]), np.ones(3))
    assert not math.isfinite(ratio.value)
    assert math.isnan(ratio.standard_error)


def test_sums_are_by_document_whatever_its_number_and_the_shape() -> None:
    documents = np.array([[9, 9, -4], [7, 9, -4]])
    sums = DocumentSums(documents)
    values = np.array([[1.0, 2, 4], [8, 16, 32]])
    assert sums.n_documents == 3
    assert sums.of(values).tolist() == [36, 8, 19]  # -4, 7, 9
    assert sums.of(values, where=documents == 9).tolist() == [0, 0, 19]
    assert sums.counts(where=values > 3).tolist() == [2, 1, 1]
