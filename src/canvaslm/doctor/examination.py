"""In which order are the first tests of the debugging guide tried, and on what does each rest?

A probe rests on those before it that make its answer mean something; where one of them did not
pass, it is not carried out. All others are, whatever fails.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from canvaslm.doctor.arithmetic import ARITHMETIC
from canvaslm.doctor.decoding import DECODING
from canvaslm.doctor.documents import DOCUMENTS
from canvaslm.doctor.inputs import INPUTS
from canvaslm.doctor.outcomes import GATES, OUTCOMES
from canvaslm.doctor.patient import Patient, Places
from canvaslm.doctor.probe import Finding, NotThereError, Probe
from canvaslm.doctor.records import RECORDS
from canvaslm.errors import InputError
from canvaslm.reporting.verdict import Verdict
from canvaslm.training.plan import ObjectiveKind

T = TypeVar("T")
PROBES = (*INPUTS, *RECORDS, *GATES, *ARITHMETIC, *DECODING, *OUTCOMES, *DOCUMENTS)


def examine(
    places: Places, objectives: Sequence[ObjectiveKind], announce: Callable[[str], None]
) -> Iterator[Finding]:
    """Carry out every probe on every run, in the order in which one rests on another.

    Args:
        places: where the runs and what they are made of lie.
        objectives: whose runs.
        announce: is told what is looked at next, before it is.

    Raises:
        InputError: there is no params file, so that nothing can be said of any run.
    """
    if not places.params.is_file():
        fix = "run `make profile NAME=laptop`, or name one with --params"
        raise InputError(places.params, expected="a params file", got="none", fix=fix)

    def track(items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
        for number, item in enumerate(items, start=1):
            announce(f"{label}: {number}/{total}")
            yield item

    patients = [Patient(places, objective, track) for objective in objectives]
    due = [
        (probe, patient)
        for probe in PROBES
        for patient in (patients[:1] if probe.is_shared else patients)
        if probe.twin or patient.objective != "autoregressive"
    ]
    passed: dict[str, set[str]] = {objective: set() for objective in objectives}
    for number, (probe, patient) in enumerate(due, start=1):
        objective = "" if probe.is_shared else patient.objective
        announce(f"{number}/{len(due)} {probe.section} {objective}".rstrip())
        finding = _carry_out(probe, patient, objective, passed[patient.objective])
        if finding.verdict == "pass":
            for each in [patient] if objective else patients:
                passed[each.objective].add(probe.name)
        yield finding


def _carry_out(probe: Probe, patient: Patient, objective: str, passed: set[str]) -> Finding:
    """Whatever breaks on the way is what the probe found."""
    missing = [name for name in probe.rests_on if name not in passed]
    if missing:
        told = f"rests on {missing[0]}, which did not pass"
        return _finding(probe, objective, "not_measured", told)
    try:
        seen = probe.look(patient)
    except NotThereError as absent:
        return _finding(probe, objective, "not_measured", absent.what, next_step=absent.command)
    except InputError as error:
        told = f"{error.where}: expected {error.expected}, got {error.got}"
        return _finding(probe, objective, "fail", told, next_step=error.fix)
    except Exception as error:  # the other probes still count, and nobody is shown a traceback
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return _finding(probe, objective, "fail", told, next_step="run the tests of this section")
    return _finding(
        probe,
        objective,
        "pass" if seen.holds else "fail",
        seen.measured,
        looked_at=seen.looked_at,
        next_step="" if seen.holds else seen.next_step,
    )


def _finding(
    probe: Probe,
    objective: str,
    verdict: Verdict,
    measured: str,
    *,
    looked_at: str | None = None,
    next_step: str = "",
) -> Finding:
    return Finding(
        probe=probe.name,
        symptom=probe.section,
        anchor=probe.anchor,
        objective=objective,
        looked_at=probe.name.replace("_", " ") if looked_at is None else looked_at,
        measured=measured,
        verdict=verdict,
        next_step=next_step,
    )
