"""How long does the whole pipeline take, beside what it took at another revision?

Both revisions are cloned and run from scratch, in turn, stage by stage: while one works on a stage
the other stands still, so that a machine that slows down slows both. What is compared is the time
of the stages that both have: a question asked since is no slowness, and stands apart. Then the
losses of both are compared, since a pipeline may be as fast as it likes that learns less.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness

from canvaslm.params import read_yaml
from clones import Repro, clone

_BEFORE = "7f3137d"  # the last revision before anything was made faster
_NAMES = ("before", "after")
_SHARED = "those that both have"
_LOSSES = {
    "autoregressive": "nats_per_token",
    "diffusion": "bound_nats_per_token",
}


def main() -> None:
    """Clone, run in turn, compare, print and write."""
    parser = harness.parser(__doc__, "pipeline", rounds=1, threads=2)
    parser.add_argument("--base", default=_BEFORE, help="the revision before")
    parser.add_argument("--revision", default="HEAD", help="the revision after")
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--scratch", type=Path, help="where the clones go, and stay")
    options = parser.parse_args()
    if options.tiny:
        options.base, options.profile = options.revision, "ci"
    harness.begin(options)
    if options.scratch is not None:
        options.scratch.mkdir(parents=True)
        _compare(options, options.scratch)
        return
    with tempfile.TemporaryDirectory(prefix="pipeline.") as scratch:
        _compare(options, Path(scratch))


def _compare(options: argparse.Namespace, scratch: Path) -> None:
    revisions = dict(zip(_NAMES, (options.base, options.revision), strict=True))
    places = {
        name: clone(revision, scratch / name, profile=options.profile)
        for name, revision in revisions.items()
    }
    words = ["dvc", "repro", *(["collect_documents"] if options.tiny else [])]
    seconds = _run_in_turn(places, words, threads=options.threads)
    rows = _list_seconds(seconds)
    shared = next(row for row in rows if row["stage"] == _SHARED)
    place = f"pipeline/{options.profile}"
    ratios: dict[str, float | None] = {
        f"{place}/wall_over_before": shared["after_s"] / shared["before_s"]
    }
    missing: dict[str, str] = {}
    if options.tiny:
        missing = {"excess_over_error": "the tiny form trains nothing"}
    for row in [] if options.tiny else _compare_losses(places):
        rows.append(row)
        ratios[f"{place}/{row['loss_of']}_excess_over_error"] = row["excess_over_error"]
    harness.finish(options, rows=rows, ratios=ratios, not_measured=missing)


def _run_in_turn(
    places: dict[str, Path], words: list[str], *, threads: int
) -> dict[str, dict[str, float]]:
    """Seconds of each stage, by name of the clone."""
    with ExitStack() as stack:
        runs: dict[str, Repro] = {}
        for name, place in places.items():
            runs[name] = Repro(place, words, threads=threads)
            stack.callback(runs[name].end)
        for _ in harness.track(_turns(runs), total=len(runs), label="clones that have ended"):
            pass
        return {name: run.seconds for name, run in runs.items()}


def _turns(runs: dict[str, Repro]) -> Iterator[str]:
    """Let each run one stage, then start with the other; yield a name whenever one has ended."""
    order = list(runs)
    while waiting := [name for name in order if runs[name].next_stage is not None]:
        for name in waiting:
            runs[name].run_stage()
            if runs[name].next_stage is None:
                yield name
        order.reverse()


def _list_seconds(seconds: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each stage, none where a revision has it not; those that both have; and all."""
    stages = list(dict.fromkeys(stage for part in seconds.values() for stage in part))
    shared = [stage for stage in stages if all(stage in seconds[name] for name in _NAMES)]
    return [
        *(
            {"stage": stage} | {f"{name}_s": seconds[name].get(stage) for name in _NAMES}
            for stage in stages
        ),
        {"stage": _SHARED}
        | {f"{name}_s": sum(seconds[name][stage] for stage in shared) for name in _NAMES},
        {"stage": "all"} | {f"{name}_s": sum(seconds[name].values()) for name in _NAMES},
    ]


def _compare_losses(places: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Held-out losses, and how many of their standard errors the later is higher, or 0."""
    found = {
        name: read_yaml(place / "reports/eval_loss_parity/metrics.json")
        for name, place in places.items()
    }
    for objective, key in _LOSSES.items():
        losses, errors = (
            [found[name][objective][part] for name in _NAMES]
            for part in (key, "standard_error_nats")
        )
        error = math.hypot(*errors)
        yield {
            "loss_of": objective,
            "before_nats": losses[0],
            "after_nats": losses[1],
            "standard_error_nats": error,
            "excess_over_error": max(0.0, losses[1] - losses[0]) / error,
        }


if __name__ == "__main__":
    main()
