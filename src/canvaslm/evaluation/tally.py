"""What do the scored tokens add up to: by document, by time, by token?

Every figure is a sum divided once at the end, so that none depends on how windows were batched.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from canvaslm.corpus.entropy import entropy_nats
from canvaslm.diffusion.schedule import clean_share, position_times
from canvaslm.layout import Layout


class HeldOut(Protocol):
    """Windows of held-out text."""

    def __len__(self) -> int:
        """How many windows there are."""
        ...

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """(n, T) int64 ids of some windows."""
        ...

    def documents_of(self, index: int) -> np.ndarray:
        """(T,) the document of each token of a window."""
        ...

    def text_bytes_of(self, index: int) -> np.ndarray:
        """(T,) bytes of text of each token of a window; 0 for the end of text."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """One model on the held-out tokens.

    Attributes:
        nats_per_token: mean over all tokens.
        standard_error_nats: of that mean, over documents; NaN with fewer than two of them.
        bits_per_byte: all bits divided by all bytes of text.
    """

    nats_per_token: float
    standard_error_nats: float
    bits_per_byte: float


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """One diffusion time: what its step adds to the bound, and the diagnostic, per token.

    Every token meets every time once, so the steps of all times add up to the bound.
    """

    t: int
    clean_share: float
    bound_nats_per_token: float
    diagnostic_cross_entropy_nats: float


@dataclass(frozen=True, kw_only=True)
class DocumentRow:
    """One held-out document, by its number within the split: what its scored tokens cost both.

    Two reports on the same windows can be held against each other document by document.
    """

    document: int
    tokens: int
    twin_nats: float
    bound_nats: float


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Both models on the same tokens, and how far the bound lies above the twin's loss.

    Attributes:
        gap_percent: 100 · (bound / twin − 1).
        gap_standard_error_percent: of the gap, over documents, both models on the same ones.
        unigram_entropy_nats: of the tokens' own frequencies, all that is known without context.
    """

    twin: Score
    bound: Score
    gap_percent: float
    gap_standard_error_percent: float
    unigram_entropy_nats: float
    n_windows: int
    n_tokens: int
    n_documents: int
    n_text_bytes: int
    by_time: tuple[TimeRow, ...]
    by_document: tuple[DocumentRow, ...]


class Tally:
    """Sums over the tokens that both models have scored.

    Windows are added one by one, so that no sum depends on how they were batched.

    Args:
        n_times: the diffusion times of the bound, N.
        layout: of the denoiser.
        tilt: of the denoiser, for the share of a canvas that is clean at a time.
    """

    def __init__(self, *, n_times: int, layout: Layout, tilt: float) -> None:
        self._layout = layout
        self._tilt = tilt
        self._by_document: dict[int, np.ndarray] = {}  # nats of the twin, of the bound, tokens
        self._by_time = np.zeros((n_times + 1, 3))  # nats of the step, plain nats, tokens
        self._token_counts = np.zeros(layout.vocab_size, dtype=np.int64)
        self._n_windows = 0
        self._text_bytes = 0

    def add_pass(self, times: Tensor, step_nats: Tensor, plain_nats: Tensor) -> None:
        """Add one noisy pass over a batch: time, nats of the step, plain cross-entropy, (B, T)."""
        for t, step, plain in zip(*map(_on_cpu, (times, step_nats, plain_nats)), strict=True):
            for column, weights in enumerate((step, plain, None)):
                self._by_time[:, column] += np.bincount(t, weights, minlength=len(self._by_time))

    def add_windows(
        self,
        held_out: HeldOut,
        numbers: np.ndarray,
        ids: np.ndarray,
        *,
        twin_nats: Tensor,
        bound_nats: Tensor,
    ) -> None:
        """Add a batch of windows (B, T): their ids and what each token costs both models."""
        rows = zip(numbers.tolist(), ids, _on_cpu(twin_nats), _on_cpu(bound_nats), strict=True)
        for number, tokens, twin, bound in rows:
            documents, inverse = np.unique(held_out.documents_of(number), return_inverse=True)
            sums = [np.bincount(inverse, weights) for weights in (twin, bound, None)]
            for document, values in zip(documents.tolist(), np.stack(sums, axis=1), strict=True):
                self._by_document[document] = self._by_document.get(document, 0.0) + values
            self._token_counts += np.bincount(tokens, minlength=len(self._token_counts))
            self._text_bytes += int(np.sum(held_out.text_bytes_of(number)))
            self._n_windows += 1

    def result(self) -> "Totals":
        """Divide."""
        keys = sorted(self._by_document)
        twin, bound, tokens = np.array([self._by_document[key] for key in keys]).T
        ratio, ratio_error = _ratio_of_sums(bound, twin)
        return Totals(
            twin=self._score(twin, tokens),
            bound=self._score(bound, tokens),
            gap_percent=100 * (ratio - 1),
            gap_standard_error_percent=100 * ratio_error,
            unigram_entropy_nats=entropy_nats(self._token_counts),
            n_windows=self._n_windows,
            n_tokens=int(tokens.sum()),
            n_documents=len(keys),
            n_text_bytes=self._text_bytes,
            by_time=self._time_rows(),
            by_document=tuple(
                DocumentRow(document=key, tokens=int(n), twin_nats=float(t), bound_nats=float(b))
                for key, n, t, b in zip(keys, tokens, twin, bound, strict=True)
            ),
        )

    def _score(self, nats: np.ndarray, tokens: np.ndarray) -> Score:
        mean, error = _ratio_of_sums(nats, tokens)
        bits = float(nats.sum()) / math.log(2)
        return Score(
            nats_per_token=mean,
            standard_error_nats=error,
            bits_per_byte=bits / self._text_bytes if self._text_bytes else math.nan,
        )

    def _time_rows(self) -> tuple[TimeRow, ...]:
        n_times = len(self._by_time) - 1
        return tuple(
            TimeRow(
                t=t,
                clean_share=self._clean_share(t, n_times),
                bound_nats_per_token=float(step / tokens),
                diagnostic_cross_entropy_nats=float(plain / tokens),
            )
            for t, (step, plain, tokens) in enumerate(self._by_time[1:], start=1)
        )

    def _clean_share(self, t: int, n_times: int) -> float:
        """Of a canvas at time t, on average over its positions."""
        each = position_times(
            np.array([t]),
            canvas_tokens=self._layout.canvas_tokens,
            n_times=n_times,
            tilt=self._tilt,
        )
        return float(clean_share(each, n_times).mean())


def _ratio_of_sums(amounts: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Sum of amounts over sum of sizes, and its standard error over clusters.

    The linearised ratio estimator (Cochran 1977, Sampling Techniques, eq. 6.13, without the finite
    population correction): tokens of a document are not independent, documents are taken to be.

    Args:
        amounts: (G,) the sum of each cluster.
        sizes: (G,) the size of each cluster.

    Returns:
        The ratio and its standard error, NaN with fewer than two clusters.
    """
    n_clusters = len(amounts)
    size = float(sizes.sum())
    ratio = float(amounts.sum()) / size if size else math.nan
    if n_clusters < 2 or not math.isfinite(ratio):
        return ratio, math.nan
    residuals = amounts - ratio * sizes
    spread = math.sqrt(n_clusters / (n_clusters - 1) * float(residuals @ residuals))
    return ratio, spread / size


def _on_cpu(values: Tensor) -> np.ndarray:
    """Values as float64, or as they are where they count."""
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values).numpy()
