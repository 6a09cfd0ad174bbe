"""On what was a run trained, process by process?

A run may be killed here and go on there, with other threads or another build of torch, and equal
bytes are promised on one machine only. So each process that trains adds a line of its own. It is a
note and no part of the run: nothing is decided by it, and what is damaged is begun anew.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from canvaslm.device import describe_machine
from canvaslm.reporting.files import write_json
from canvaslm.training.plan import PretrainParams

MACHINE = "machine.json"

_HOW = (
    "precision",
    "micro_batch_windows",
    "vocab_chunk",
    "compile",
    "gradient_checkpointing",
    "loader_workers",
)

_log = logging.getLogger(__name__)


def note_machine(
    run: Path, *, device: torch.device, params: PretrainParams, from_step: int
) -> None:
    """Add this process to the ``machine.json`` of a run.

    Args:
        run: the run's folder, whose name is its identity's.
        device: where it trains.
        params: of which those are noted that say how sums are computed, and not what is.
        from_step: steps that were done when it began.
    """
    entry = {
        **describe_machine(device),
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        **{key: getattr(params, key) for key in _HOW},
        "from_step": from_step,
    }
    write_json(run / MACHINE, {"run": run.name, "processes": [*_known(run / MACHINE), entry]})


def _known(path: Path) -> list[Any]:
    """The processes before this one."""
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["processes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s cannot be read and begins anew: %s", path, error)
        return []
