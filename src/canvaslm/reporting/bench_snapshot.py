"""What do the docs keep of the benches: all results, and what came of each bound?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canvaslm.errors import InputError
from canvaslm.reporting.benches import BenchResult
from canvaslm.reporting.bounds import Judged
from canvaslm.reporting.files import write_json


def bench_snapshot(results: Mapping[str, BenchResult], judged: Sequence[Judged]) -> dict[str, Any]:
    """Put results and judgements into what ``docs/measured/bench.json`` holds."""
    return {
        "benches": {name: result.model_dump() for name, result in results.items()},
        "bounds": [
            {
                "id": item.bound.id,
                "aim": item.bound.aim,
                "slack": item.bound.slack,
                "held": item.held,
                "why": item.bound.why,
                "ratio": item.ratio,
                "reached": _reached(item),
                "judgement": item.judgement,
                "reason": item.reason,
            }
            for item in judged
        ],
    }


def write_beside(results: Path, file: Path, snapshot: Mapping[str, Any]) -> None:
    """Write a snapshot, but not among the results, where it would be read as one of them.

    Raises:
        InputError: the file would lie in the folder of the results.
    """
    if file.resolve().parent == results.resolve():
        raise InputError(
            file,
            expected="a file outside of the results",
            got=f"one in {results}, where it would be read as a result",
            fix="write it elsewhere",
        )
    write_json(file, snapshot)


def _reached(item: Judged) -> float | None:
    """How much of the aim was reached: 1 is the aim, more is better."""
    bound, ratio = item.bound, item.ratio
    if ratio is None:
        return None
    shares = [] if bound.at_least is None else [ratio / bound.at_least]
    if bound.at_most is not None:
        shares.append(bound.at_most / ratio if ratio > 0 else 1.0)
    return min(shares)
