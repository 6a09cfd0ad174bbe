"""Does everything hold on a machine with one GPU, and how fast is it there, in ten minutes?

Each gate runs in a process of its own and inside its own time, so that one that raises, hangs or
breaks the device is a result of that gate and not the end of the others. Without a GPU nothing is
measured; ``--tiny`` then runs the gates' code on the CPU at tiny sizes, to see that it works.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import harness

from canvaslm.reporting.benches import Scalar
from canvaslm.reporting.files import write_json
from gpu_gate import Found, Place, told

_ALL_S = 590.0  # of all gates together
_TINY_S = 40.0  # of one gate of the tiny form


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One question, the function that answers it, and the seconds that it may take."""

    name: str
    run: str  # module:function
    budget_s: float
    ratios: tuple[str, ...]  # those that it owes


GATES = (
    Gate(name="draws", run="gpu_training:draws", budget_s=60, ratios=("equal",)),
    Gate(name="bfloat16", run="gpu_passes:bfloat16", budget_s=60, ratios=("loss_distance",)),
    Gate(
        name="attention",
        run="gpu_passes:attention",
        budget_s=100,
        ratios=("ours_over_dense_mask",),
    ),
    Gate(
        name="loss",
        run="gpu_passes:loss",
        budget_s=80,
        ratios=("ours_over_best_peer", "ours_over_products"),
    ),
    Gate(
        name="step",
        run="gpu_training:step",
        budget_s=200,
        ratios=("share_of_peak", "16x2/peak_over_estimate", "8x4/peak_over_estimate"),
    ),
    Gate(name="resume", run="gpu_training:resume", budget_s=80, ratios=("equal",)),
    Gate(
        name="decode",
        run="gpu_decoding:decode",
        budget_s=120,
        ratios=tuple(f"batch{n}_steps16/over_twin" for n in (1, 8, 32)),
    ),
    Gate(
        name="compiled", run="gpu_training:compiled", budget_s=180, ratios=("compiled_over_eager",)
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one gate."""

    gate: Gate
    found: Found
    seconds: float
    failed: str = ""  # why the gate did not come to its end


def main() -> int:
    """Run every gate, print and write; exit 1 when one of them is broken or raised."""
    parser = harness.parser(__doc__, "gpu_gates")
    parser.add_argument("--gate", help=argparse.SUPPRESS)  # in a gate's own process
    options = parser.parse_args()
    harness.begin(options)
    if options.gate:
        return _answer(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lacks = "" if device.type == "cuda" else "needs a GPU, and torch finds none here"
    outcomes = []
    started = time.monotonic()
    for gate in harness.track(GATES, total=len(GATES), label="gates"):
        left_s = _ALL_S - (time.monotonic() - started)
        outcomes.append(_run(gate, options, left_s) if options.tiny or not lacks else _none(gate))
    return _finish(options, outcomes, lacks, device)


def _answer(options: argparse.Namespace) -> int:
    """In a gate's own process: answer, and write it down."""
    module, _, function = options.gate.partition(":")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = Place(device=device, tiny=options.tiny, rounds=options.rounds)
    try:
        found = getattr(importlib.import_module(module), function)(place)
    except Exception as error:  # whatever it is, it is this gate's result
        write_json(options.out, {"raised": told(error)})
        raise
    noted = harness.noted()
    write_json(options.out, {"found": asdict(found), "noted": noted})
    return 0


def _run(gate: Gate, options: argparse.Namespace, left_s: float) -> Outcome:
    """Run one gate in a fresh process, for as long as it may take."""
    budget_s = min(gate.budget_s, _TINY_S if options.tiny else left_s)
    if budget_s < 1:
        return Outcome(gate=gate, found=Found(), seconds=0.0, failed="no time was left for it")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [sys.executable, __file__, "--gate", gate.run, "--out", str(out)]
        words += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
        words += ["--tiny"] if options.tiny else []
        failed = _end_of(words, budget_s)
        written = json.loads(out.read_text()) if out.exists() else {}
    seconds = time.monotonic() - started
    if "found" not in written:
        failed = written.get("raised") or failed
        return Outcome(gate=gate, found=Found(), seconds=seconds, failed=failed)
    harness.note(written["noted"])
    return Outcome(gate=gate, found=Found(**written["found"]), seconds=seconds)


def _end_of(words: list[str], budget_s: float) -> str:
    """Run a process to its end or to the end of its time, and say what was wrong with it."""
    try:
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=budget_s)
    except subprocess.TimeoutExpired:
        return f"took longer than its {budget_s:.0f} s"
    if ran.returncode == 0:
        return ""
    sys.stderr.write(ran.stderr)
    return f"its process ended with status {ran.returncode}"


def _none(gate: Gate) -> Outcome:
    return Outcome(gate=gate, found=Found(), seconds=0.0)


def _finish(
    options: argparse.Namespace, outcomes: list[Outcome], lacks: str, device: torch.device
) -> int:
    """One table of gates and those of their figures; the figures of a CPU are no figures."""
    rows: list[dict[str, Scalar]] = [_row(outcome, lacks) for outcome in outcomes]
    ratios: dict[str, float | None] = {}
    reasons = {"gpu/": lacks} if lacks else {}
    fallbacks = []
    for outcome in outcomes:
        name, found = outcome.gate.name, outcome.found
        owed = dict.fromkeys(outcome.gate.ratios) | found.ratios
        ratios |= {f"gpu/{name}/{key}": None if lacks else owed[key] for key in owed}
        reasons |= {key: why for key, why in found.not_measured.items() if not lacks}
        if outcome.failed:
            reasons[f"gpu/{name}/"] = outcome.failed
        rows += [{"gate": name, **row} for row in found.rows] if not lacks else []
        fallbacks += found.fallbacks
    harness.finish(
        options,
        rows=rows,
        ratios=ratios,
        not_measured=reasons,
        fallbacks=fallbacks,
        device=device,
    )
    return 1 if any(outcome.failed or outcome.found.broken for outcome in outcomes) else 0


def _row(outcome: Outcome, lacks: str) -> dict[str, Scalar]:
    """What came of a gate as a whole."""
    broken = "; ".join(outcome.found.broken) or outcome.failed
    verdict = "fail" if broken else "not_measured" if lacks else "pass"
    return {
        "gate": outcome.gate.name,
        "verdict": verdict,
        "why": broken or (f"{lacks}; its code ran here" if lacks and outcome.seconds else lacks),
        "took_s": round(outcome.seconds, 1),
        "budget_s": outcome.gate.budget_s,
    }


if __name__ == "__main__":
    sys.exit(main())
