"""What does `pretrain.compile` give a step, and after how many steps has its compiling come back?

A learner whose passes are compiled and one whose passes are not take the same steps in turn. The
first few steps of the former compile, and are counted as that. In a run, a denoiser of two streams
compiles more often than here, where each step has the same number of first guesses.
"""

import shutil
import time
from collections.abc import Callable

from harness import CPU, begin, finish, parser, track

from canvaslm.device import Precision
from canvaslm.measure import interleaved_seconds
from canvaslm.reporting.benches import Scalar
from step_work import Kind, build_step, plan_of

_CASES: tuple[tuple[str, Kind, Precision], ...] = (
    ("w256", "autoregressive", "float32"),
    ("w256", "autoregressive", "bfloat16"),
    ("laptop", "two_streams", "float32"),
)
_TINY: tuple[tuple[str, Kind, Precision], ...] = (("tiny", "autoregressive", "float32"),)
_FIRST_STEPS = 3
_COMPILERS = ("g++", "clang++")  # what inductor looks for
_NAMES = ("eager", "compiled")


def main() -> None:
    """Compile, time in turn, print and write."""
    options = parser(__doc__, "compiled", rounds=7).parse_args()
    begin(options)
    cases = _TINY if options.tiny else _CASES
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    missing: dict[str, str] = {}
    if not any(map(shutil.which, _COMPILERS)):
        missing, cases = {"compiled": f"none of {', '.join(_COMPILERS)} is installed"}, ()
    for shape, kind, precision in track(cases, total=len(cases), label="shapes that are compiled"):
        runs: dict[str, Callable[[], object]] = {}
        first_s: dict[str, float] = {}
        for name in _NAMES:
            plan = plan_of(
                shape, kind, precision=precision, compile=name == "compiled", trace_steps=0
            )
            step = build_step(plan)
            started = time.perf_counter()
            for _ in range(_FIRST_STEPS):
                step.run()
            first_s[name] = time.perf_counter() - started
            runs[name] = step.run
        timings = interleaved_seconds(runs, device=CPU, rounds=options.rounds, warmup_rounds=0)
        eager_s, compiled_s = (timings[name].median_s for name in _NAMES)
        lost_s = first_s["compiled"] - first_s["eager"]
        gained_s = eager_s - compiled_s
        rows.append(
            {
                "shape": shape,
                "step": kind,
                "precision": precision,
                "eager_s": eager_s,
                "compiled_s": compiled_s,
                "compiling_s": lost_s,
                "comes_back_after_steps": lost_s / gained_s if gained_s > 0 else "never",
            }
        )
        place = f"compiled/{shape}/{precision}/threads{options.threads}"
        ratios[f"{place}/{kind}_over_eager"] = compiled_s / eager_s
    finish(options, rows=rows, ratios=ratios, not_measured=missing)


if __name__ == "__main__":
    main()
