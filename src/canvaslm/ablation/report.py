"""What may be concluded from an ablation, in words that are the same for all of them?

``metrics.json`` holds all figures, ``arms.csv`` and ``table.md`` a row for each arm, ``arms.svg``
the picture; where the values are numbers, ``curve.svg`` shows the figures along them. They are the
same bytes for the same experiments and seconds.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canvaslm.ablation.arms import Arm, find_arms, find_trials
from canvaslm.ablation.comparison import AXES, Against, Axis, Result, compare
from canvaslm.ablation.curve import draw_curve, figures_of, fits_of, numbers_of
from canvaslm.ablation.extrapolation import LAWS, TIMES, Fit, Law
from canvaslm.ablation.interval import ESTIMATOR, Interval
from canvaslm.ablation.picture import draw
from canvaslm.ablation.rows import Row, collect
from canvaslm.ablation.seconds import read_seconds
from canvaslm.ablation.spec import Spec, Value, report_folder
from canvaslm.reporting.files import to_json, write_files

_AT: Mapping[Axis, str] = {"steps": "steps", "seconds": "seconds", "flops": "operations"}
_MEANS = {
    "better": "is better",
    "worse": "is worse",
    "same": "makes no difference of that size",
    "undecided": "is not decided",
    "not_measured": "is not judged, since the baseline was not measured at that cost",
}
_ALWAYS = (
    "Each interval stands for itself: none is widened for the number of arms.",
    "Seconds are those of one optimiser step, times the steps; what a step of training costs says "
    "nothing of decoding.",
)


def tabulate(root: Path, spec: Spec) -> dict[str, Result]:
    """Read every experiment of an ablation, compare, and write the report.

    Raises:
        InputError: an experiment is missing or is not what it says; nothing is written then.
    """
    arms = find_arms(root, spec)
    rows = collect(root, spec, find_trials(arms, spec))
    folder = report_folder(root, spec)
    results = compare(spec, rows, read_seconds(root, spec, folder))
    values = {name: _value(arm.params, spec.varies) for name, arm in arms.items()}
    told = _conclusions(spec, results, arms, rows)
    numbers = numbers_of(spec, values)
    fits = {} if numbers is None else fits_of(spec, numbers, figures_of(spec, numbers, results))
    beyond = _beyond(fits, 0.0 if numbers is None else max(numbers.values()))
    metrics = _metrics(spec, rows, results, arms, told) | {"beyond": beyond}
    lines = _lines(spec, results, values, told, beyond, has_curve=numbers is not None)
    contents = {
        "metrics.json": to_json(metrics),
        "arms.csv": _as_csv(spec, results),
        "table.md": "\n".join(lines) + "\n",
        "arms.svg": draw(spec, results),
    }
    if numbers is not None:
        contents["curve.svg"] = draw_curve(spec, numbers, results, fits)
    write_files({folder / name: text.encode() for name, text in contents.items()})
    return results


def _conclusions(
    spec: Spec, results: Mapping[str, Result], arms: Mapping[str, Arm], rows: Sequence[Row]
) -> dict[str, str]:
    """The narrow conclusion about each arm that is judged."""
    n_documents = len(rows[0].tokens) if rows[0].documents is not None else None
    over = f"{len(spec.seeds)} seed{'s' if len(spec.seeds) > 1 else ''}"
    over += f" and {n_documents} held-out documents" if n_documents else ""
    base = json.dumps(_value(arms[spec.baseline].params, spec.varies))
    margin = spec.decision.paired_interval_excludes
    told = {}
    for name, result in results.items():
        if result.judgement is None:
            continue
        parts = "; ".join(f"at equal {_AT[axis]} {_tell(result.against[axis])}" for axis in AXES)
        value = json.dumps(_value(arms[name].params, spec.varies))
        followed = {key: x for key, x in arms[name].changes.items() if key in spec.follows}
        told[name] = (
            f"`{spec.varies}: {value}`{_listed(followed)} against `{base}` "
            f"{_MEANS[result.judgement]}. {spec.measure.key}, difference with its "
            f"{100 * spec.decision.confidence:g} % interval: {parts}. A difference counts where "
            f"the interval lies beyond {margin:g} on all three. This is so for profile "
            f"{spec.profile}{_listed(spec.overrides)}, {over}, and nothing else was tried."
        )
        if len(spec.seeds) < 2:
            told[name] += " One seed tells nothing of the next, so nothing is decided."
    return told


def _metrics(
    spec: Spec,
    rows: Sequence[Row],
    results: Mapping[str, Result],
    arms: Mapping[str, Arm],
    told: Mapping[str, str],
) -> dict[str, Any]:
    stated = spec.model_dump(
        include={"id", "question", "hypothesis", "profile", "overrides", "varies", "baseline",
                 "seeds", "measure", "decision", "does_not_establish", "fixed"}
    )  # fmt: skip
    has_documents = rows[0].documents is not None
    return {
        **stated,
        "estimator": ESTIMATOR,
        "n_documents": len(rows[0].tokens) if has_documents else "not_measured",
        "n_tokens": int(rows[0].tokens.sum()) if has_documents else "not_measured",
        "experiments": {row.trial.name: row.rev for row in rows},
        "arms": {
            name: {
                "changes": arms[name].changes,
                "mean": result.mean,
                "spread_over_seeds": result.spread if len(spec.seeds) > 1 else "not_measured",
                "by_seed": dict(zip(map(str, spec.seeds), result.by_seed, strict=True)),
                "also": {
                    f"{x.place}.{x.key}": value
                    for x, value in zip(spec.also, result.also, strict=True)
                },
                "costs": {axis: _or_not(result.costs[axis]) for axis in AXES},
                "difference_as_run": _bounds(result.as_run),
                "at_equal": {
                    axis: {
                        "baseline": _or_not(found.baseline),
                        "difference": _bounds(found.interval),
                        "judgement": found.judgement,
                    }
                    for axis, found in result.against.items()
                },
                "judgement": result.judgement or "not_judged",
                "conclusion": told.get(name, ""),
            }
            for name, result in results.items()
        },
    }


def _as_csv(spec: Spec, results: Mapping[str, Result]) -> str:
    columns = ["arm", "mean", "spread_over_seeds", *AXES]
    columns += [
        f"{part}_at_equal_{axis}" for axis in AXES for part in ("difference", "low", "high")
    ]
    columns += ["judgement", *(f"{x.place}.{x.key}" for x in spec.also)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for name, result in results.items():
        bounds = [_bounds(result.against[axis].interval) if result.against else "not_measured"
                  for axis in AXES]  # fmt: skip
        differences = [
            bound[part] if isinstance(bound, dict) else "not_measured"
            for bound in bounds
            for part in ("difference", "low", "high")
        ]
        spread = result.spread if len(result.by_seed) > 1 else "not_measured"
        costs = [_or_not(result.costs[axis]) for axis in AXES]
        judged = result.judgement or "not_judged"
        writer.writerow([name, result.mean, spread, *costs, *differences, judged, *result.also])
    return text.getvalue()


def _lines(
    spec: Spec,
    results: Mapping[str, Result],
    values: Mapping[str, Value],
    told: Mapping[str, str],
    beyond: Mapping[str, Any],
    *,
    has_curve: bool,
) -> Iterator[str]:
    yield f"# {spec.id}\n"
    yield f"{spec.question}\n"
    yield f"Expected before the run: {spec.hypothesis}\n"
    direction = f"{spec.measure.better} is better"
    heads = ["arm", f"`{spec.varies}`", f"{spec.measure.key} ({direction})", "spread over seeds"]
    heads += [*AXES, *(f"minus {spec.baseline} at equal {_AT[axis]}" for axis in AXES)]
    heads += ["judged", *(f"{x.place}.{x.key}" for x in spec.also)]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, result in results.items():
        cells = [name, f"`{json.dumps(values[name])}`", f"{result.mean:.4f}"]
        cells.append(f"{result.spread:.4f}" if len(result.by_seed) > 1 else "not_measured")
        cells += [_short(result.costs[axis]) for axis in AXES]
        cells += [_tell(result.against[axis]) if result.against else "" for axis in AXES]
        cells.append(result.judgement or "")
        cells += [f"{value:.4g}" for value in result.also]
        yield f"| {' | '.join(cells)} |"
    yield "\n![every arm](arms.svg)\n"
    if has_curve:
        yield f"![every figure along {spec.varies}](curve.svg)\n"
    if beyond:
        yield from _lines_beyond(beyond)
    yield "## What follows\n"
    yield from (f"- {name}: {text}" for name, text in told.items())
    yield "\n## What does not follow\n"
    yield from (f"- {text}" for text in (*spec.does_not_establish, *_ALWAYS))
    yield f"\n## How the intervals are made\n\n{ESTIMATOR[0].upper()}{ESTIMATOR[1:]}"


def _beyond(fits: Mapping[str, Mapping[Law, Fit]], last: float) -> dict[str, Any]:
    """What each law says of each figure beyond the longest training."""
    return {
        figure: {
            law: {
                "floor": fit.floor if law == "power" else "none",
                "slope": fit.slope,
                "largest_miss": fit.largest_miss,
                **{f"at_{times}_times": fit.at(times * last) for times in TIMES},
            }
            for law, fit in laws.items()
        }
        for figure, laws in fits.items()
    }


def _lines_beyond(beyond: Mapping[str, Any]) -> Iterator[str]:
    yield "## If it went on so\n"
    yield "What so many times the longest training would give, by a power law and by a line over"
    yield "the logarithm; what lies between the two is not known from these points.\n"
    columns = [f"{times} times, {law}" for times in TIMES for law in LAWS]
    yield f"| figure | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for figure, laws in beyond.items():
        cells = [f"{laws[law][f'at_{times}_times']:.4g}" for times in TIMES for law in LAWS]
        yield f"| {figure} | {' | '.join(cells)} |"
    yield ""


def _tell(found: Against) -> str:
    interval = found.interval
    if interval is None:
        return "not_measured"
    ends = "not_measured"
    if math.isfinite(interval.low):
        ends = f"{interval.low:+.4f} to {interval.high:+.4f}"
    return f"{interval.difference:+.4f} ({ends})"


def _bounds(interval: Interval | None) -> dict[str, Any] | str:
    if interval is None:
        return "not_measured"
    return {"difference": interval.difference, "low": interval.low, "high": interval.high}


def _or_not(value: float | None) -> float | str:
    return "not_measured" if value is None else value


def _short(value: float | None) -> str:
    return "not_measured" if value is None else f"{value:.6g}"


def _value(params: Mapping[str, Any], dotted: str) -> Value:
    section, _, knob = dotted.partition(".")
    return params[section][knob]


def _listed(overrides: Mapping[str, Value]) -> str:
    told = ", ".join(f"{key}={json.dumps(value)}" for key, value in overrides.items())
    return f" with {told}" if told else ""
