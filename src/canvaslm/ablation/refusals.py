"""Is an experiment what its row would say: this arm, this seed, and nothing else that differs?

It is believed only for what its own commit vouches for. Its params are the arm's, its ``dvc.lock``
is of these params from the first stage to the measured one, its reports are the ones that the lock
records, its data and its code are the frozen ones, and its training came to its end.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from canvaslm.ablation.arms import Trial
from canvaslm.ablation.experiments import Experiment
from canvaslm.ablation.spec import Fixed, Spec, frozen
from canvaslm.reporting.differences import differences, in_one_line
from canvaslm.reporting.provenance import Record, find_stale, look_up

TRAINING = "pretrain.diffusion"
_DATA = "audit_windows"


def faults(
    experiment: Experiment, spec: Spec, trial: Trial, metrics: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Everything that an experiment is not: what was expected, and what it is.

    Args:
        experiment: the experiment.
        spec: its ablation.
        trial: what it should be.
        metrics: the figures of its reports, nested as their folders are.
    """
    fixed = frozen(experiment.root, spec)
    yield from _other_params(experiment, trial)
    yield from _other_code(experiment, fixed)
    yield from _other_run(experiment, spec, metrics)
    yield from _other_data(metrics, fixed)
    yield from _unfinished(metrics, trial)


def _other_params(experiment: Experiment, trial: Trial) -> Iterator[tuple[str, str]]:
    found = differences(trial.params, experiment.params)
    if found:
        yield f"the values of arm {trial.arm} with seed {trial.seed}", in_one_line(found)


def _other_code(experiment: Experiment, fixed: Fixed) -> Iterator[tuple[str, str]]:
    """Each stage ran with the code that was frozen, by the hash of its fingerprint."""
    for script, md5 in fixed.code.items():
        path = f"reports/code/{script}.json"
        stages = [x for name, x in experiment.stages.items() if name.partition("@")[0] == script]
        found = {dep.get("md5") for x in stages for dep in x.get("deps", []) if dep["path"] == path}
        if found != {md5}:
            got = ", ".join(sorted(map(str, found))) or "no run of it"
            yield f"stages/{script}.py with the frozen code ({path} {md5})", got


def _other_run(
    experiment: Experiment, spec: Spec, metrics: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Each report is the one that its stage wrote in this very run: no ghost of another row."""
    record = Record.read(
        experiment.folder / "dvc.lock", experiment.folder / "params.yaml", root=experiment.folder
    )
    stale = find_stale(metrics, record)
    for place in dict.fromkeys((_DATA, TRAINING, *(measure.place for measure in spec.measures))):
        if record is None or not record.knows(place):
            yield f"the report of {place} that its dvc.lock records", "another one, or none"
        elif place in stale:
            yield f"a report of {place} from this run", stale[place]
        elif change := record.change_since(place.replace(".", "@")):
            yield f"a report of {place} from this run", change


def _other_data(metrics: Mapping[str, Any], fixed: Fixed) -> Iterator[tuple[str, str]]:
    found = look_up(metrics, f"{_DATA}.manifest_sha256")
    if found != fixed.data_manifest_sha256:
        yield f"the frozen data (manifest {fixed.data_manifest_sha256})", str(found)


def _unfinished(metrics: Mapping[str, Any], trial: Trial) -> Iterator[tuple[str, str]]:
    wanted, got = trial.params["pretrain"]["steps"], look_up(metrics, f"{TRAINING}.steps")
    if got != wanted:
        yield f"a training of {wanted} steps", str(got)
    if look_up(metrics, f"{TRAINING}.verdict") == "fail":
        yield "a training that learned", str(look_up(metrics, f"{TRAINING}.verdict_reason"))
