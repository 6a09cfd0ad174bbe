"""Which runs of n tokens occur in two places?

A run is known by a 64-bit polynomial hash of its mixed ids (Karp and Rabin 1987), computed for all
positions at once. Two different runs share a hash with a chance of about 5e-20 per pair, so that
among a billion times a million runs a false meeting is not expected to move a share.
"""

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, the golden ratio of 2^64 (Steele et al. 2014)


def ngram_hashes(ids: np.ndarray, n: int) -> np.ndarray:
    """Hash every run of n consecutive ids.

    Args:
        ids: (m,) non-negative integers.
        n: tokens in a run, at least 1.

    Returns:
        (max(0, m-n+1),) uint64, one hash per first position.
    """
    if len(ids) < n:
        return np.empty(0, dtype=np.uint64)
    hashes, length = _mix(ids.astype(np.uint64)), 1
    letters = hashes
    for bit in f"{n:b}"[1:]:  # doubles the length, and adds a letter where n's bit is set
        hashes = hashes[:-length] * _power(length) + hashes[length:]
        length *= 2
        if bit == "1":
            hashes = hashes[: len(letters) - length] * _BASE + letters[length:]
            length += 1
    return hashes


class NgramSet:
    """Runs with their counts, of which some get marked as met elsewhere."""

    def __init__(self, hashes: np.ndarray) -> None:
        """Hold ``hashes`` (m,) uint64, with repetitions."""
        self._hashes, self._counts = np.unique(hashes, return_counts=True)
        self._is_met = np.zeros(len(self._hashes), dtype=bool)
        self.total = len(hashes)

    def mark(self, hashes: np.ndarray) -> None:
        """Mark those of the set that occur among ``hashes``."""
        self._is_met |= np.isin(self._hashes, hashes)

    @property
    def marked_share(self) -> float:
        """Share of the runs, repetitions counted, that are marked."""
        return float(self._counts[self._is_met].sum() / self.total)


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread ids over 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values + np.uint64(1)) * _BASE
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_BASE), exponent, 1 << 64))
