"""How is an audit shown, so that the first cause is read first?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.reporting.charts import draw_lines
from canvaslm.reporting.look import printable, render
from canvaslm.run_audit.check import Check
from canvaslm.run_audit.stand_in import NO_TARGET, ReadBack, read_back
from canvaslm.run_audit.subject import Subject

_TEMPLATE = Path(__file__).with_name("page.html")
_N_ROWS = 3
_N_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What the model read and was asked for at some places of one window, as text."""

    place: str
    read: str
    asked: str


def render_audit(subject: Subject, checks: Sequence[Check]) -> str:
    """Lay out the page of an audit.

    Args:
        subject: the run.
        checks: all checks, in the order of the walk.
    """
    failures = [check for check in checks if check.verdict == "fail"]
    try:
        rows, why = _decode_rows(subject), ""
    except Exception as error:  # what breaks here has failed a check above, which must be shown
        rows, why = [], f"{type(error).__name__}: {error}"
    return render(
        _TEMPLATE,
        objective=subject.recipe.objective,
        step=subject.state.progress.step,
        checks=checks,
        first=failures[0] if failures else None,
        n_later=max(0, len(failures) - 1),
        not_given=[check.name for check in checks if check.verdict == "not_measured"],
        drawings=_draw(subject),
        rows=rows,
        why=printable(why),
    )


def _draw(subject: Subject) -> dict[str, str]:
    """Loss and gradient norm over steps, as far as the log has finite figures."""
    objective, drawings = subject.recipe.objective, {}
    for column, label in (
        ("loss_nats", "loss, nats per target"),
        ("gradient_norm", "gradient norm before clipping"),
        ("learning_rate", "learning rate"),
    ):
        points = [_point(row, column) for row in subject.loss_rows]
        points = [point for point in points if all(map(math.isfinite, point))]
        if points:
            steps, values = zip(*points, strict=True)
            lines = {objective: (steps, values)}
            drawings[column] = draw_lines(lines, name=column, x_label="step", y_label=label)
    return drawings


def _point(row: dict[str, str], column: str) -> tuple[float, float]:
    try:
        return float(row["step"]), float(row[column])
    except (KeyError, TypeError, ValueError):  # a skipped row, or a log that failed its check
        return math.nan, math.nan


def _decode_rows(subject: Subject) -> list[_Row]:
    """What some windows of the run came to, as text."""
    tokenizer = Tokenizer.load(subject.tokenizer)
    return [_decode(subject, sample, tokenizer) for sample in read_back(subject)[:_N_ROWS]]


def _decode(subject: Subject, sample: ReadBack, tokenizer: Tokenizer) -> _Row:
    """The twin's first tokens, or the canvas of the denoiser that has the most noise."""
    place, here = f"window {sample.number}", slice(0, _N_TOKENS)
    read = sample.clean
    if sample.noisy is not None and sample.times is not None:
        L, canvas = subject.recipe.layout.canvas_tokens, int(sample.times.argmax())
        here, read = slice(canvas * L, (canvas + 1) * L), sample.noisy
        place += f", canvas {canvas} at time {sample.times[canvas]:.3g}"
    assert read is not None, "a model is given one stream at least"
    asked = sample.targets[here]
    return _Row(
        place=place,
        read=printable(tokenizer.decode(read[here])),
        asked=printable(tokenizer.decode(asked[asked != NO_TARGET])),
    )
