"""What does the likelihood bound cost beyond the forwards that it cannot do without?

A bound of N times needs one clean pass and N noisy ones, each with the one product of the head. The
bench takes all of it in turn with those passes and products alone, on a grid and in continuous
time: at the shape of the profile `laptop`, at the same with a vocabulary of 50,257, where the head
outweighs so narrow a network, and at that vocabulary and the width of `gpu_343m` with 4 of its 24
layers. Memory is what a fresh process takes beyond model and windows, as a share of one table of
all scores.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from harness import CPU, begin, finish, fresh_peak_bytes, parser, track

from canvaslm.diffusion.levels import ContinuousLevels, GridLevels, Levels
from canvaslm.layout import Layout
from canvaslm.measure import interleaved_seconds
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.shape import ModelParams
from canvaslm.objective.denoising_bound import bound_passes
from canvaslm.reporting.benches import Scalar
from step_work import plan_of

_WIDE = {"width": 1024, "n_layers": 4, "n_heads": 16, "n_kv_heads": 4, "ffn_width": 3072}
_PASSES = 2
_MEMORY_WINDOWS = 32
_BLOCK_ROWS = 512  # of the product of the head alone: as fast as a product of all rows


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model and so many windows of 128 tokens."""

    vocab: int
    n_windows: int
    model: Mapping[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The beginning of its ids."""
        return f"bound/D{self.model.get('width', 192)}_V{self.vocab}"


_SIZES = (
    Size(vocab=2048, n_windows=32),
    Size(vocab=50_257, n_windows=4),
    Size(vocab=50_257, n_windows=2, model=_WIDE),
)


def main() -> None:
    """Time the bound and its forwards in turn, measure memory, print and write."""
    options = parser(__doc__, "bound").parse_args()
    begin(options)
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    sizes = (Size(vocab=64, n_windows=2),) if options.tiny else _SIZES
    for size in track(sizes, total=len(sizes), label="sizes"):
        _time(size, options, rows, ratios)
    if not options.tiny:
        _measure_memory(rows, ratios, reasons)
    finish(options, rows=rows, ratios=ratios, not_measured=reasons)


class Evaluation:
    """A model, windows, and the passes of a bound over them."""

    def __init__(self, size: Size, *, tiny: bool) -> None:
        plan = plan_of("tiny" if tiny else "laptop", "two_streams", precision="float32")
        vocab, n_windows = size.vocab, size.n_windows
        self.layout = Layout.model_validate(plan.layout.model_dump() | {"vocab_size": vocab})
        shape = ModelParams.model_validate(plan.model.model_dump() | dict(size.model))
        self.model = Backbone(shape, self.layout).eval()
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


def prepare(*, vocab: int, n_windows: int) -> Callable[[], object]:
    """The work of a fresh process whose memory is measured."""
    evaluation = Evaluation(Size(vocab=vocab, n_windows=n_windows), tiny=False)
    return functools.partial(evaluation.take_bound, GridLevels(n_times=1, tilt=0.0))


def _time(
    size: Size,
    options: argparse.Namespace,
    rows: list[dict[str, Scalar]],
    ratios: dict[str, float | None],
) -> None:
    evaluation = Evaluation(size, tiny=options.tiny)
    sweeps: dict[str, Levels] = {
        "grid": GridLevels(n_times=_PASSES, tilt=0.0),
        "continuous": ContinuousLevels(n_passes=_PASSES, tilt=0.0),
    }
    runs: dict[str, Callable[[], object]] = {"forwards": evaluation.run_forwards}
    for name, levels in sweeps.items():
        runs[name] = functools.partial(evaluation.take_bound, levels)
    timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=1)
    unit_s = timings["forwards"].median_s
    for name, timing in timings.items():
        over = timing.median_s / unit_s
        row = {"size": size.place, "tokens": evaluation.windows.numel(), "work": name}
        rows.append(row | {"median_s": timing.median_s, "over_forwards": over})
        if name in sweeps:
            ratios[f"{size.place}/{name}_over_forwards"] = over


def _measure_memory(
    rows: list[dict[str, Scalar]],
    ratios: dict[str, float | None],
    reasons: dict[str, str],
) -> None:
    """Of so many positions that a table of their scores would not go unseen."""
    size = Size(vocab=50_257, n_windows=_MEMORY_WINDOWS)
    scores_bytes = 4 * size.n_windows * 128 * size.vocab
    arguments = {"vocab": size.vocab, "n_windows": size.n_windows}
    extra = fresh_peak_bytes("bound:prepare", arguments, processes=1)
    name = f"{size.place}/extra_over_scores"
    ratios[name] = None if extra is None else extra / scores_bytes
    if extra is None:
        reasons["extra_over_scores"] = "this machine does not say what a process takes"
        return
    rows.append({"memory": size.place, "extra_bytes": extra, "extra_over_scores": ratios[name]})


if __name__ == "__main__":
    main()
