"""One evaluation of two models, with everything that it drew, for tests that repeat it.

As a script it evaluates two checkpoints in a process of its own and prints what came of it:
``python evaluations.py TWIN DENOISER``.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from canvaslm.checkpoint import load_model
from canvaslm.evaluation.loss_parity import measure_loss_parity
from canvaslm.evaluation.parity_params import EvalLossParityParams
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.reporting.files import to_json
from canvaslm.reporting.progress import untracked
from shapes import tiny_diffusion

N_WINDOWS = 5
PARAMS = EvalLossParityParams(
    seed=1,
    device="cpu",
    n_times=3,
    max_windows=None,
    batch_windows=2,
    vocab_chunk=16,
    max_gap_percent=10.0,
)


class HeldOut:
    """Windows of random ids, one document each, every token one byte."""

    def __init__(self, layout: Layout) -> None:
        draws = np.random.default_rng(7)
        self._ids = draws.integers(0, layout.vocab_size, (N_WINDOWS, layout.window_tokens))

    def __len__(self) -> int:
        return N_WINDOWS

    def gather(self, indices: np.ndarray) -> np.ndarray:
        return self._ids[indices]

    def documents_of(self, index: int) -> np.ndarray:
        return np.full(self._ids.shape[1], index)

    def text_bytes_of(self, index: int) -> np.ndarray:
        return np.ones(self._ids.shape[1], dtype=np.int64)


def evaluate(twin: Backbone, denoiser: Backbone) -> dict[str, Any]:
    """All figures of the comparison, and a hash of the noise that the denoiser was shown."""
    layout = denoiser.layout
    one_token = Layout(
        canvas_tokens=1, canvases_per_window=layout.window_tokens, vocab_size=layout.vocab_size
    )
    diffusion = tiny_diffusion()
    with _recorded(denoiser) as draws:
        result = measure_loss_parity(
            twin,
            denoiser,
            HeldOut(layout),
            next_token=NextToken(layout=one_token, eot_id=0, vocab_chunk=PARAMS.vocab_chunk),
            denoising=Denoising(
                layout=layout,
                diffusion=diffusion,
                seed=PARAMS.seed,
                vocab_chunk=PARAMS.vocab_chunk,
            ),
            params=PARAMS,
            track=untracked,
        )
    by_time = [vars(row) for row in result.totals.by_time]
    return {**result.metrics(), "by_time": by_time, "noise_sha256": draws.hexdigest()}


def evaluate_checkpoints(twin: Path, denoiser: Path) -> dict[str, Any]:
    """The same for two checkpoints, as JSON has it."""
    return json.loads(to_json(evaluate(load_model(twin), load_model(denoiser))))


@contextmanager
def _recorded(model: Backbone) -> Iterator[Any]:
    """Hash every noisy id and time that the model is shown."""
    seen, plain = hashlib.sha256(), model.denoise

    def denoise(noisy: Tensor, times: Tensor, **options: Any) -> Tensor:
        seen.update(noisy.numpy().tobytes())
        seen.update(times.double().numpy().tobytes())
        return plain(noisy, times, **options)

    model.__dict__["denoise"] = denoise
    try:
        yield seen
    finally:
        del model.__dict__["denoise"]


if __name__ == "__main__":
    print(json.dumps(evaluate_checkpoints(Path(sys.argv[1]), Path(sys.argv[2]))))
