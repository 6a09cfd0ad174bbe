"""What does an ablation ask, which one parameter varies, and what stays as it is?

The answer is a file of ``docs/ablations/`` that is committed before anything runs. Values of the
pipeline stay in the profile that it names; it holds the few that differ.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from canvaslm.errors import InputError
from canvaslm.params import Params, nearest_name, parse_section, read_yaml

Value = bool | int | float | str | list[bool | int | float | str] | None
Changes = dict[str, Value]  # by dotted key of params.yaml

SEED = "pretrain.seed"
STEPS = "pretrain.steps"
_LENGTH = (STEPS, "pretrain.warmup_steps", "pretrain.decay_steps")
_NAME = r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*"
_METRICS = r"reports/(\w+)(?:/(\w+))?/metrics\.json"


class Documents(Params):
    """The table that a figure is the total of: one row for each held-out document."""

    file: str = Field(pattern=r"^reports/\w+/\w+\.csv$", description="columns document and tokens")
    column: str = Field(description="its sum over the sum of tokens is the figure")


class Measure(Params):
    """One figure of a report."""

    file: str = Field(pattern=f"^{_METRICS}$", description="a report that the pipeline writes")
    key: str = Field(description="dotted key in it")
    better: Literal["lower", "higher"] = Field(description="which direction is a gain")
    documents: Documents | None = Field(
        default=None, description="where given, arms are paired document by document"
    )

    @property
    def place(self) -> str:
        """The report, dotted as its folders are nested."""
        found = re.fullmatch(_METRICS, self.file)
        assert found is not None, self.file
        return ".".join(part for part in found.groups() if part)

    @property
    def stage(self) -> str:
        """The stage of ``dvc.yaml`` that writes the report, with the item of a matrix."""
        return self.place.replace(".", "@")


BOUND = Measure(
    file="reports/eval_loss_parity/metrics.json",
    key="diffusion.bound_nats_per_token",
    better="lower",
    documents=Documents(file="reports/eval_loss_parity/by_document.csv", column="bound_nats"),
)


class Decision(Params):
    """The rule by which a difference counts."""

    paired_interval_excludes: float = Field(
        ge=0,
        description="an arm is better, or worse, when the paired interval of its difference to the "
        "baseline lies wholly beyond this much, in units of the measure",
    )
    confidence: float = Field(gt=0.5, lt=1, description="of the interval")


class Timing(Params):
    """How the seconds of an optimiser step are measured, for all arms in turn."""

    steps: int = Field(ge=1, description="step numbers, spread evenly over each arm's run")
    rounds: int = Field(ge=1, description="times that each of them is taken; the middle one counts")
    warmup_rounds: int = Field(ge=0, description="rounds before, which are not kept")


class Fixed(Params):
    """What may not change between two arms; written by a command, never by hand."""

    data_manifest_sha256: str = Field(description="of the shards that all arms read")
    code: dict[str, str] = Field(description="hash of reports/code/STAGE.json, by stage")


class Spec(Params):
    """One ablation, as its file states it."""

    id: str = Field(pattern=f"^{_NAME}$", description="the name of its file")
    question: str = Field(min_length=1, description="what one wants to know")
    hypothesis: str = Field(min_length=1, description="what one expects, and why")
    profile: str = Field(description="a file of configs/")
    overrides: Changes = Field(description="changes to the profile that hold for all arms")
    varies: str = Field(description="the one parameter that differs between arms")
    follows: dict[str, str] = Field(
        default={}, description="parameters that have to change with it, each with the reason"
    )
    arms: dict[str, Changes] = Field(min_length=2, description="values of the arms, by name")
    baseline: str = Field(description="the arm that the others are held against")
    reference_lengths: dict[str, Changes] = Field(
        default={}, description="the baseline trained for fewer and more steps, by name"
    )
    seeds: list[int] = Field(min_length=1, description=f"values of {SEED}")
    measure: Measure = Field(default=BOUND, description="what is judged")
    also: list[Measure] = Field(default=[], description="what is shown beside it, and not judged")
    decision: Decision
    timing: Timing
    does_not_establish: list[str] = Field(min_length=1, description="what nobody may conclude")
    fixed: Fixed | None = Field(default=None, description="what is held fixed")

    @property
    def measures(self) -> list[Measure]:
        """Everything that is read from reports, the judged figure first."""
        return [self.measure, *self.also]

    @property
    def targets(self) -> list[str]:
        """The stages that have to run."""
        return sorted({measure.stage for measure in self.measures})

    @property
    def guarded(self) -> list[str]:
        """The scripts whose code is held fixed."""
        return sorted({"pretrain", *(stage.partition("@")[0] for stage in self.targets)})


def spec_path(root: Path, name: str) -> Path:
    """Where an ablation's file lies."""
    return root / "docs" / "ablations" / f"{name}.yaml"


