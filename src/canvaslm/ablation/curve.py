"""How does a figure move along with a number that varies?

Where the values of an ablation are numbers, its arms are points of a curve, and every figure that
is shown gets a panel: the one that is judged first, then those beside it.
"""

import math
from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from canvaslm.ablation.comparison import Result
from canvaslm.ablation.extrapolation import TIMES, Fit, Law, fit_laws
from canvaslm.ablation.picture import INK, MARK, STYLE
from canvaslm.ablation.spec import STEPS, Measure, Spec, Value
from canvaslm.reporting.bench_charts import standalone_svg

_LEAST = 3  # two points are a difference and no curve
_SEVERAL_TIMES = 8  # a range of values from here on is read in ratios


def numbers_of(spec: Spec, values: Mapping[str, Value]) -> dict[str, float] | None:
    """The arms' values as numbers, by name, in their order; None where they make no curve."""
    found: dict[str, float] = {}
    for name in spec.arms:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        found[name] = float(value)
    if len(set(found.values())) < max(_LEAST, len(found)):
        return None
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def figures_of(
    spec: Spec, numbers: Mapping[str, float], results: Mapping[str, Result]
) -> dict[str, list[float]]:
    """Every figure along the curve, by the dotted name of its report and key."""
    found = {f"{spec.measure.place}.{spec.measure.key}": [results[name].mean for name in numbers]}
    for place, measure in enumerate(spec.also):
        found[f"{measure.place}.{measure.key}"] = [results[name].also[place] for name in numbers]
    return found


def fits_of(
    spec: Spec, numbers: Mapping[str, float], figures: Mapping[str, list[float]]
) -> dict[str, dict[Law, Fit]]:
    """The laws of every figure over the length of training; empty where something else varies."""
    if spec.varies != STEPS:
        return {}
    lengths = list(numbers.values())
    fits = {name: fit_laws(lengths, heights) for name, heights in figures.items()}
    return {name: fit for name, fit in fits.items() if fit is not None}


def draw_curve(
    spec: Spec,
    numbers: Mapping[str, float],
    results: Mapping[str, Result],
    fits: Mapping[str, Mapping[Law, Fit]],
) -> str:
    """SVG of every figure against the parameter that varies.

    Args:
        spec: what was asked.
        numbers: the parameter of each arm, ascending.
        results: of all arms.
        fits: laws that are drawn beyond the last arm, by figure.
    """
    measures, figures = (spec.measure, *spec.also), figures_of(spec, numbers, results)
    columns = min(len(measures), 3)
    rows = math.ceil(len(measures) / columns)
    with mpl.rc_context({**STYLE, "svg.hashsalt": f"{spec.id}.curve"}):
        figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        shown = panels[: len(measures)]
        for axes, measure, (name, heights) in zip(shown, measures, figures.items(), strict=True):
            _draw_panel(axes, list(numbers.values()), heights, measure, spec)
            _draw_laws(axes, list(numbers.values()), fits.get(name, {}))
        for name, x in numbers.items():
            seeds = results[name].by_seed
            panels[0].plot([x] * len(seeds), seeds, "o", color=INK, markersize=2.5, alpha=0.5)
        for axes in panels[len(measures) :]:
            axes.remove()
        return standalone_svg(figure, f"{spec.id}: figures along {spec.varies}")


def _draw_panel(
    axes: Axes, places: list[float], heights: list[float], measure: Measure, spec: Spec
) -> None:
    axes.plot(places, heights, "o-", color=MARK, markersize=4, linewidth=1.4)
    if min(places) > 0 and max(places) / min(places) >= _SEVERAL_TIMES:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(places, [f"{place:g}" for place in places])
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0) if measure.better == "higher" else low, high)
    axes.set_xlabel(spec.varies)
    axes.set_title(f"{measure.place}\n{measure.key}", fontsize=8, loc="left")


def _draw_laws(axes: Axes, places: list[float], laws: Mapping[Law, Fit]) -> None:
    """Dashed the power law, dotted the line, from the last training to where they are asked."""
    if not laws:
        return
    last, styles = places[-1], {"power": "--", "line": ":"}
    beyond = np.geomspace(last, last * TIMES[-1], 50)
    for law, fit in laws.items():
        axes.plot(beyond, [fit.at(x) for x in beyond], styles[law], color=INK, linewidth=1.0,
                  label={"power": "power law", "line": "line over the logarithm"}[law])  # fmt: skip
    axes.set_xscale("log", base=10)
    axes.set_xticks([places[0], last, *(last * times for times in TIMES)],
                    [f"{places[0]:g}", f"{last:g}", *(f"×{times}" for times in TIMES)])  # fmt: skip
    axes.legend(fontsize=6, frameon=False)
