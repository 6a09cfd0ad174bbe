"""How sure is a ratio of two sums over tokens, when only documents are independent?

Tokens of a document are not independent, documents are taken to be. The error of a ratio is that of
the linearised ratio estimator (Cochran 1977, Sampling Techniques, eq. 6.13, without the finite
population correction): each document moves the ratio by its own residual. Residuals of two ratios
over the same documents subtract document by document, so that the error of a difference knows that
a hard document is hard for both.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np


class DocumentSums:
    """Adds up values of tokens by document.

    Args:
        documents: any shape, int64, the document of each token.
    """

    def __init__(self, documents: np.ndarray) -> None:
        keys, inverse = np.unique(documents, return_inverse=True)
        self.n_documents = len(keys)
        self._inverse = inverse.reshape(documents.shape)

    def of(self, values: np.ndarray, *, where: np.ndarray | None = None) -> np.ndarray:
        """(G,) the sum of each document over the tokens that are ``where`` True, or all."""
        chosen = np.ones(values.shape, dtype=bool) if where is None else where
        return np.bincount(self._inverse[chosen], values[chosen], minlength=self.n_documents)

    def counts(self, *, where: np.ndarray | None = None) -> np.ndarray:
        """(G,) the tokens of each document, as float64."""
        return self.of(np.ones(self._inverse.shape), where=where)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two sums over documents, and what each document adds to its error.

    Attributes:
        value: the ratio; NaN where its lower sum is 0.
        residuals: (G,) how far each document moves the value.
        is_counted: (G,) the documents that have a part in it.
    """

    value: float
    residuals: np.ndarray
    is_counted: np.ndarray

    @classmethod
    def of(cls, amounts: np.ndarray, sizes: np.ndarray) -> Self:
        """The sum of amounts (G,) over the sum of sizes (G,)."""
        total = float(sizes.sum())
        value = float(amounts.sum()) / total if total else math.nan
        with np.errstate(invalid="ignore", divide="ignore"):
            residuals = (amounts - value * sizes) / total
        return cls(value=value, residuals=residuals, is_counted=(sizes != 0) | (amounts != 0))

    def __sub__(self, other: Self) -> Self:
        return type(self)(
            value=self.value - other.value,
            residuals=self.residuals - other.residuals,
            is_counted=self.is_counted | other.is_counted,
        )

    @property
    def standard_error(self) -> float:
        """Of the value; NaN with fewer than two documents."""
        n = int(self.is_counted.sum())
        if n < 2 or not math.isfinite(self.value):
            return math.nan
        return math.sqrt(n / (n - 1) * float(self.residuals @ self.residuals))

    def told(self, name: str, unit: str) -> dict[str, float]:
        """Value and error as keys of a report: ``{name}_{unit}`` and its standard error."""
        return {
            f"{name}_{unit}": self.value,
            f"{name}_standard_error_{unit}": self.standard_error,
        }
