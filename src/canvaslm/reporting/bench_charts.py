"""How near did each bench come to its aims, at a glance?

One picture a bench, for a Markdown page: SVG with colours of its own, on a ground of its own, the
same bytes for the same figures.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_COLOURS = {"pass": "#2f7d5b", "explained": "#b7791f", "fail": "#b3372f"}
_STYLE: dict[Any, Any] = {
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.fonttype": "none",
}
_MOST = 2.0  # times the aim, beyond which a bar is cut


def draw_benches(snapshot: Mapping[str, Any]) -> dict[str, str]:
    """Draw the bounds of each bench that has figures, as SVG by the bench's name.

    Args:
        snapshot: what ``docs/measured/bench.json`` holds.
    """
    by_bench: dict[str, list[Mapping[str, Any]]] = {}
    for bound in snapshot["bounds"]:
        if bound["reached"] is not None:
            by_bench.setdefault(bound["id"].partition("/")[0], []).append(bound)
    return {name: _draw(name, bounds) for name, bounds in by_bench.items()}


def _draw(name: str, bounds: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each bound: how much of its aim was reached."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(8.0, 0.9 + 0.26 * len(bounds)), layout="constrained")
        axes = figure.subplots()
        for place, bound in enumerate(reversed(bounds)):
            reached = bound["reached"]
            axes.barh(place, min(reached, _MOST), height=0.62, color=_COLOURS[bound["judgement"]])
            text = f"{bound['ratio']:.3g}  ({bound['aim']})"
            axes.annotate(
                text,
                (min(reached, _MOST), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                bbox={"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.6},
            )
        axes.axvline(1.0, color="#202428", linewidth=1.0, zorder=0.5)
        labels = [bound["id"].partition("/")[2] for bound in reversed(bounds)]
        axes.set_yticks(range(len(bounds)), labels)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, _MOST * 1.2)
        axes.set_ylim(-0.6, len(bounds) - 0.4)
        axes.set_xlabel("share of the aim that was reached")
        return standalone_svg(figure, f"{name}: share of each aim that was reached")


def standalone_svg(figure: Figure, label: str) -> str:
    """Save a drawing that needs no page around it, without date, under a label for who reads it."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", facecolor="#ffffff", metadata=nothing)
    svg = file.getvalue()
    svg = re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', svg, count=1)
    return re.sub(r"[ \t]+$", "", svg[svg.index("<svg") :], flags=re.MULTILINE).strip() + "\n"
