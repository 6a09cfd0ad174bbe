"""What does a step that was not finite leave on the disk?"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvaslm.reporting.files import whole_directory, write_bytes, write_csv, write_json
from canvaslm.training.trace_chart import draw_trace
from canvaslm.training.trace_values import SAMPLED, TracedTensor

TRACE_FILES = ("trace.json", "tensors.csv", "trace.svg")
_COLUMNS = (
    "step",
    "micro_batch",
    "pass",
    "order",
    "module",
    "tensor",
    "abs_max",
    "mean",
    "nonfinite_share",
    "n_values",
    "of",
)
_SAMPLED = (
    f"kept steps: {SAMPLED}, of each tensor of the first micro-batch; the bad step: every value; "
    "gradients are those of nats summed over targets, and those of parameters are summed up to "
    "their micro-batch"
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Where a step stopped being finite, and what was seen on the way there.

    Attributes:
        step: the bad step.
        first_window: the run's number of its first window.
        last_window: of its last.
        cause: its fault when it was run again; empty when it was finite then.
        first_place: the first place that went wrong, in words.
        micro_batch: the first micro-batch that went wrong; None when none did.
        alone: windows of that micro-batch that go wrong when they are run alone, and how.
        alone_in_words: the same as a sentence.
        tensors: all that was seen, kept steps first.
        not_measured: why no good step stands before the bad one; empty when one does.
    """

    step: int
    first_window: int
    last_window: int
    cause: str
    first_place: str
    micro_batch: int | None
    alone: tuple[tuple[int, str], ...]
    alone_in_words: str
    tensors: tuple[TracedTensor, ...]
    not_measured: str

    @property
    def kept_steps(self) -> list[int]:
        """The good steps of which samples were kept, in order."""
        return sorted({each.step for each in self.tensors if each.sampled})

    def write(self, directory: Path, *, run: str) -> None:
        """Lay down ``trace.json``, ``tensors.csv`` and ``trace.svg``: all, or none of them.

        Args:
            directory: where.
            run: the name of the run's identity, since the files may outlive it in its reports.

        Raises:
            InputError: the directory holds something else, which would be lost.
        """
        with whole_directory(directory, holds=TRACE_FILES) as place:
            write_json(place / "trace.json", self._summary() | {"run": run})
            write_csv(place / "tensors.csv", _COLUMNS, map(_cells, self.tensors))
            write_bytes(place / "trace.svg", self._draw().encode())

    def _draw(self) -> str:
        """The kept steps, and the bad one where it first went wrong."""
        number = self.micro_batch or 0
        shown = [each for each in self.tensors if each.sampled or each.micro_batch == number]
        return draw_trace(shown, bad_step=self.step)

    def _summary(self) -> dict[str, Any]:
        kept: Iterable[int] | str = self.kept_steps
        return {
            "step": self.step,
            "windows": {"first": self.first_window, "last": self.last_window},
            "cause": self.cause or "finite when run again",
            "first_place": self.first_place,
            "micro_batch": self.micro_batch,
            "alone": [{"window": window, "cause": cause} for window, cause in self.alone],
            "alone_in_words": self.alone_in_words,
            "kept_steps": kept or "not_measured",
            "kept_steps_reason": self.not_measured,
            "sampled": _SAMPLED,
        }


def _cells(seen: TracedTensor) -> list[object]:
    """A row of ``tensors.csv``."""
    values = seen.values
    figures = (values.abs_max, values.mean, values.nonfinite_share)
    return [
        seen.step,
        seen.micro_batch,
        seen.stream,
        seen.order,
        seen.module,
        seen.tensor,
        *("" if figure is None else figure for figure in figures),
        values.n_values,
        "sampled" if seen.sampled else "all",
    ]
