"""How do the arms of an ablation stand to each other, at a glance?"""

import math
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from canvaslm.ablation.comparison import AXES, Axis, Result
from canvaslm.ablation.spec import Spec
from canvaslm.reporting.bench_charts import standalone_svg

STYLE: dict[Any, Any] = {
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.fonttype": "none",
}
MARK = "#33658a"
_COLOURS: Mapping[Axis, str] = {"steps": MARK, "seconds": "#b7791f", "flops": "#2f7d5b"}
INK, _FAINT = "#202428", "#d7dbdf"
_APART = 0.2  # of the three comparisons of one arm


def draw(spec: Spec, results: Mapping[str, Result]) -> str:
    """SVG with the figure of every seed and mean, and the paired intervals of the differences."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": spec.id}):
        figure = Figure(figsize=(9.0, 1.4 + 0.42 * len(results)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        names = list(results)
        for place, name in enumerate(names):
            _draw_mean(left, place, results[name])
            _draw_differences(right, place, results[name])
        left.axvline(results[spec.baseline].mean, color=_FAINT, linewidth=1.0, zorder=0.5)
        right.axvline(0.0, color=INK, linewidth=1.0, zorder=0.5)
        margin = spec.decision.paired_interval_excludes
        right.axvspan(-margin, margin, color=_FAINT, alpha=0.6, linewidth=0, zorder=0.4)
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.5, -0.5)
        for axes in (left, right):
            axes.tick_params(axis="y", length=0)
        left.set_xlabel(f"{spec.measure.key}: seeds and mean")
        right.set_xlabel(f"arm minus {spec.baseline} at equal cost")
        handles = [
            Line2D([], [], color=_COLOURS[axis], marker="o", markersize=4, label=axis)
            for axis in AXES
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
        return standalone_svg(figure, f"{spec.id}: {spec.measure.key} of every arm")


def _draw_mean(axes: Axes, place: int, result: Result) -> None:
    axes.plot(result.by_seed, [place] * len(result.by_seed), "o", color=_FAINT, markersize=5)
    axes.plot([result.mean], [place], "|", color=INK, markersize=14, markeredgewidth=1.8)
    axes.annotate(f"{result.mean:.4g}", (result.mean, place), xytext=(0, 9),
                  textcoords="offset points", ha="center", fontsize=7)  # fmt: skip


def _draw_differences(axes: Axes, place: int, result: Result) -> None:
    for number, (axis, found) in enumerate(result.against.items()):
        height = place + (number - 1) * _APART
        interval = found.interval
        if interval is None:
            continue
        axes.plot([interval.difference], [height], "o", color=_COLOURS[axis], markersize=4)
        if math.isfinite(interval.low):
            axes.plot([interval.low, interval.high], [height] * 2, color=_COLOURS[axis])
