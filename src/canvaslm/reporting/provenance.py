"""Was a report made from what lies here now, or is it left over from another run?

Reports alone tell two things. What evaluates a model says which, by the hash of its weights, and
`pretrain` says which model it made; and behind a gate that is closed nothing has run. DVC's record
of its last run tells the rest: the values, and the files, that a stage was run with.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from canvaslm.errors import InputError
from canvaslm.params import read_yaml

_TRAININGS = ("pretrain.autoregressive", "pretrain.diffusion")
_AUDITS = ("audit_run.autoregressive", "audit_run.diffusion")
_MODEL = "trained_model_sha256"
# What a report is behind, upstream first: when that fails, no stage of the pipeline gets there.
_GATES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_TRAININGS, ("audit_windows",)),
    **dict(zip(_AUDITS, ((place,) for place in _TRAININGS), strict=True)),
    "eval_bound": _AUDITS,
    "eval_loss_parity": _AUDITS,
    "eval_samples": _AUDITS,
    "eval_speedup": _AUDITS,
}
# Where a report says which model it is about, for each training.
_ABOUT: Mapping[str, Mapping[str, str]] = {
    "audit_run.autoregressive": {"pretrain.autoregressive": _MODEL},
    "audit_run.diffusion": {"pretrain.diffusion": _MODEL},
    "eval_bound": {
        "pretrain.autoregressive": f"autoregressive.{_MODEL}",
        "pretrain.diffusion": f"diffusion.{_MODEL}",
    },
    "eval_loss_parity": {
        "pretrain.autoregressive": f"autoregressive.{_MODEL}",
        "pretrain.diffusion": f"diffusion.{_MODEL}",
    },
    "eval_samples": {
        "pretrain.autoregressive": f"autoregressive_training.{_MODEL}",
        "pretrain.diffusion": f"diffusion_training.{_MODEL}",
    },
    "eval_speedup": {
        "pretrain.autoregressive": f"autoregressive_training.{_MODEL}",
        "pretrain.diffusion": f"diffusion_training.{_MODEL}",
    },
}
_REPRO = "run `make repro`"


class _File(BaseModel):
    """A dependency or an output as DVC writes it."""

    path: str
    md5: str | None = None


class _Stage(BaseModel):
    """What DVC notes of the last run of a stage."""

    deps: list[_File] = []
    outs: list[_File] = []
    params: dict[str, dict[str, Any]] = {}


class _Lock(BaseModel):
    """The parts of ``dvc.lock`` that are read here; one that was cut often is YAML still."""

    stages: dict[str, _Stage]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What DVC wrote down of its last run, beside what lies here now.

    Attributes:
        root: the folder that the paths of the record start from.
        lock: the content of ``dvc.lock``.
        params: the content of the params file.
    """

    root: Path
    lock: Mapping[str, Any]
    params: Mapping[str, Any]

    @classmethod
    def read(cls, lock: Path, params: Path, *, root: Path) -> Self | None:
        """Read a record; None where DVC left none, or one that was cut in writing."""
        try:
            content = read_yaml(lock)
            _Lock.model_validate(content)
        except (InputError, ValidationError):
            return None
        return cls(root=root, lock=content, params=read_yaml(params))

    def knows(self, place: str) -> bool:
        """Whether a report is the one that its stage wrote when DVC last ran it to its end.

        A place within a report, such as ``eval_bound.proof``, is known as its report is.
        """
        path = f"reports/{place.replace('.', '/')}/metrics.json"
        outs = self._stage(place.replace(".", "@")).get("outs", [])
        recorded = next((out.get("md5") for out in outs if out.get("path") == path), None)
        if recorded is not None:
            return recorded == _md5(self.root / path)
        around = place.rpartition(".")[0]
        return bool(around) and self.knows(around)

    def change_since(self, stage: str) -> str | None:
        """What a stage, or one before it, would find otherwise than when it last ran."""
        return next(self._changes(stage, frozenset()), None)

    def _changes(self, stage: str, seen: frozenset[str]) -> Iterator[str]:
        recorded = self._stage(stage)
        for section, values in recorded.get("params", {}).get("params.yaml", {}).items():
            if self.params.get(section) != values:
                yield f"made with other values of `{section}`"
        for dep in recorded.get("deps", []):
            path, md5 = dep["path"], dep.get("md5")
            maker, made = self._maker(path)
            here = _md5(self.root / path)
            if {made, here} - {None, md5}:
                yield f"made from another `{path}`"
            elif maker is not None and maker not in seen:
                yield from self._changes(maker, seen | {stage})

    def _stage(self, name: str) -> Mapping[str, Any]:
        return (self.lock.get("stages") or {}).get(name) or {}

    def _maker(self, path: str) -> tuple[str | None, str | None]:
        """The stage that wrote a file or a folder, and its hash then."""
        for name, stage in (self.lock.get("stages") or {}).items():
            for out in stage.get("outs", []):
                if out["path"] == path:
                    return name, out.get("md5")
        return None, None


