"""Between which bounds does the difference of two arms lie, over seeds and over documents?

Both arms were trained with the same seeds and scored on the same documents, so the difference is
taken seed by seed and document by document before anything is averaged: a hard document is hard
for both, and a lucky order of windows is lucky for both.
"""

import math
from dataclasses import dataclass

import numpy as np

ESTIMATOR = (
    "mean over seeds of the difference of two ratios of sums over documents; its variance is that "
    "of the seeds' differences about their mean, over their number, plus that of the linearised "
    "ratio over documents of the differences averaged over seeds (Cochran 1977, eq. 6.13); the "
    "quantile is Student's t, with degrees of freedom after Satterthwaite (1946). What seeds and "
    "documents do together is counted in both variances, so the interval is rather too wide."
)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A difference and the interval around it.

    Attributes:
        difference: arm minus baseline.
        low: the lower end; NaN where neither seeds nor documents tell a spread.
        high: the upper end.
        n_seeds: how many pairs of trainings it rests on.
    """

    difference: float
    low: float
    high: float
    n_seeds: int


def paired_interval(
    arm: np.ndarray, baseline: np.ndarray, tokens: np.ndarray, *, confidence: float
) -> Interval:
    """The interval of the difference of two arms.

    Args:
        arm: (S, G) amounts of each seed on each document.
        baseline: (S, G) of the same seeds on the same documents.
        tokens: (G,) of each document.
        confidence: share of such intervals that hold the truth.
    """
    differences = arm - baseline
    by_seed = differences.sum(axis=1) / tokens.sum()
    mean = float(by_seed.mean())
    parts = [*_variance_over_seeds(by_seed), *_variance_over_documents(differences, mean, tokens)]
    total = math.fsum(variance for variance, _ in parts)
    half = math.nan if not parts else 0.0
    if total > 0:
        freedom = total**2 / math.fsum(variance**2 / degrees for variance, degrees in parts)
        half = student_quantile(confidence, freedom) * math.sqrt(total)
    return Interval(difference=mean, low=mean - half, high=mean + half, n_seeds=len(by_seed))


def student_quantile(confidence: float, freedom: float) -> float:
    """The t within which Student's law with so many degrees of freedom has this share.

    With t = √ν·tan θ the density is proportional to cos^(ν−1) θ, which is smooth on a bounded
    interval, so that θ is found by halving and the integral by Gauss and Legendre.

    Args:
        confidence: the share on both sides of zero together.
        freedom: ν, at least 1; it need not be whole.
    """
    freedom = min(freedom, 1e4)  # beyond it the law is the normal one to four digits
    log_whole = (
        math.log(math.pi) / 2 + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    ) - math.log(2)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        points = angle * (_NODES + 1) / 2
        logs = (freedom - 1) * np.log(np.cos(points)) - log_whole
        share = angle / 2 * float(_WEIGHTS @ np.exp(logs))
        low, high = (angle, high) if share < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _variance_over_seeds(by_seed: np.ndarray) -> list[tuple[float, int]]:
    """Variance of the mean over seeds with its degrees of freedom; none with a single seed."""
    n = len(by_seed)
    return [(float(by_seed.var(ddof=1)) / n, n - 1)] if n > 1 else []


def _variance_over_documents(
    differences: np.ndarray, mean: float, tokens: np.ndarray
) -> list[tuple[float, int]]:
    """Variance of the ratio over documents with its degrees of freedom; none with a single one."""
    n = len(tokens)
    if n < 2:
        return []
    residuals = differences.mean(axis=0) - mean * tokens
    variance = n / (n - 1) * float(residuals @ residuals) / float(tokens.sum()) ** 2
    return [(variance, n - 1)]
