"""What are the seconds of a step, as they were measured for the arms of this very ablation?

They are measured apart from this, by what needs torch; a table reads them and needs none.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from canvaslm.ablation.arms import Arm, find_arms
from canvaslm.ablation.spec import Spec, frozen
from canvaslm.reporting.files import to_json, write_json

_FILE = "seconds.json"


def timed_arms(root: Path, spec: Spec) -> list[Arm]:
    """The arms whose steps differ: a length of the baseline takes the baseline's."""
    arms = find_arms(root, spec)
    return [arm for arm in arms.values() if arm.name not in spec.reference_lengths]


def write_seconds(
    root: Path,
    spec: Spec,
    folder: Path,
    *,
    medians_s: Mapping[str, Sequence[float]],
    machine: Mapping[str, str | int],
) -> None:
    """Keep what was measured, with what it is of.

    Args:
        root: the repository.
        spec: the ablation.
        folder: of its report.
        medians_s: of each arm, the middle round of each step number.
        machine: where it was measured.
    """
    content = {
        "of": _digest(root, spec),
        "step_seconds": {name: fmean(values) for name, values in medians_s.items()},
        "medians_s": {name: list(values) for name, values in medians_s.items()},
        "machine": dict(machine),
    }
    write_json(folder / _FILE, content)


def read_seconds(root: Path, spec: Spec, folder: Path) -> dict[str, float]:
    """Seconds of a step of every arm and length; empty where none of this ablation are there."""
    try:
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("of") != _digest(root, spec):
        return {}
    measured = content["step_seconds"]
    return measured | dict.fromkeys(spec.reference_lengths, measured[spec.baseline])


def _digest(root: Path, spec: Spec) -> str:
    """What was timed: the arms' params, with which code, and how."""
    what = {
        "arms": {arm.name: arm.params for arm in timed_arms(root, spec)},
        "code": frozen(root, spec).code["pretrain"],
        "timing": spec.timing.model_dump(),
    }
    return hashlib.sha256(to_json(what).encode()).hexdigest()
