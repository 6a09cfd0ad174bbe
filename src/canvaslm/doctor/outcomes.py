"""What came of the run: did its loss fall, and what do its own reports judge?"""

import dataclasses
from typing import Any

from canvaslm.checkpoint_state import TENSOR_FILES
from canvaslm.doctor.patient import Patient
from canvaslm.doctor.probe import A_RUN, NotThereError, Probe, Seen
from canvaslm.doctor.records import read_report, read_rows
from canvaslm.run_audit.outcome import check_loss

_FEWEST_ROWS = 6  # of a log that is looked at in thirds
_FEWEST_STEPS = 100  # after which a loss should have fallen at all
_FALL = 0.01  # of the first third, by which the last third is to lie lower
_RISE = 0.25  # of the lowest third, by which the last third may lie above it
_RATES = "`pretrain.learning_rate` and `pretrain.muon_learning_rate`"
_LOWER = f"lower {_RATES} tenfold, or raise `pretrain.warmup_steps`"


def _look_at_loss(patient: Patient) -> Seen:
    """The log of the loss: its last row against a uniform guess, and its course in thirds."""
    path = patient.reports / "loss.csv"
    if not path.is_file():
        raise NotThereError("no loss log yet", command=patient.command)
    rows = [row for row in read_rows(path) if row.get("loss_nats")]
    subject = dataclasses.replace(patient.subject, loss_rows=rows)
    check = check_loss(subject, "training_loss_is_below_uniform")
    course, remedy = _course(rows)
    told = "; ".join(filter(None, (course, check.measured)))
    if check.verdict == "fail":
        told, remedy = f"too high: {check.measured}; expected {check.expected}", _LOWER
    return Seen(
        looked_at=f"{path}, {len(rows)} rows",
        measured=told,
        holds=check.verdict != "fail" and not course,
        next_step=f"{remedy}, and train again",
    )


def _course(rows: list[dict[str, str]]) -> tuple[str, str]:
    """What is wrong with the course of a loss, and the knob that it speaks of; none of it if fine.

    It is looked at in thirds, since single rows are of few windows in a short run.
    """
    n = len(rows) // 3
    if len(rows) < _FEWEST_ROWS:
        return "", ""
    losses = [float(row["loss_nats"]) for row in rows]
    thirds = [sum(part) / n for part in (losses[:n], losses[n : 2 * n], losses[-n:])]
    told = f"{thirds[0]:.4f}, {thirds[1]:.4f}, {thirds[2]:.4f} nats per target in its thirds"
    if thirds[2] > min(thirds) * (1 + _RISE):
        return f"it rises: {told}", _LOWER
    if int(rows[-1]["step"]) >= _FEWEST_STEPS and thirds[2] > thirds[0] * (1 - _FALL):
        return f"it does not fall: {told}", f"raise {_RATES} tenfold"
    return "", ""


def _look_at_training(patient: Patient) -> Seen:
    """What the training's report says of its gate."""
    path = patient.reports / "metrics.json"
    if not path.is_file():
        raise NotThereError("no report of a training", command=patient.command)
    closed = patient.closed
    return Seen(
        looked_at=str(path),
        measured=f"the gate closed: {closed}" if closed else "it came to its end",
        holds=closed is None,
        next_step=f"mend what the reason names, {_LOWER}, then `{patient.command}`",
    )


def _look_at_audit(patient: Patient) -> Seen:
    """What the audit's report says, where it is about this model."""
    path = patient.places.reports / "audit_run" / patient.objective / "metrics.json"
    command = f"dvc repro audit_run@{patient.objective}"
    if not path.is_file():
        raise NotThereError("no audit yet", command=command)
    report = read_report(path)
    if report.get("trained_model_sha256") != _model_sha256(patient):
        raise NotThereError(f"{path} is about another model", command=command)
    failed = report.get("verdict") != "pass"
    return Seen(
        looked_at=str(path),
        measured=str(report.get("verdict_reason")),
        holds=not failed,
        next_step=_first_test(report) if failed else "",
    )


def _model_sha256(patient: Patient) -> str | None:
    """Of the weights that the run ended with."""
    state = patient.stored_in(patient.final)
    if state is None:
        raise NotThereError("no final checkpoint", command=patient.command)
    return state.files[TENSOR_FILES[0]]


def _first_test(report: dict[str, Any]) -> str:
    """The first test of the check that failed first."""
    checks = [x for x in report.get("checks", []) if isinstance(x, dict)]
    tests = [str(x.get("first_test")) for x in checks if x.get("verdict") == "fail"]
    return tests[0] if tests else "read the page beside the report"


GATES = (
    Probe(
        name="training_kept_its_gate_open",
        section="A training or an audit closed its gate",
        look=_look_at_training,
        rests_on=("params_are_valid",),
    ),
)
OUTCOMES = (
    Probe(
        name="loss_is_plausible",
        section="The loss rises, does not fall or is too high",
        look=_look_at_loss,
        rests_on=A_RUN,
    ),
    Probe(
        name="audit_passes",
        section="A training or an audit closed its gate",
        look=_look_at_audit,
        rests_on=A_RUN,
    ),
)
