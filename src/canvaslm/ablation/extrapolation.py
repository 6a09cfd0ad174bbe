"""What would ten and a hundred times the training give, if things go on as they went?

Two laws are fitted to the same points, since a handful of points cannot tell them apart: a power
law that falls to a floor (Kaplan et al. 2020, arXiv 2001.08361, with the floor of Hoffmann et al.
2022, arXiv 2203.15556), and a straight line over the logarithm, which never ends. The first is the
cautious one and the second the hopeful one; what lies between them is not known from these points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Law = Literal["power", "line"]
LAWS: tuple[Law, ...] = ("power", "line")
TIMES = (10, 100)  # how far beyond the longest training is looked

_LEAST = 4  # a power law with a floor has three numbers
_EXPONENTS = np.geomspace(0.02, 2.0, 400)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A law through a figure over the length of training.

    Attributes:
        law: which.
        floor: what a power law falls to; 0 for a line.
        scale: of the power law; the line's height at one step.
        slope: exponent of the power law, without its sign; the line's change for each factor e.
        largest_miss: largest distance between law and point, in the figure's unit.
    """

    law: Law
    floor: float
    scale: float
    slope: float
    largest_miss: float

    def at(self, length: float) -> float:
        """The figure at a length."""
        if self.law == "power":
            return self.floor + self.scale * length**-self.slope
        return self.scale + self.slope * float(np.log(length))


def fit_laws(lengths: Sequence[float], figures: Sequence[float]) -> dict[Law, Fit] | None:
    """Both laws by least squares.

    Args:
        lengths: of the trainings, above 0.
        figures: one for each, none below 0.

    Returns:
        The fits; None for fewer than four lengths.
    """
    x, y = np.asarray(lengths, float), np.asarray(figures, float)
    if len(set(lengths)) < _LEAST:
        return None
    return {"power": _fit_power(x, y), "line": _fit_line(x, y)}


def _fit_line(x: np.ndarray, y: np.ndarray) -> Fit:
    slope, height = np.polyfit(np.log(x), y, 1)
    miss = np.abs(height + slope * np.log(x) - y).max()
    return Fit(
        law="line", floor=0.0, scale=float(height), slope=float(slope), largest_miss=float(miss)
    )


def _fit_power(x: np.ndarray, y: np.ndarray) -> Fit:
    """The best of many exponents; for each, floor and scale are linear, and no floor is below 0."""
    best, found = np.inf, None
    for exponent in _EXPONENTS:
        basis = (x / x[0]) ** -exponent
        for with_floor in (True, False):
            columns = np.stack([basis, np.ones_like(x)] if with_floor else [basis], axis=1)
            scale, *floor = np.linalg.lstsq(columns, y, rcond=None)[0]
            base = float(floor[0]) if floor else 0.0
            miss = scale * basis + base - y
            if base >= 0 and miss @ miss < best:
                best, found = float(miss @ miss), (base, float(scale), exponent, np.abs(miss).max())
    assert found is not None, "without a floor there is always a fit"
    base, scale, exponent, largest = found
    return Fit(
        law="power",
        floor=base,
        scale=scale * float(x[0]) ** exponent,
        slope=float(exponent),
        largest_miss=float(largest),
    )
