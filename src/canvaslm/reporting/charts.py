"""How do figures become drawings that are the same bytes for the same figures?

Drawings are SVG for a page that has a light and a dark side: they are drawn in placeholder colours,
which become the variables of the page's style sheet, and in the page's own font.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from canvaslm.reporting.bound_section import BoundCurves
from canvaslm.reporting.samples_section import SamplerMark, SamplerMarks

_INK, _GRID = "#010101", "#020202"
_SERIES = {"diffusion": "#030303", "autoregressive": "#040404"}
_RULES = {  # the acceptance rules, of which the default has the denoiser's colour
    "entropy_bound": _SERIES["diffusion"],
    "quota": "#050505",
    "unchanged_or_stronger": "#060606",
}
_SHAPES = {"never": "o", "mean_entropy": "s", "stable_and_confident": "^"}
_LEVELS: dict[str, dict[str, Any]] = {
    "the twin's samples": {
        "color": _SERIES["autoregressive"],
        "linestyle": "dashed",
        "linewidth": 1.4,
    },
    "held-out text": {"color": _INK, "linestyle": "dotted", "linewidth": 1.4},
}
_VARIABLES = {
    _INK: "var(--ink-soft)",
    _GRID: "var(--rule)",
    _SERIES["diffusion"]: "var(--diffusion)",
    _SERIES["autoregressive"]: "var(--autoregressive)",
    _RULES["quota"]: "var(--second)",
    _RULES["unchanged_or_stronger"]: "var(--third)",
}
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10.0,
    "grid.color": _GRID,
    "svg.fonttype": "none",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw_figures(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    bars: Mapping[str, tuple[float, float | None]],
    times: Sequence[float],
    bound: BoundCurves,
    marks: SamplerMarks,
) -> dict[str, str]:
    """Draw what there is to draw: SVG by name, without those that have no figures.

    Args:
        curves: the columns ``tokens``, ``flops`` and ``loss_nats`` of each objective.
        bars: nats per token of each objective, and of what they are held against, with its
            standard error or None.
        times: what each diffusion time adds to the bound, from time 1 on.
        bound: the curves of the bound in full.
        marks: of the samplers.
    """
    drawings = {}
    if curves:
        loss = "training loss, nats per target"
        for name, label in (("tokens", "tokens"), ("flops", "floating-point operations")):
            lines = {objective: (log[name], log["loss_nats"]) for objective, log in curves.items()}
            drawings[name] = draw_lines(lines, name=name, x_label=label, y_label=loss)
    if bars:
        drawings["parity"] = _draw_bars(bars, name="parity", y_label="held-out nats per token")
    if times:
        drawings["times"] = _draw_times(
            times, name="times", x_label="diffusion time", y_label="nats per token"
        )
    if bound.times:
        drawings["bound_times"] = _draw_times(
            bound.times, name="bound_times", x_label="part of time", y_label="nats per token"
        )
    places = (
        ("bound_positions", bound.positions, "token of a canvas"),
        ("bound_canvases", bound.canvases, "canvas of a window"),
    )
    for name, lines, label in places:
        if lines:
            drawings[name] = draw_lines(
                lines, name=name, x_label=label, y_label="held-out nats per token"
            )
    for cost, label in (("forwards", "forwards per token"), ("seconds", "milliseconds per token")):
        if any(cost in mark.costs for mark in marks.samplers):
            name = f"samplers_{cost}"
            drawings[name] = _draw_marks(marks, cost, name=name, x_label=label)
    return drawings


def draw_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    name: str,
    x_label: str,
    y_label: str,
) -> str:
    """Draw one line for each objective as SVG.

    Args:
        lines: what to draw along both axes, by objective.
        name: of the drawing, unique on its page.
        x_label: what the horizontal axis counts.
        y_label: what the vertical one does.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _blank(x_label, y_label)
        for objective, (xs, ys) in lines.items():
            axes.plot(xs, ys, color=_SERIES[objective], linewidth=1.8)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axes.set_xlim(left=0)
        return _to_svg(figure, name, label=f"{y_label} over {x_label}")


