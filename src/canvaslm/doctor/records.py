"""What do a run's own files say of it: who trains it, is it whole, was every step finite?"""

import csv
import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

from canvaslm.checkpoint_state import TENSOR_FILES, State, read_state
from canvaslm.doctor.patient import Patient
from canvaslm.doctor.probe import A_RUN, NotThereError, Probe, Seen
from canvaslm.errors import InputError
from canvaslm.reporting.differences import in_one_line
from canvaslm.training.guard import is_bad
from canvaslm.training.identity import identity_name

_SHOWN = 3


def _look_at_identity(patient: Patient) -> Seen:
    """The run that is there is the one that the same command would go on with."""
    unlike = patient.unlike(read_state(patient.checkpoint))
    shown = in_one_line(unlike[:_SHOWN])
    only_code = [x.key for x in unlike] == ["code"]
    return Seen(
        looked_at=f"{patient.checkpoint} against params, data and code",
        measured=f"{len(unlike)} keys differ" + (f": {shown}" if unlike else ""),
        holds=not unlike,
        next_step="the code was edited since: `make repro` trains anew, from the start"
        if only_code
        else "they were changed since: `make repro` trains with them anew; or restore them",
    )


def _look_at_lock(patient: Patient) -> Seen:
    """Nobody holds the lock; it is let go of at once."""
    folder = _folder(patient)
    holder = _holder(folder / "lock")
    return Seen(
        looked_at=f"{folder / 'lock'}",
        measured=holder or "no process holds it",
        holds=holder is None,
        next_step="it is alive, and a second trainer is refused: wait for it or end it",
    )


def _look_at_run(patient: Patient) -> Seen:
    """Every checkpoint by its hashes, and the logs against the newest."""
    places = [*patient.numbered, *([patient.final] if patient.final.exists() else [])]
    if not places:
        raise patient.absent("no checkpoint")
    wrong, states = [], {}
    for place in patient.track(places, total=len(places), label="checkpoints hashed"):
        try:
            states[place] = _read_whole(place, patient.folder)
        except InputError as error:
            wrong.append(f"{error.where}: expected {error.expected}, got {error.got}")
    wrong += _wrong_in_logs(patient, states)
    left = list(patient.folder.glob("checkpoints/.step_*")) if patient.folder else []
    told = f"; {len(left)} leftovers of a killed save, which the next start clears" if left else ""
    return Seen(
        looked_at=", ".join(str(place) for place in [patient.folder, patient.final] if place),
        measured=("; ".join(wrong) or f"{len(places)} checkpoints whole, logs agree") + told,
        holds=not wrong,
        next_step=f"run `{patient.command}`: it goes on from the newest whole checkpoint",
    )


def _look_at_finiteness(patient: Patient) -> Seen:
    """Bad steps and rollbacks, and the first place that went wrong."""
    if patient.folder is None and not (patient.reports / "metrics.json").exists():
        raise NotThereError("no run yet", command=patient.command)
    bad, n_rollbacks = _bad_steps(patient)
    place = _first_place(patient)
    told = f"{len(bad)} bad steps and {n_rollbacks} rollbacks"
    if bad:
        told += f"; the first: {bad[0]}"
    if place:
        told += f"; where it began: {place}"
    return Seen(
        looked_at=f"{patient.folder or patient.reports}: steps, metrics, nonfinite",
        measured=told,
        holds=not bad and not n_rollbacks and not place,
        next_step="read nonfinite/trace.json: the same windows each time mean data or loss, a "
        "finite loss with an infinite norm means the update before",
    )


def _folder(patient: Patient) -> Path:
    if patient.folder is None:
        raise patient.absent("no state of a run")
    return patient.folder