def find_stale(metrics: Mapping[str, Any], record: Record | None = None) -> dict[str, str]:
    """Name the reports that are not of the run that lies here, and say why.

    What cannot be told is not named: a report that says nothing of its model beside a training that
    says nothing either, and, without a record, other values and other files.

    Args:
        metrics: the figures of all reports.
        record: of DVC's last run; it speaks of those reports only that are that run's.
    """
    stale: dict[str, str] = {}
    judged = ("audit_windows", "docs_gate", *_GATES)
    for place in judged:
        if not isinstance(look_up(metrics, place), Mapping):
            continue
        reasons = [*_closed_gates(metrics, place), *_other_models(metrics, place)]
        reasons += [stale[gate] for gate in _GATES.get(place, ()) if gate in stale]
        if not reasons and record is not None and record.knows(place):
            change = record.change_since(place.replace(".", "@"))
            reasons += [f"{change}; {_REPRO}"] if change else []
        if reasons:
            stale[place] = reasons[0]
    return stale


def without(metrics: Mapping[str, Any], stale: Mapping[str, str]) -> dict[str, Any]:
    """The figures but for those of some reports."""

    def kept(part: Mapping[str, Any], outer: str) -> dict[str, Any]:
        rest = {name: value for name, value in part.items() if f"{outer}{name}" not in stale}
        nested = {place.rpartition(".")[0] for place in stale}
        return {
            name: kept(value, f"{outer}{name}.") if f"{outer}{name}" in nested else value
            for name, value in rest.items()
        }

    return kept(metrics, "")


def look_up(metrics: Any, dotted: str) -> Any:
    """The value of a dotted key, or None where it is not there."""
    for part in dotted.split("."):
        metrics = metrics.get(part) if isinstance(metrics, Mapping) else None
    return metrics


def _closed_gates(metrics: Mapping[str, Any], place: str) -> Iterator[str]:
    for gate in _GATES.get(place, ()):
        if look_up(metrics, f"{gate}.verdict") == "fail":
            yield f"made from another run: {gate} fails; mend that, then {_REPRO}"
        yield from _closed_gates(metrics, gate)


def _other_models(metrics: Mapping[str, Any], place: str) -> Iterator[str]:
    report = look_up(metrics, place)
    for training, key in _ABOUT.get(place, {}).items():
        if not isinstance(
            look_up(report, key.rpartition(".")[0]) if "." in key else report, Mapping
        ):
            continue  # forwards were counted, and no model was read
        if not isinstance(look_up(metrics, training), Mapping):
            yield f"made from another run: no report of {training} lies here; {_REPRO}"
        elif look_up(report, key) != look_up(metrics, f"{training}.model_sha256"):
            yield f"made from another model than that of {training}; {_REPRO}"


def _md5(file: Path) -> str | None:
    """The hash of a file; None of what is none."""
    if not file.is_file():
        return None
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