def _draw_bars(bars: Mapping[str, tuple[float, float | None]], *, name: str, y_label: str) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _blank("", y_label)
        for place, (objective, (value, error)) in enumerate(bars.items()):
            axes.bar(place, value, width=0.55, color=_SERIES.get(objective, _GRID))
            label, top = f"{value:.3f}", value
            if error is not None:
                axes.errorbar(place, value, yerr=error, color=_INK, capsize=5, linewidth=1.4)
                label, top = f"{value:.3f} ± {error:.3f}", value + error
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            axes.annotate(label, (place, top), **above)
        axes.set_xticks(range(len(bars)), list(bars))
        axes.set_xlim(-0.6, len(bars) - 0.4)
        axes.margins(y=0.14)
        axes.grid(visible=False, axis="x")
        return _to_svg(figure, name, label=y_label)


def _draw_times(times: Sequence[float], *, name: str, x_label: str, y_label: str) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _blank(x_label, y_label)
        axes.bar(range(1, len(times) + 1), times, width=0.7, color=_SERIES["diffusion"])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        return _to_svg(figure, name, label=f"{y_label} of the bound at each {x_label}")


def _draw_marks(marks: SamplerMarks, cost: str, *, name: str, x_label: str) -> str:
    """Draw quality against one cost: the colour is the acceptance rule, the shape the stopping."""
    y_label = "nats per token by the twin"
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _blank(x_label, y_label, height=4.4)
        axes.set_xscale("log", base=2)
        front = sorted((x.costs[cost], x.nats) for x in marks.samplers if cost in x.frontiers)
        if front:
            axes.step(*zip(*front, strict=True), where="post", color=_INK, linewidth=1.0)
        for mark in marks.samplers:
            if cost in mark.costs:
                axes.plot(mark.costs[cost], mark.nats, **_look_of(mark))
        for label, nats in marks.levels.items():
            axes.axhline(nats, **_LEVELS[label])
        levels = [Line2D([], [], label=label, **_LEVELS[label]) for label in marks.levels]
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        figure.legend(
            handles=[*_keys(marks.samplers), *levels],
            loc="outside lower center",
            ncols=2,
            frameon=False,
            fontsize=8.5,
        )
        return _to_svg(figure, name, label=f"{y_label} over {x_label}")


def _look_of(mark: SamplerMark) -> dict[str, Any]:
    """How a sampler is drawn: a trade is hollow."""
    colour = _RULES.get(mark.acceptance, _INK)
    fill = colour if mark.is_text else "none"
    return {
        "marker": _SHAPES.get(mark.stopping, "x"),
        "linestyle": "none",
        "markersize": 5.5,
        "markeredgecolor": colour,
        "markerfacecolor": fill,
    }


def _keys(samplers: Sequence[SamplerMark]) -> list[Line2D]:
    """One key for each acceptance rule and each stopping rule that is drawn."""
    acceptances, stoppings = (
        {getattr(mark, kind) for mark in samplers} for kind in ("acceptance", "stopping")
    )
    colours = [
        Line2D([], [], color=colour, linewidth=4, label=rule.replace("_", " "))
        for rule, colour in _RULES.items()
        if rule in acceptances
    ]
    shapes = [
        Line2D([], [], color=_INK, marker=shape, linestyle="none", label=rule.replace("_", " "))
        for rule, shape in _SHAPES.items()
        if rule in stoppings
    ]
    return colours + shapes


def _blank(x_label: str, y_label: str, *, height: float = 3.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _short(value: float) -> str:
    """1500000 becomes 1.5M; large powers, as of operations, become 3e15."""
    if value >= 1e12:
        return f"{value:.3g}".replace("e+", "e")
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _to_svg(figure: Figure, name: str, *, label: str) -> str:
    """Save without date, colour by the page's variables, and make ids unique on the page."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*(; )?", "", svg)  # the page's own
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # would hold for the page
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', svg
    )
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE).strip()
