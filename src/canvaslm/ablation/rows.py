"""Which figures are taken from the experiments of an ablation, and may they stand side by side?"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvaslm.ablation.arms import Trial
from canvaslm.ablation.experiments import Experiment, find_revisions, unpacked
from canvaslm.ablation.refusals import TRAINING, faults
from canvaslm.ablation.spec import Documents, Measure, Spec, frozen, spec_path
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams
from canvaslm.params import parse_section
from canvaslm.reporting.collected import read_whole_metrics
from canvaslm.reporting.provenance import look_up
from canvaslm.training.identity import identity_name, run_identity
from canvaslm.training.plan import PretrainParams, Recipe, recipe

_SAME_FIGURE = 1e-9  # relative: a table and its total, both from the same float64 sums


@dataclass(frozen=True, kw_only=True)
class Row:
    """One experiment that was believed, and what is taken from it.

    Attributes:
        trial: the arm and the seed.
        rev: the experiment's commit.
        figures: of the measure and of what is shown beside it, in that order.
        documents: numbers of the held-out documents (G,), None where the measure has no table.
        tokens: (G,) of each.
        amounts: (G,) of each, whose sum over the sum of tokens is the figure.
        steps: optimiser steps.
        flops: floating-point operations of the training.
        model_sha256: of its weights.
    """

    trial: Trial
    rev: str
    figures: tuple[float, ...]
    documents: np.ndarray | None
    tokens: np.ndarray
    amounts: np.ndarray
    steps: int
    flops: float
    model_sha256: str


def collect(root: Path, spec: Spec, trials: Sequence[Trial]) -> list[Row]:
    """The row of every trial.

    Raises:
        InputError: nothing was frozen, one is missing, unfinished or not what it says, two show one
            model, or they were not scored on the same tokens.
    """
    frozen(root, spec)
    rows = []
    for trial in trials:
        row = find_row(root, spec, trial)
        if row is None:
            raise InputError(
                f"arm {trial.arm}, seed {trial.seed}",
                expected=f"a finished experiment {trial.name}",
                got="none: it was not run, or was killed",
                fix=f"run `make ablate ID={spec.id}`, which goes on where it stopped",
            )
        rows.append(row)
    refuse_ghosts(rows)
    _refuse_other_tokens(rows)
    return rows


def find_row(root: Path, spec: Spec, trial: Trial) -> Row | None:
    """The newest experiment of a trial that was started from the ablation's file as it is now.

    Returns:
        The row, or None where there is no such experiment.

    Raises:
        InputError: there is one, and it is not what it says.
    """
    path = spec_path(root, spec.id)
    for rev in find_revisions(root, trial.name):
        with unpacked(root, trial.name, rev) as experiment:
            stated = experiment.file_before(path.relative_to(root).as_posix())
            if stated == path.read_bytes():
                return read_row(experiment, spec, trial)
    return None


def read_row(experiment: Experiment, spec: Spec, trial: Trial) -> Row:
    """Take a row from an experiment that is what it says.

    Raises:
        InputError: it is not.
    """
    metrics = read_whole_metrics(experiment.folder / "reports")[0]
    for expected, got in faults(experiment, spec, trial, metrics):
        raise InputError(experiment.name, expected=expected, got=got, fix=experiment.fix)
    training = look_up(metrics, TRAINING)
    figures = tuple(_figure(experiment, measure) for measure in spec.measures)
    documents, tokens, amounts = _table(experiment, spec.measure.documents, figures[0])
    return Row(
        trial=trial,
        rev=experiment.rev,
        figures=figures,
        documents=documents,
        tokens=tokens,
        amounts=amounts,
        steps=training["steps"],
        flops=float(training["flops"]),
        model_sha256=training["model_sha256"],
    )


def training_recipe(params: Mapping[str, Any], where: str) -> Recipe:
    """What the denoiser of a trial trains.

    Raises:
        InputError: a value does not fit.
    """
    return recipe(
        "diffusion",
        layout=parse_section(params["layout"], Layout, where=where),
        model=parse_section(params["model"], ModelParams, where=where),
        diffusion=parse_section(params["diffusion"], DiffusionParams, where=where),
        pretrain=parse_section(params["pretrain"], PretrainParams, where=where),
    )


def recipe_name(params: Mapping[str, Any], where: str) -> str:
    """Name what decides the weights of a trial's denoiser, data and code apart."""
    return identity_name(
        run_identity(
            training_recipe(params, where),
            manifest_sha256="",
            tokenizer_sha256="",
            eot_id=0,
            shards={},
            code_digest="",
            parent=None,
        )
    )


def _figure(experiment: Experiment, measure: Measure) -> float:
    content = json.loads((experiment.folder / measure.file).read_text(encoding="utf-8"))
    value = look_up(content, measure.key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(
            f"{experiment.name}:{measure.file}",
            expected=f"a number under {measure.key}",
            got=repr(value),
            fix="correct the key in the ablation's file, or see why nothing was measured",
        )
    return float(value)


def _table(
    experiment: Experiment, table: Documents | None, figure: float
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Documents, tokens and amounts of the measure; without a table all is one document."""
    if table is None:
        return None, np.ones(1), np.array([figure])
    rows = list(csv.DictReader(io.StringIO(experiment.cached(table.file).decode())))
    documents = np.array([int(row["document"]) for row in rows])
    tokens, amounts = (
        np.array([float(row[name]) for row in rows]) for name in ("tokens", table.column)
    )
    total = amounts.sum() / tokens.sum()
    if not abs(total - figure) <= _SAME_FIGURE * abs(figure):
        raise InputError(
            f"{experiment.name}:{table.file}",
            expected=f"rows that come to {figure}",
            got=str(total),
            fix=experiment.fix,
        )
    return documents, tokens, amounts


def refuse_ghosts(rows: Sequence[Row]) -> None:
    """Two settings with one model: the parameter reached nothing, or a row is another's.

    A running mean leaves the last weights as they are; it is known by what it scores.
    """
    owners: dict[tuple[str | bytes, ...], tuple[str, Trial]] = {}
    for row in rows:
        params = row.trial.params
        plain = {**params, "pretrain": {**params["pretrain"], "ema_decay": 0.0}}
        shown = {
            (row.model_sha256,): plain,
            (row.model_sha256, row.amounts.tobytes()): params,
        }
        for sight, reached in shown.items():
            name = recipe_name(reached, row.trial.name)
            owner, other = owners.setdefault(sight, (name, row.trial))
            if owner != name:
                raise InputError(
                    row.trial.name,
                    expected="a model of its own, since its training has other params",
                    got=f"that of {other.name} ({row.model_sha256[:12]})",
                    fix=f"`dvc exp remove {row.trial.name}`, or vary what a training reads",
                )


def _refuse_other_tokens(rows: Sequence[Row]) -> None:
    first = rows[0]
    for row in rows[1:]:
        same = (first.documents is None) == (row.documents is None)
        same = same and np.array_equal(first.tokens, row.tokens)
        if first.documents is not None and row.documents is not None:
            same = same and np.array_equal(first.documents, row.documents)
        if not same:
            raise InputError(
                row.trial.name,
                expected=f"scores on the tokens of {first.trial.name}",
                got="others",
                fix="vary nothing that changes which held-out windows are scored",
            )
