"""What does it cost a training step to leave samples for a trace?

One learner that keeps samples and one that keeps none take the same steps in turn, at the shape of
the profile `laptop`, for both objectives, once the memory of the samples is in use again. The price
is the ratio of their median seconds. Beside it stands what a step of two windows pays: as many
samples, so as many seconds, and so little arithmetic that noise does not hide them.
"""

from harness import CPU, begin, finish, parser, track

from canvaslm.measure import Timing, interleaved_seconds
from canvaslm.reporting.benches import Scalar
from step_work import Kind, build_step, plan_of

_KINDS: tuple[Kind, ...] = ("autoregressive", "two_streams")
_SMALL = {"windows_per_step": 2, "micro_batch_windows": 2}
_SMALL_ROUNDS = 5  # for each of the others


def main() -> None:
    """Time steps with samples and without, print and write."""
    options = parser(__doc__, "trace", rounds=3).parse_args()
    begin(options)
    rows: list[dict[str, Scalar]] = []
    ratios: dict[str, float | None] = {}
    shape = "tiny" if options.tiny else "laptop"
    for kind in track(_KINDS, total=len(_KINDS), label="steps with samples and without"):
        full = _time(shape, kind, rounds=options.rounds)
        small = _time(shape, kind, rounds=options.rounds * _SMALL_ROUNDS, **_SMALL)
        plain_s, sampling_s = (full[name].median_s for name in ("plain", "sampling"))
        samples_s = small["sampling"].median_s - small["plain"].median_s
        rows.append(
            {
                "shape": shape,
                "step": kind,
                "plain_s": plain_s,
                "sampling_s": sampling_s,
                "samples_of_two_windows_s": samples_s,
            }
        )
        place = f"trace/{shape}/threads{options.threads}/{kind}"
        ratios[f"{place}_sampling_over_plain"] = sampling_s / plain_s
        ratios[f"{place}_samples_share"] = max(samples_s, 0.0) / plain_s
    finish(options, rows=rows, ratios=ratios)


def _time(shape: str, kind: Kind, *, rounds: int, **pretrain: int) -> dict[str, Timing]:
    """Steps of one kind in turn, the samples' memory in use again."""
    runs = {}
    for name, changes in (("plain", {"trace_steps": 0}), ("sampling", {})):
        plan = plan_of(shape, kind, precision="float32", **pretrain, **changes)
        step = build_step(plan)
        for _ in range(plan.pretrain.trace_steps + 1):
            step.run()
        runs[name] = step.run
    return interleaved_seconds(runs, device=CPU, rounds=rounds, warmup_rounds=1)


if __name__ == "__main__":
    main()
