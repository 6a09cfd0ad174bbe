"""How did absolute maxima run along the modules, in the steps kept and in the bad one?

Drawn here and not with the charts of the report: the code that a trainer can reach is part of a
run's identity, and a new colour in a report must not train a model again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from canvaslm.training.trace_values import TracedTensor

_WIDTH, _LEFT, _RIGHT = 960, 44, 950
_PANEL, _TOP, _GAP = 220, 30, 36  # of a panel: height, room above the first, room above each
_NAMES = 150  # room for the names of modules below each panel
_APART = 11.0  # of two names side by side, at the least
_ROW, _SWATCH = 16, 30  # of the legend
_INK, _PAPER, _RULE, _KEPT, _BAD = "#444444", "#ffffff", "#dddddd", "#5f7285", "#c0392b"
_DASHES = ("", "7 3", "4 3", "2 3", "9 3 2 3", "5 2 1 2")  # from the newest kept step backwards
# Attributes are for light; rules of a style sheet are stronger, and these are for dark only.
_DARK = """<style>@media (prefers-color-scheme: dark) {
.trace-paper { fill: #15191e } .trace-ink { fill: #d6dbe1 } .trace-mark { stroke: #d6dbe1 }
.trace-rule { stroke: #363d46 } .trace-kept { stroke: #9fb2c6 }
.trace-bad { stroke: #ff7a6b } .trace-dot { fill: #ff7a6b }
}</style>"""

_Place = tuple[str, str]  # stream, module


def draw_trace(tensors: Sequence[TracedTensor], *, bad_step: int) -> str:
    """SVG with one panel for outputs and one for their gradients; same bytes for same figures.

    A line for each pass of each step over the modules in forward order; a dot marks where the bad
    step has values that are not finite. A legend names the steps, and names stand at the modules,
    or at the beginnings of blocks where there are too many.

    Args:
        tensors: what was seen, of one micro-batch of each step.
        bad_step: drawn red, the others grey.
    """
    passed = [each for each in tensors if each.stream not in ("loss", "parameters")]
    places = list(
        dict.fromkeys((each.stream, each.module) for each in passed if each.tensor == "output")
    )
    steps = sorted({each.step for each in passed})
    strokes = {step: _stroke(step, steps, bad_step) for step in steps}
    parts = _legend(strokes, bad_step)
    top = _TOP + _ROW * (len(strokes) + 1)
    for kind in ("output", "gradient"):
        top += _GAP
        rows = [each for each in passed if each.tensor == kind]
        panel = _panel(rows, places, top=top)
        parts.append(
            _text(_LEFT, top - 10, f"{kind} of each module: absolute maximum, power of 10")
        )
        parts += panel.axes()
        for step, stream in sorted({(each.step, each.stream) for each in rows}):
            own = [each for each in rows if (each.step, each.stream) == (step, stream)]
            parts += panel.line(own, stroke=strokes[step])
        top += _PANEL + _NAMES
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img" '
        f'aria-label="Absolute maxima along the modules up to step {bad_step}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">'
    )
    paper = f'<rect class="trace-paper" width="{_WIDTH}" height="{top}" fill="{_PAPER}"/>'
    return "\n".join([opening, _DARK, paper, *parts, "</svg>"]) + "\n"


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
        """Rules at powers of ten, one with a name where each pass begins, and modules' names."""
        parts = []
        for power in range(self.low, self.high + 1, math.ceil((self.high - self.low) / 6)):
            parts.append(_rule(_LEFT, self.y(power), _RIGHT, self.y(power), "rule", _RULE))
            parts.append(_text(_LEFT - 6, self.y(power) + 4, str(power), anchor="end"))
        bottom = self.y(self.low)
        for place, (stream, _) in enumerate(self.places):
            if place == 0 or self.places[place - 1][0] != stream:
                left = self.x(place)
                parts.append(_rule(left, self.top, left, bottom, "mark", _INK))
                parts.append(_text(left, bottom + _NAMES - 10, f"{stream or 'no'} pass"))
        for place, name in _names(self.places):
            x = self.x(place)
            parts.append(_rule(x, bottom, x, bottom + 4, "mark", _INK))
            turned = f' transform="rotate(-90 {x + 3:.1f} {bottom + 8:.1f})" font-size="9"'
            parts.append(_text(x + 3, bottom + 8, name, anchor="end", more=turned))
        return parts

    def line(self, rows: Sequence[TracedTensor], *, stroke: str) -> list[str]:
        """The line of one pass, with a dot and the module's name at values that are not finite."""
        points, dots = [], []
        for each in rows:
            place = self.places.index((each.stream, each.module))
            size = each.values.abs_max
            log = math.log10(size) if size else self.low
            points.append((place, f"{self.x(place):.1f},{self.y(log):.1f}"))
            if each.values.n_nonfinite:
                title = f"<title>{escape(each.module)}</title>"
                dots.append(_dot(self.x(place), self.y(log), title))
        path = " ".join(point for _, point in sorted(points))
        return [f'<polyline points="{path}" {stroke}/>', *dots]


def _names(places: Sequence[_Place]) -> list[tuple[int, str]]:
    """Names to write below places: all, or blocks at their beginnings where all have no room."""
    if len(places) * _APART <= _RIGHT - _LEFT:
        return [(place, module) for place, (_, module) in enumerate(places)]
    beginnings, before = [], ("", "")
    for place, (stream, module) in enumerate(places):
        block = ".".join(module.split(".")[:2])
        if (stream, block) != before:
            beginnings.append((place, block))
        before = stream, block
    least = _APART * len(places) / (_RIGHT - _LEFT)  # places between two names
    found: list[tuple[int, str]] = []
    for place, name in sorted(beginnings, key=lambda each: not each[1].startswith("blocks.")):
        if all(abs(place - other) >= least for other, _ in found):
            found.append((place, name))
    return sorted(found)


def _stroke(step: int, steps: Sequence[int], bad_step: int) -> str:
    """How the lines of a step look; kept steps are fainter the older they are."""
    if step == bad_step:
        return f'class="trace-bad" fill="none" stroke="{_BAD}" stroke-width="1.6"'
    kept = [each for each in reversed(steps) if each != bad_step]
    age = kept.index(step)
    faint = 1.0 - 0.6 * age / len(kept)
    dashes = _DASHES[age % len(_DASHES)]
    drawn = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'class="trace-kept" fill="none" stroke="{_KEPT}" stroke-opacity="{faint:.2f}"' + drawn


def _legend(strokes: dict[int, str], bad_step: int) -> list[str]:
    """A row for each step, the bad one last."""
    parts = []
    for row, (step, stroke) in enumerate(strokes.items()):
        y = _TOP + _ROW * row
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _SWATCH}" y2="{y}" {stroke}/>')
        told = f"step {step}, good: a sample of its values was kept"
        if step == bad_step:
            parts.append(_dot(_LEFT + _SWATCH / 2, y, ""))
            told = (
                f"step {step}, bad: a dot where values are not finite, at the bottom where none is"
            )
        parts.append(_text(_LEFT + _SWATCH + 8, y + 4, told))
    return parts


def _panel(rows: Sequence[TracedTensor], places: Sequence[_Place], *, top: int) -> _Panel:
    """A box whose powers of ten hold every maximum that is not 0."""
    logs = [math.log10(each.values.abs_max) for each in rows if each.values.abs_max]
    low = math.floor(min(logs, default=0.0))
    high = max(math.ceil(max(logs, default=1.0)), low + 1)
    return _Panel(places=places, low=low, high=high, top=top)


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str, colour: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="trace-{kind}" {ends} stroke="{colour}"/>'


def _dot(x: float, y: float, title: str) -> str:
    return (
        f'<circle class="trace-dot" cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_BAD}">{title}</circle>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    place = f'class="trace-ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}'
    return f"<text {place}>{escape(text)}</text>"
