"""How did absolute maxima run along the modules, in the steps kept and in the bad one?

Drawn here and not with the charts of the report: the code that a trainer can reach is part of a
run's identity, and a new colour in a report must not train a model again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from canvaslm.training.trace_values import TracedTensor

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 900, 220, 40, 890, 30, 60
_INK, _RULE, _KEPT, _BAD = "#444444", "#dddddd", "#8a97a6", "#c0392b"

_Place = tuple[str, str]  # stream, module


def draw_trace(tensors: Sequence[TracedTensor], *, bad_step: int) -> str:
    """SVG with one panel for outputs and one for their gradients; same bytes for same figures.

    A line for each pass of each step over the modules in forward order; a dot marks where the bad
    step has values that are not finite.

    Args:
        tensors: what was seen, of one micro-batch of each step.
        bad_step: drawn red, the others grey.
    """
    passed = [each for each in tensors if each.stream not in ("loss", "parameters")]
    places = list(
        dict.fromkeys((each.stream, each.module) for each in passed if each.tensor == "output")
    )
    height = _TOP + 2 * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Absolute maxima along the modules up to step {bad_step}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, kind in enumerate(("output", "gradient")):
        rows = [each for each in passed if each.tensor == kind]
        panel = _panel(rows, places, top=_TOP + number * (_PANEL + _GAP))
        title = f"{kind} of each module: absolute maximum, power of ten; step {bad_step} is red"
        parts.append(f'<text x="{_LEFT}" y="{panel.top - 10}">{title}</text>')
        parts += panel.axes()
        for step, stream in sorted({(each.step, each.stream) for each in rows}):
            own = [each for each in rows if (each.step, each.stream) == (step, stream)]
            parts += panel.line(own, colour=_BAD if step == bad_step else _KEPT)
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """A box with modules along and powers of ten upwards."""

    places: Sequence[_Place]
    low: int
    high: int
    top: int

    def x(self, place: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (place + 0.5) / len(self.places)

    def y(self, log: float) -> float:
        return self.top + _PANEL * (self.high - log) / (self.high - self.low)

    def axes(self) -> list[str]:
        """Rules at powers of ten, and one with a name where each pass begins."""
        parts = []
        for power in range(self.low, self.high + 1, math.ceil((self.high - self.low) / 6)):
            parts.append(_rule(_LEFT, self.y(power), _RIGHT, self.y(power), _RULE))
            label = f'x="{_LEFT - 6}" y="{self.y(power) + 4:.1f}" text-anchor="end"'
            parts.append(f"<text {label}>{power}</text>")
        for place, (stream, _) in enumerate(self.places):
            if place == 0 or self.places[place - 1][0] != stream:
                left, bottom = self.x(place), self.y(self.low)
                parts.append(_rule(left, self.y(self.high), left, bottom + 16, _INK))
                label = f'x="{left + 4:.1f}" y="{bottom + 16:.1f}"'
                parts.append(f"<text {label}>{escape(stream)}</text>")
        return parts

    def line(self, rows: Sequence[TracedTensor], *, colour: str) -> list[str]:
        """The line of one pass, with a dot and the module's name at values that are not finite."""
        points, dots = [], []
        for each in rows:
            place = self.places.index((each.stream, each.module))
            size = each.values.abs_max
            log = math.log10(size) if size else self.low
            points.append((place, f"{self.x(place):.1f},{self.y(log):.1f}"))
            if each.values.n_nonfinite:
                where = f'cx="{self.x(place):.1f}" cy="{self.y(log):.1f}" r="3" fill="{colour}"'
                dots.append(f"<circle {where}><title>{escape(each.module)}</title></circle>")
        path = " ".join(point for _, point in sorted(points))
        return [f'<polyline points="{path}" fill="none" stroke="{colour}"/>', *dots]


def _panel(rows: Sequence[TracedTensor], places: Sequence[_Place], *, top: int) -> _Panel:
    """A box whose powers of ten hold every maximum that is not 0."""
    logs = [math.log10(each.values.abs_max) for each in rows if each.values.abs_max]
    low = math.floor(min(logs, default=0.0))
    high = max(math.ceil(max(logs, default=1.0)), low + 1)
    return _Panel(places=places, low=low, high=high, top=top)


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'
