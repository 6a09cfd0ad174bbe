"""What does a finished run report: the loss curve, its seconds, and the final figures?

All of it is a pure function of the record of steps, so that a run that was killed and resumed, or
that is only exported again at another cadence, writes the same bytes as one that ran through.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from canvaslm.checkpoint_state import Rollback
from canvaslm.errors import InputError
from canvaslm.reporting.files import (
    refuse_read_only,
    refuse_what_would_be_lost,
    write_csv,
    write_json,
)
from canvaslm.training.guard import MARKED, NO_TARGETS, is_bad
from canvaslm.training.machine import MACHINE
from canvaslm.training.run_state import TRACE, StepRecord
from canvaslm.training.trace import TRACE_FILES

_LOSS_MARGIN = 0.05  # above ln V; a few steps of a few windows end there by noise
_LOSS, _TIMING, _METRICS = _FILES = ("loss.csv", "timing.csv", "metrics.json")
_LOSS_COLUMNS = (
    "step",
    "windows",
    "tokens",
    "flops",
    "loss_nats",
    "gradient_norm",
    "learning_rate",
    "targets",
    "skipped_steps",
)


def refuse_unwritable(out: Path) -> None:
    """Raise unless the files of a report can be written under ``out``, over older ones or not.

    Raises:
        InputError: a file stands where a folder should, a folder where a file should, or the
            folder of the trace holds something else, which would be lost.
    """
    for place in (out, *out.parents):
        if place.is_dir():
            refuse_read_only(place)
            break
        if place.is_symlink() or place.exists():
            raise InputError(place, expected="a folder", got="a file", fix="remove it")
    for name in (*_FILES, MACHINE):
        if (out / name).is_dir():
            raise InputError(out / name, expected="a file", got="a folder", fix="remove it")
    refuse_what_would_be_lost(out / TRACE, TRACE_FILES)


def write_curve(
    out: Path,
    records: Sequence[StepRecord],
    seconds: Sequence[float | None],
    *,
    log_every: int,
    windows_per_step: int,
    window_tokens: int,
    flops_of_first: Callable[[int], float],
) -> dict[str, float | int | None]:
    """Write ``loss.csv`` and ``timing.csv`` under ``out`` and return the last row of the former.

    A row stands for the steps since the row before it: its loss is their summed nats over their
    summed targets, and ``skipped_steps`` says how many of them changed nothing and are not in it.
    A span with a step whose seconds are not known has none in ``timing.csv``.
    Its gradient norm and learning rate are those of the row's own step. ``step`` counts steps
    done, so the first row at ``log_every: 10`` is step 10; the run's last step always has a row.
    """
    rows, timing = [], []
    tokens_per_step = windows_per_step * window_tokens
    for start in range(0, len(records), log_every):
        span = records[start : start + log_every]
        done = start + len(span)
        windows = done * windows_per_step
        rows.append(
            {
                "step": done,
                "windows": windows,
                "tokens": windows * window_tokens,
                "flops": flops_of_first(windows),
                "loss_nats": _mean_nats(span),
                "gradient_norm": span[-1].gradient_norm,
                "learning_rate": span[-1].learning_rate,
                "targets": sum(record.targets for record in span if not record.cause),
                "skipped_steps": sum(bool(record.cause) for record in span),
            }
        )
        timing.append([done, *_pace(seconds[start:done], len(span) * tokens_per_step)])
    cells = [["" if value is None else value for value in row.values()] for row in rows]
    write_csv(out / _LOSS, _LOSS_COLUMNS, cells)
    write_csv(out / _TIMING, ("step", "seconds", "tokens_per_s"), timing)
    return rows[-1]


def write_metrics(
    out: Path,
    records: Sequence[StepRecord],
    last: dict[str, float | int | None],
    *,
    n_windows: int,
    n_parameters: int,
    vocab_size: int,
    rollbacks: Sequence[Rollback],
    parent: Mapping[str, Any] | None,
    model_sha256: str | None,
    closed: str | None,
) -> None:
    """Write ``metrics.json``: where the run ended, and how many steps changed nothing.

    ``bad_steps`` counts every step that was not finite, those before a rollback included, of which
    the logs know no more; ``parent`` is the checkpoint that a fork began with; ``model_sha256``, of
    the weights that the run ended with, tells which later reports are of this run. Its verdict is
    fail with ``closed`` as the reason for a run whose gate closed on the way, and fail for one that
    came to its end without a final loss, or with one that is worse than a guess.
    """
    windows = last["windows"]
    assert windows is not None
    causes = [record.cause for record in records]
    forgotten = sum(rollback.bad_steps for rollback in rollbacks)
    bad_steps = sum(map(is_bad, causes)) + forgotten
    loss = last["loss_nats"]
    flaw = closed or _find_flaw(last, vocab_size)
    skipped = "" if closed else _what_was_skipped(bad_steps, len(rollbacks))
    metrics = {
        "bad_steps": bad_steps,
        "bad_steps_before_rollbacks": forgotten,
        "epochs": windows / n_windows,
        "final_loss_nats_per_target": math.nan if loss is None else loss,
        "flops": last["flops"],
        "model_sha256": model_sha256,
        "parameters": n_parameters,
        "parent": parent,
        "steps": last["step"],
        "rollbacks": len(rollbacks),
        "steps_marked": causes.count(MARKED),
        "steps_without_targets": causes.count(NO_TARGETS),
        "tokens": last["tokens"],
        "verdict": "fail" if flaw else "pass",
        "verdict_reason": "; ".join(filter(None, (flaw, skipped))),
        "windows": windows,
    }
    write_json(out / _METRICS, metrics)


def _what_was_skipped(bad_steps: int, n_rollbacks: int) -> str:
    """What a reader of the loss has to know; empty when every step was finite."""
    if not bad_steps and not n_rollbacks:
        return ""
    bad, back = _counted(bad_steps, "bad step"), _counted(n_rollbacks, "rollback")
    return f"came to its end with {bad} and {back}"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _find_flaw(last: dict[str, float | int | None], vocab_size: int) -> str:
    """Why the end of a run is no success although it was reached; empty where it is one."""
    loss, guess = last["loss_nats"], math.log(vocab_size)
    if loss is None:
        n_skipped = _counted(int(last["skipped_steps"] or 0), "step")
        return f"its final loss is not known: all of the last {n_skipped} changed nothing"
    if not loss <= (1 + _LOSS_MARGIN) * guess:
        return (
            f"final loss {loss:.4g} nats per target is more than {_LOSS_MARGIN:.0%} above "
            f"ln V = {guess:.4g}, that of a uniform guess: it diverged"
        )
    return ""


def _pace(seconds: Sequence[float | None], tokens: int) -> tuple[str, str]:
    """Seconds and tokens per second of some steps; empty where they were not measured."""
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "", ""
    spent = sum(known)
    return f"{spent:.6f}", f"{tokens / spent:.1f}" if spent > 0 else ""


def _mean_nats(records: Sequence[StepRecord]) -> float | None:
    """Nats per target over the steps that ran; None when none did."""
    ran = [record for record in records if record.nats is not None]
    targets = sum(record.targets for record in ran)
    return sum(record.nats or 0.0 for record in ran) / targets if targets else None