def _holder(lock: Path) -> str | None:
    """Who holds the lock of a run, in its own words."""
    if not lock.is_file():
        return None
    with lock.open(encoding="utf-8") as handle:
        try:
            fcntl.flock(handle.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return handle.read().strip() or "another process"
        fcntl.flock(handle.fileno(), fcntl.LOCK_UN)
    return None


def _read_whole(place: Path, folder: Path | None) -> State:
    """The state of a checkpoint whose files have the hashes that it states."""
    state = read_state(place)
    for name in TENSOR_FILES:
        path = place / name
        if not path.is_file():
            raise InputError(path, expected="a file", got="none", fix="use another checkpoint")
        with path.open("rb") as handle:
            got = hashlib.file_digest(handle, "sha256").hexdigest()
        if got != state.files[name]:
            said = f"sha256 {state.files[name][:12]}.."
            raise InputError(path, expected=said, got=f"{got[:12]}..", fix="use another checkpoint")
    name = identity_name(state.identity.model_dump(mode="json"))
    if folder is not None and folder in place.parents and folder.name != name:
        raise InputError(place, expected=f"run {folder.name}", got=f"run {name}", fix="move it")
    return state


def _wrong_in_logs(patient: Patient, states: dict[Path, State]) -> list[str]:
    """Where the record of steps and the report do not say what the checkpoints say."""
    wrong = []
    numbered = [states[place] for place in patient.numbered if place in states]
    if numbered and patient.folder is not None:
        path, state = patient.folder / "steps.csv", numbered[-1]
        rows, done = read_rows(path), state.progress.step
        numbers = [row.get("step") for row in rows[:done]]
        if numbers != [str(step) for step in range(done)]:
            wrong.append(f"{path}: not each of the steps 0 to {done - 1} once and in order")
        skipped = [row["step"] for row in rows[:done] if row.get("cause")]
        due = [str(skip.step) for skip in state.progress.skipped]
        if not wrong and skipped != due:
            wrong.append(f"{path}: skipped steps {skipped}, by the checkpoint {due}")
    curve = patient.reports / "loss.csv"
    if patient.final in states and curve.is_file():
        last, due = read_rows(curve)[-1:], str(states[patient.final].progress.step)
        if [row.get("step") for row in last] != [due]:
            wrong.append(f"{curve}: does not end at step {due} as {patient.final} does")
    return wrong


def _bad_steps(patient: Patient) -> tuple[list[str], int]:
    """Each step that was not finite, in words, and how often the run went back."""
    rollbacks = []
    for place in (*patient.numbered, patient.final):
        try:
            rollbacks.append(len(read_state(place).progress.rollbacks))
        except InputError:
            continue
    metrics = patient.reports / "metrics.json"
    reported = _counts(metrics) if metrics.exists() else {"bad_steps": 0, "rollbacks": 0}
    bad = []
    if patient.folder is not None and (patient.folder / "steps.csv").exists():
        rows = read_rows(patient.folder / "steps.csv")
        bad = [f"step {row['step']}: {row['cause']}" for row in rows if is_bad(row["cause"] or "")]
    elif reported["bad_steps"]:
        bad = [f"{metrics} counts them"] * reported["bad_steps"]
    return bad, max([*rollbacks, reported["rollbacks"]])


def _first_place(patient: Patient) -> str:
    """Where the first bad step stopped being finite, in the words of its trace.

    A trace in the reports may be of an earlier run, whose reports DVC has since put back.
    """
    for place in (patient.folder, patient.reports):
        path = place / "nonfinite" / "trace.json" if place is not None else None
        if path is not None and path.exists():
            trace = read_report(path)
            if patient.folder is None or trace.get("run") == patient.folder.name:
                return f"step {trace.get('step')}, {trace.get('first_place')}"
    return ""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a log, without a last one that a killed process left half-written."""
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1].splitlines()
        return list(csv.DictReader(whole, strict=True, restval=""))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(path, expected="a log", got=str(error), fix="run `pretrain`") from None


def _counts(metrics: Path) -> dict[str, int]:
    """How many steps were bad, and how often the run went back, by its report."""
    content = read_report(metrics)
    for key in ("bad_steps", "rollbacks"):
        if type(content.get(key)) is not int:
            fix, got = "run `dvc repro` for this run", str(content.get(key))
            raise InputError(metrics, expected=f"a number as {key}", got=got, fix=fix)
    return content


def read_report(path: Path) -> dict[str, Any]:
    """The content of a report."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "run `dvc repro` for this run"
        raise InputError(path, expected="a report in JSON", got=str(error), fix=fix) from None
    if not isinstance(content, dict):
        raise InputError(path, expected="a report in JSON", got="no object", fix="run it again")
    return content


RECORDS = (
    Probe(
        name="nobody_trains_it",
        section="Another process trains the same run",
        look=_look_at_lock,
        rests_on=("windows_fit",),
    ),
    Probe(
        name="run_is_whole",
        section="A checkpoint is passed over, or a log is refused",
        look=_look_at_run,
        rests_on=("windows_fit",),
    ),
    Probe(
        name="every_step_was_finite",
        section="The loss is not finite",
        look=_look_at_finiteness,
        rests_on=("windows_fit",),
    ),
    Probe(
        name="run_is_of_these_inputs",
        section="A resumed run differs from a straight one",
        look=_look_at_identity,
        rests_on=A_RUN,
    ),
)