def report_folder(root: Path, spec: Spec) -> Path:
    """Where the result of an ablation lies; it is committed."""
    return root / "reports" / "ablations" / spec.id


def read_spec(root: Path, name: str) -> Spec:
    """Read an ablation and refuse one that varies more than it says.

    Raises:
        InputError: there is no such file, a key is unknown or missing, an arm sets something else
            than what varies and what follows, or two arms are the same.
    """
    path = spec_path(root, name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise InputError(path, expected="an ablation", got="no such file", fix=f"there are {known}")
    spec = parse_section(read_yaml(path), Spec, where=str(path))
    for key, expected, got in _faults(spec, name):
        raise InputError(f"{path}:{key}", expected=expected, got=got, fix="correct the file")
    return spec


def frozen(root: Path, spec: Spec) -> Fixed:
    """What is held fixed.

    Raises:
        InputError: it has not been written down.
    """
    if spec.fixed is None:
        raise InputError(
            spec_path(root, spec.id),
            expected="what is held fixed",
            got="none",
            fix=f"run `python stages/ablate.py --id {spec.id} --do freeze`, and commit the file",
        )
    return spec.fixed


def _faults(spec: Spec, name: str) -> Iterator[tuple[str, str, str]]:
    """What makes no sense: where, what would, and what is there."""
    if spec.id != name:
        yield "id", repr(name), repr(spec.id)
    if spec.baseline not in spec.arms:
        yield "baseline", f"one of {', '.join(spec.arms)}", repr(spec.baseline)
    names = [*spec.arms, *spec.reference_lengths]
    for arm in names:
        if not re.fullmatch(_NAME, arm):
            yield arm, "small letters, digits and underscores", repr(arm)
        if names.count(arm) > 1:
            yield arm, "names that differ", f"{arm!r} among arms and among reference_lengths"
    if len(set(spec.seeds)) < len(spec.seeds):
        yield "seeds", "seeds that differ", repr(spec.seeds)
    taken = {spec.varies: "varies", SEED: "seeds"} | dict.fromkeys(spec.follows, "follows")
    for key in spec.overrides:
        if key in taken:
            yield f"overrides.{key}", "a parameter that no arm sets", f"one of `{taken[key]}`"
    if SEED in (spec.varies, *spec.follows):
        yield "varies", "a parameter", f"{SEED}, of which `seeds` has the values"
    yield from _arm_faults(spec)


def _arm_faults(spec: Spec) -> Iterator[tuple[str, str, str]]:
    allowed = [spec.varies, *spec.follows]
    for arm, changes in spec.arms.items():
        for key in changes:
            if key not in allowed:
                yield f"arms.{arm}", f"values of {', '.join(allowed)} alone", f"one of {key} too"
        if arm != spec.baseline and spec.varies not in changes:
            yield f"arms.{arm}", f"a value of {spec.varies}", "none"
    for arm, changes in spec.reference_lengths.items():
        for key in changes:
            if key not in _LENGTH:
                yield f"reference_lengths.{arm}", f"values of {', '.join(_LENGTH)}", key
        if STEPS not in changes:
            yield f"reference_lengths.{arm}", f"a value of {STEPS}", "none"


def with_changes(
    params: Mapping[str, Any], changes: Mapping[str, Value], *, where: str
) -> dict[str, Any]:
    """Params with a few values changed.

    Args:
        params: sections with their values, as ``params.yaml`` holds them.
        changes: new values by dotted key.
        where: what names the keys, for the message.

    Raises:
        InputError: there is no such key.
    """
    changed = {name: dict(part) if isinstance(part, Mapping) else part for name, part in
               params.items()}  # fmt: skip
    for key, value in changes.items():
        section, _, knob = key.partition(".")
        if not isinstance(changed.get(section), dict) or knob not in changed[section]:
            known = [f"{name}.{x}" for name, part in params.items()
                     if isinstance(part, Mapping) for x in part]  # fmt: skip
            raise InputError(
                where, expected="a key of params.yaml", got=key, fix=nearest_name(key, known)
            )
        changed[section][knob] = value
    return changed
