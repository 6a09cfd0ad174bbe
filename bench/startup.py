"""How long does it take before anything is computed?

``--help`` of every command, a ``dvc repro`` that finds nothing to do, and which stages of a
pipeline import torch though they do no arithmetic. The pipeline is a clone of HEAD that has run
once at the profile ``ci``.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness

from clones import ROOT, Repro, clone
from scratch_copy import call

_ARITHMETIC = {
    "pretrain", "audit_run", "eval_bound", "eval_loss_parity", "eval_samples", "eval_speedup"
}  # fmt: skip
_IMPORTED = re.compile(r"^import time:.*\|\s+torch$")  # indented by depth
_LAST_OF_TINY = "fetch_corpus"


def main() -> None:
    """Time the commands in turn, run a pipeline once, and then again for nothing."""
    options = harness.parser(__doc__, "startup", rounds=3).parse_args()
    harness.begin(options)
    helps = _time_helps(options)
    rows: list[dict[str, Any]] = [
        {"command": name, "help_median_s": statistics.median(found)}
        for name, found in helps.items()
    ]
    with tempfile.TemporaryDirectory(prefix="startup.") as scratch:
        place = clone("HEAD", Path(scratch) / "clone", profile="ci")
        words = ["dvc", "repro", *([_LAST_OF_TINY] if options.tiny else [])]
        importing = _run_once(place, words)
        no_op_s = statistics.median(_seconds(place, words) for _ in range(options.rounds))
    with_torch = {stage for stage, found in importing.items() if found}
    unseen = (_ARITHMETIC & importing.keys()) - with_torch
    assert not unseen, f"{unseen} cannot do without torch: what is imported is not seen"
    rows += [{"stage": stage, "imports_torch": found} for stage, found in importing.items()]
    rows.append({"pipeline": " ".join(words), "no_op_median_s": no_op_s})
    ratios = {
        "startup/slowest_help_s": max(row["help_median_s"] for row in rows if "command" in row),
        "startup/no_op_repro_s": no_op_s,
        "startup/needless_imports_of_torch": float(len(with_torch - _ARITHMETIC)),
    }
    harness.finish(options, rows=rows, ratios=ratios)


def _time_helps(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of ``--help`` in fresh processes, round by round."""
    scripts = sorted(path for path in (ROOT / "stages").glob("*.py") if path.stem != "door")
    if options.tiny:
        scripts = [path for path in scripts if path.stem in ("pretrain", "report")]
    helps: dict[str, list[float]] = {path.stem: [] for path in scripts}
    for _ in harness.track(range(options.rounds), total=options.rounds, label="rounds of --help"):
        for path in scripts:
            helps[path.stem].append(_seconds(ROOT, [sys.executable, str(path), "--help"]))
    return helps


def _seconds(place: Path, words: list[str]) -> float:
    """Seconds of a command, from its start to its end."""
    started_at = time.perf_counter()
    call(place, *words)
    return time.perf_counter() - started_at


def _run_once(place: Path, words: list[str]) -> dict[str, bool]:
    """Run a pipeline whose processes tell what they import; whether that was torch, by stage."""
    importing: dict[str, bool] = {}
    with ExitStack() as stack:
        run = Repro(
            place, words, threads=os.cpu_count() or 1, more={"PYTHONPROFILEIMPORTTIME": "1"}
        )
        stack.callback(run.end)
        while (stage := run.next_stage) is not None:
            first = len(run.said)
            run.run_stage()
            found = any(_IMPORTED.match(line) for line in run.said[first:])
            name = stage.partition("@")[0]
            importing[name] = importing.get(name, False) or found
    return importing


if __name__ == "__main__":
    main()
