"""What does the likelihood bound cost beyond the forwards that it cannot do without?

A bound of N times needs one clean pass and N noisy ones, each with the one product of the head. The
bench takes all of it in turn with those passes and products alone, at the shape of the profile
`laptop`, with its own vocabulary and with one of 50,257, on a grid and in continuous time. Memory
is what a fresh process takes beyond model and windows, as a share of one table of all scores.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from harness import CPU, begin, finish, fresh_peak_bytes, parser, track

from canvaslm.diffusion.levels import ContinuousLevels, GridLevels, Levels
from canvaslm.layout import Layout
from canvaslm.measure import interleaved_seconds
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.denoising_bound import bound_passes
from canvaslm.reporting.benches import Scalar
from step_work import plan_of

_VOCABS = {2048: 32, 50_257: 4}  # windows for each: a quarter of a second to a second a round
_PASSES = 4
_MEMORY_WINDOWS = 32
_BLOCK_ROWS = 512  # of the product of the head alone: as fast as a product of all rows


def main() -> None:
    """Time the bound and its forwards in turn, measure memory, print and write."""
    options = parser(__doc__, "bound").parse_args()
    begin(options)
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    sizes = {64: 2} if options.tiny else _VOCABS
    for vocab in track(sizes, total=len(sizes), label="vocabularies"):
        _time(vocab, sizes[vocab], options, rows, ratios)
    if not options.tiny:
        _measure_memory(rows, ratios, reasons)
    finish(options, rows=rows, ratios=ratios, not_measured=reasons)


class Evaluation:
    """A model, windows, and the passes of a bound over them."""

    def __init__(self, *, vocab: int, n_windows: int, tiny: bool) -> None:
        plan = plan_of("tiny" if tiny else "laptop", "two_streams", precision="float32")
        self.layout = Layout.model_validate(plan.layout.model_dump() | {"vocab_size": vocab})
        self.model = Backbone(plan.model, self.layout).eval()
        initialise(self.model, 1)
        self.numbers = np.arange(n_windows)
        draws = torch.Generator().manual_seed(1)
        shape = (n_windows, self.layout.window_tokens)
        self.windows = torch.randint(vocab, shape, generator=draws)

    @torch.no_grad()
    def take_bound(self, levels: Levels) -> None:
        """All that an evaluation does with the denoiser, draws included."""
        passes = bound_passes(
            self.model,
            self.model.encode_context(self.windows),
            self.windows,
            self.numbers,
            levels=levels,
            conditionings=("off",),
            layout=self.layout,
            seed=1,
            vocab_chunk=8192,
        )
        for _ in passes:
            pass

    @torch.no_grad()
    def run_forwards(self) -> None:
        """The passes, and the product of the head after each noisy one, into memory used again."""
        context = self.model.encode_context(self.windows)
        times = torch.full((len(self.windows), self.layout.canvases_per_window), 0.5)
        head = self.model.head_weight.T
        room = torch.empty(_BLOCK_ROWS, head.shape[1])
        for _ in range(_PASSES):
            hidden = self.model.denoise(
                self.windows, times, context=context, guess=None, has_guess=None
            )
            for block in hidden.flatten(0, 1).split(_BLOCK_ROWS):
                torch.mm(block, head, out=room[: len(block)])


def prepare(*, vocab: int, n_windows: int, tiny: bool) -> Callable[[], object]:
    """The work of a fresh process whose memory is measured."""
    evaluation = Evaluation(vocab=vocab, n_windows=n_windows, tiny=tiny)
    return functools.partial(evaluation.take_bound, GridLevels(n_times=1))


def _time(
    vocab: int,
    n_windows: int,
    options: argparse.Namespace,
    rows: list[dict[str, Scalar]],
    ratios: dict[str, float | None],
) -> None:
    evaluation = Evaluation(vocab=vocab, n_windows=n_windows, tiny=options.tiny)
    sweeps: dict[str, Levels] = {
        "grid": GridLevels(n_times=_PASSES),
        "continuous": ContinuousLevels(n_passes=_PASSES),
    }
    runs: dict[str, Callable[[], object]] = {"forwards": evaluation.run_forwards}
    for name, levels in sweeps.items():
        runs[name] = functools.partial(evaluation.take_bound, levels)
    timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=1)
    unit_s = timings["forwards"].median_s
    for name, timing in timings.items():
        row: dict[str, Any] = {"vocab": vocab, "tokens": evaluation.windows.numel(), "work": name}
        rows.append(row | {"median_s": timing.median_s, "over_forwards": timing.median_s / unit_s})
        if name in sweeps:
            ratios[f"bound/V{vocab}/{name}_over_forwards"] = timing.median_s / unit_s


def _measure_memory(
    rows: list[dict[str, Scalar]],
    ratios: dict[str, float | None],
    reasons: dict[str, str],
) -> None:
    """Of so many positions that a table of their scores would not go unseen."""
    vocab, n_windows = max(_VOCABS), _MEMORY_WINDOWS
    evaluation = Evaluation(vocab=vocab, n_windows=n_windows, tiny=False)
    scores_bytes = 4 * evaluation.windows.numel() * vocab
    arguments = {"vocab": vocab, "n_windows": n_windows, "tiny": False}
    extra = fresh_peak_bytes("bound:prepare", arguments, processes=1)
    name = f"bound/V{vocab}/extra_over_scores"
    ratios[name] = extra and extra / scores_bytes
    if extra is None:
        reasons["extra_over_scores"] = "this machine does not say what a process takes"
        return
    rows.append({"memory": f"V{vocab}", "extra_bytes": extra, "extra_over_scores": ratios[name]})


if __name__ == "__main__":
    main()
