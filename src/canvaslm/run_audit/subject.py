"""What is audited: a finished run, opened with everything that it came from?"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from canvaslm.checkpoint import load_trained_model
from canvaslm.checkpoint_state import State, read_state
from canvaslm.corpus.windows import Windows
from canvaslm.device import pick_device
from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone
from canvaslm.reporting.progress import Track
from canvaslm.run_audit.params import AuditRunParams
from canvaslm.training.job import Job, make_job
from canvaslm.training.plan import Recipe


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A finished run, open for reading; no check may change what is in it.

    Attributes:
        recipe: what the params say is trained.
        job: the run that those params, data and code make.
        checkpoint: the directory of the final checkpoint.
        state: what the checkpoint says of itself.
        model: its model, on ``device``, in evaluation mode.
        train: the windows that the run reads.
        held_out: the windows of the validation split.
        loss_rows: ``loss.csv`` as text, by column.
        eot_id: the end-of-text id of the shards.
        params: the audit's own knobs.
        device: where the audit computes.
        shards: the folder of the shards.
        reports: the folder of the run's reports.
        tokenizer: the file of the tokenizer.
        corpus: the metrics of `collect_documents`.
        track: shows how far a long loop is.
    """

    recipe: Recipe
    job: Job
    checkpoint: Path
    state: State
    model: Backbone
    train: Windows
    held_out: Windows
    loss_rows: list[dict[str, str]]
    eot_id: int
    params: AuditRunParams
    device: torch.device
    shards: Path
    reports: Path
    tokenizer: Path
    corpus: dict[str, Any]
    track: Track


def open_subject(
    recipe: Recipe,
    *,
    params: AuditRunParams,
    checkpoint: Path,
    shards: Path,
    tokenizer: Path,
    reports: Path,
    corpus_metrics: Path,
    code_digest: str,
    track: Track,
) -> Subject:
    """Open a finished run.

    Args:
        recipe: what the params say is trained.
        params: the audit's own knobs.
        checkpoint: the directory of the final checkpoint.
        shards: the folder of the shards.
        tokenizer: the file of the tokenizer.
        reports: the folder of the run's reports, with ``loss.csv``.
        corpus_metrics: ``metrics.json`` of `collect_documents`.
        code_digest: digest of all code that `pretrain` can reach.
        track: shows how far a long loop is.

    Raises:
        InputError: a file is missing or cannot be read, or the checkpoint is not whole.
    """
    device = pick_device(params.device)
    job = make_job(recipe, shards=shards, code_digest=code_digest)
    return Subject(
        recipe=recipe,
        job=job,
        checkpoint=checkpoint,
        state=read_state(checkpoint),
        model=load_trained_model(checkpoint).to(device),
        train=job.windows,
        held_out=Windows(shards, "val", recipe.layout.window_tokens),
        loss_rows=_read_rows(reports / "loss.csv"),
        eot_id=job.windows.manifest.eot_id,
        params=params,
        device=device,
        shards=shards,
        reports=reports,
        tokenizer=tokenizer,
        corpus=_read_object(corpus_metrics),
        track=track,
    )


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines, strict=True, restval="", restkey="more"))
    except (FileNotFoundError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, "a loss log", error) from None
    return rows


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise _unreadable(path, "a report in JSON", error) from None
    if not isinstance(content, dict):
        raise _unreadable(path, "a report in JSON", ValueError("no object"))
    return content


def _unreadable(path: Path, expected: str, error: Exception) -> InputError:
    got = "none" if isinstance(error, FileNotFoundError) else str(error)
    return InputError(path, expected=expected, got=got, fix="run `dvc repro` for this run")
