"""Which run is the user's own, and what is there of it?

Everything is opened for reading and only when a probe asks. The run is that of the params, the data
and the code of this moment where its folder exists; else that of the final checkpoint; else the one
of this objective that differs least, since an edit gives a run another name.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from canvaslm.checkpoint import latest_complete, load_trained_model
from canvaslm.checkpoint_state import STATE, State, number_of, read_state
from canvaslm.code_fingerprint import fingerprint
from canvaslm.corpus.windows import Windows
from canvaslm.device import pick_device
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.doctor.probe import NotThereError
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams
from canvaslm.params import load_section
from canvaslm.reporting.differences import Difference, differences
from canvaslm.reporting.progress import Track
from canvaslm.run_audit.check import Check
from canvaslm.run_audit.flow import check_flow
from canvaslm.run_audit.params import AuditRunParams
from canvaslm.run_audit.subject import Subject
from canvaslm.training.identity import identity_name
from canvaslm.training.job import Job, make_job
from canvaslm.training.plan import ObjectiveKind, PretrainParams, Recipe, recipe


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a project keeps what its runs are made of.

    Attributes:
        root: the repository: sources, stages, docs.
        params: the params file.
        shards: the packed shards.
        tokenizer: their tokenizer.
        checkpoints: final checkpoints, one folder for each objective.
        reports: all reports.
        work: the states of runs.
        validate: reads every section of a params file, or raises an InputError.
    """

    root: Path
    params: Path
    shards: Path
    tokenizer: Path
    checkpoints: Path
    reports: Path
    work: Path
    validate: Callable[[Path], None]


class Patient:
    """The run of one objective, opened as far as a probe needs it.

    Args:
        places: where everything lies.
        objective: whose run.
        track: shows how far a long loop is.
    """

    def __init__(self, places: Places, objective: ObjectiveKind, track: Track) -> None:
        self.places = places
        self.objective: ObjectiveKind = objective
        self.track = track
        self.command = f"dvc repro pretrain@{objective}"
        self.reports = places.reports / "pretrain" / objective
        self.final = places.checkpoints / objective

    @cached_property
    def recipe(self) -> Recipe:
        """What the params say is trained."""
        path = self.places.params
        return recipe(
            self.objective,
            layout=load_section(path, "layout", Layout),
            model=load_section(path, "model", ModelParams),
            diffusion=load_section(path, "diffusion", DiffusionParams),
            pretrain=load_section(path, "pretrain", PretrainParams),
        )

    @cached_property
    def device(self) -> torch.device:
        """Where the run trains."""
        return pick_device(self.recipe.pretrain.device)

    @cached_property
    def job(self) -> Job:
        """The run that these params, this data and this code make."""
        self.refuse_absent_shards()
        digest = _code_digest(self.places.root)
        return make_job(self.recipe, shards=self.places.shards, code_digest=digest)

    @cached_property
    def held_out(self) -> Windows:
        """The windows of the validation split."""
        return Windows(self.places.shards, "val", self.recipe.layout.window_tokens)

    @cached_property
    def folder(self) -> Path | None:
        """The folder of the run's state, or None where it has none."""
        names = [identity_name(self.job.identity)]
        stored = self.stored_in(self.final)
        if stored is not None:
            names.append(identity_name(_plain(stored)))
        for name in names:
            if (self.places.work / name).is_dir():
                return self.places.work / name
        return None if stored is not None else self._nearest()

    @cached_property
    def numbered(self) -> list[Path]:
        """The checkpoints in that folder, by number."""
        if self.folder is None:
            return []
        found = [path for path in (self.folder / "checkpoints").glob("step_*") if path.is_dir()]
        return sorted(
            (path for path in found if number_of(path) is not None),
            key=lambda path: number_of(path) or 0,
        )

    @cached_property
    def checkpoint(self) -> Path:
        """The final checkpoint, or the newest whole one of a run that has not ended."""
        if self.final.exists():
            return self.final
        newest = None
        if self.folder is not None:
            newest = latest_complete(self.folder / "checkpoints", identity=None)
        if newest is None:
            raise self.absent("no checkpoint")
        return newest

    @property
    def closed(self) -> str | None:
        """Why the training was stopped by its gate, by its report; None where it was not."""
        try:
            report = json.loads((self.reports / "metrics.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # for a probe to tell
        if not isinstance(report, dict) or report.get("verdict") != "fail":
            return None
        return str(report.get("verdict_reason"))

    def absent(self, what: str) -> NotThereError:
        """Tell what is not there: a training made none yet, or was stopped before it could."""
        if self.closed is None:
            return NotThereError(f"{what} yet", command=self.command)
        told = f"{what}, since the training was stopped by its gate"
        return NotThereError(told, command="see training_kept_its_gate_open")

    @cached_property
    def subject(self) -> Subject:
        """The run as the audit takes it; nothing of it has to have ended."""
        params = load_section(self.places.params, "audit_run", AuditRunParams)
        return Subject(
            recipe=self.recipe,
            job=self.job,
            checkpoint=self.checkpoint,
            state=read_state(self.checkpoint),
            model=load_trained_model(self.checkpoint).to(self.device),
            train=self.job.windows,
            held_out=self.held_out,
            loss_rows=[],
            eot_id=self.job.windows.manifest.eot_id,
            params=params,
            device=self.device,
            shards=self.places.shards,
            reports=self.reports,
            tokenizer=self.places.tokenizer,
            corpus={},
            track=self.track,
        )

    @cached_property
    def flow(self) -> dict[str, Check]:
        """What the audit says of the flow of information, by name."""
        return {check.name: check for check in check_flow(self.subject)}

    def refuse_absent_shards(self) -> None:
        """Raise unless something was packed.

        Raises:
            NotThereError: nothing was.
        """
        if not self.places.shards.exists():
            told = f"no {self.places.shards}"
            raise NotThereError(told, command="dvc repro audit_windows")

    def stored_in(self, directory: Path) -> State | None:
        """What a checkpoint says of itself, if it can be read; damage is for a probe to tell."""
        try:
            return read_state(directory)
        except InputError:
            return None

    def unlike(self, state: State) -> list[Difference]:
        """In what a checkpoint's run differs from the run that the inputs would make now."""
        stored = _plain(state)
        return differences(stored, self.job.identity | {"parent": stored["parent"]})

    def _nearest(self) -> Path | None:
        """The folder of this objective's run that differs least."""
        found = []
        for path in sorted(self.places.work.glob(f"*/checkpoints/step_*/{STATE}")):
            state = self.stored_in(path.parent)
            if state is not None and state.identity.objective == self.objective:
                found.append((len(self.unlike(state)), path.parents[2]))
        return min(found)[1] if found else None


@functools.cache
def _code_digest(root: Path) -> str:
    """One hash over all code that a training can reach, as the stage takes it."""
    return fingerprint(root / "stages" / "pretrain.py", root)["digest"]


def _plain(state: State) -> dict[str, Any]:
    """The identity in a state as plain JSON values."""
    return state.identity.model_dump(mode="json")
