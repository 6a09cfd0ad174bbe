"""Which ratios of the benches must hold, and which of them do?

A bound has an aim. Where a machine does not reach it, the bound says what is held there instead and
where the docs show why: a miss is explained once, in the open, and does not get worse unseen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from canvaslm.errors import InputError
from canvaslm.params import Params, parse_section, read_yaml
from canvaslm.reporting.benches import BenchResult

Judgement = Literal["pass", "explained", "fail", "not_measured"]


class Bound(Params):
    """One bound on one ratio: an aim above or below, or on both sides."""

    id: str = Field(min_length=1, description="the ratio's id; its first part is the bench")
    at_most: float | None = Field(default=None, ge=0, description="the aim, where less is better")
    at_least: float | None = Field(default=None, gt=0, description="the aim, where more is better")
    slack: float = Field(ge=0, lt=1, description="what noise may add, as a share of the limit")
    held: float | None = Field(default=None, gt=0, description="held where the aim is not reached")
    held_with_tiles: float | None = Field(
        default=None,
        gt=0,
        description="held instead where a CPU has tiles for bfloat16, and so another peak",
    )
    why: str | None = Field(
        default=None, min_length=1, description="anchor of the docs with the reason"
    )
    apart: str | None = Field(
        default=None, min_length=1, description="why `make bench` leaves it out"
    )

    @model_validator(mode="after")
    def _is_complete(self) -> "Bound":
        if self.at_most is None and self.at_least is None:
            raise ValueError("at_most or at_least")
        if self.at_most is not None and self.at_least is not None and self.at_most < self.at_least:
            raise ValueError("at_least below at_most")
        weaker = [x for x in (self.held, self.held_with_tiles) if x is not None]
        if bool(weaker) != (self.why is not None):
            raise ValueError("held and why together, or neither")
        if not all(map(self._is_weaker, weaker)):
            raise ValueError("held on the far side of one aim; reach the aim, or drop held")
        return self

    @property
    def bench(self) -> str:
        """The bench that gives the ratio."""
        return self.id.partition("/")[0]

    @property
    def aim(self) -> str:
        """The aim as people write it; the slack is not in it."""
        aims = [] if self.at_least is None else [f"≥ {self.at_least:g}"]
        aims += [] if self.at_most is None else [f"≤ {self.at_most:g}"]
        return ", ".join(aims)

    def held_on(self, machine: Mapping[str, str | int]) -> float | None:
        """What is held where the aim is missed, on a machine as a bench describes it."""
        if self.held_with_tiles is not None and machine.get("bfloat16_tiles") == 1:
            return self.held_with_tiles
        return self.held

    def judge(self, ratio: float, *, held: float | None) -> Judgement:
        """Whether the ratio reaches the aim, or at least what is held where the aim is missed."""
        if self._is_within(ratio, self.at_most, self.at_least):
            return "pass"
        if held is None:
            return "fail"
        above, below = (held, None) if self.at_most is not None else (None, held)
        return "explained" if self._is_within(ratio, above, below) else "fail"

    def _is_within(self, ratio: float, above: float | None, below: float | None) -> bool:
        low = above is None or ratio <= above * (1 + self.slack)
        return low and (below is None or ratio >= below * (1 - self.slack))

    def _is_weaker(self, held: float) -> bool:
        if self.at_most is not None and self.at_least is not None:
            return False
        return held > self.at_most if self.at_most is not None else held < (self.at_least or 0.0)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A bound, the ratio that was found, and what comes of it."""

    bound: Bound
    ratio: float | None
    judgement: Judgement
    held: float | None
    reason: str = ""


def read_bounds(file: Path, *, anchors: frozenset[str]) -> list[Bound]:
    """Read the bounds.

    Args:
        file: a YAML mapping with one key, ``bounds``: a list of entries.
        anchors: those of the page that explains what is missed.

    Raises:
        InputError: the file is missing, an entry is not a bound, two have one id, or a ``why``
            leads nowhere.
    """
    if not file.exists():
        raise InputError(
            file, expected="bounds of ratios", got="no such file", fix="check the path"
        )
    content = read_yaml(file)
    entries = content.get("bounds")
    if list(content) != ["bounds"] or not isinstance(entries, list) or not entries:
        raise InputError(
            file, expected="a list under `bounds`", got=repr(list(content)), fix="write one"
        )
    bounds: dict[str, Bound] = {}
    for number, entry in enumerate(entries, start=1):
        name = entry.get("id") if isinstance(entry, Mapping) else None
        where = f"{file}:{name or f'entry {number}'}"
        bound = parse_section(entry, Bound, where=where)
        if bound.id in bounds:
            raise InputError(where, expected="one entry an id", got="two", fix="remove one")
        if bound.why is not None and bound.why not in anchors:
            raise InputError(
                f"{where}.why",
                expected="an anchor of docs/performance.md",
                got=repr(bound.why),
                fix="write that section, or correct the anchor",
            )
        bounds[bound.id] = bound
    return list(bounds.values())


def judge_bounds(bounds: list[Bound], results: Mapping[str, BenchResult]) -> list[Judged]:
    """Hold what the benches found against the bounds.

    A ratio that is absent fails, unless its bench is one that runs apart; one that is null with a
    reason was not measured.

    Raises:
        InputError: a result has tiny sizes, or two results have a ratio of one id.
    """
    found: dict[str, tuple[float | None, str, Mapping[str, str | int]]] = {}
    names: dict[str, str] = {}
    for name, result in results.items():
        if result.tiny:
            raise InputError(
                name, expected="full sizes", got="tiny ones", fix="run `make bench` or remove it"
            )
        for ratio_id, ratio in result.ratios.items():
            if ratio_id in found:
                raise InputError(
                    ratio_id,
                    expected="one file with it",
                    got=f"{names[ratio_id]}.json and {name}.json",
                    fix="remove one of them from reports/bench",
                )
            names[ratio_id] = name
            found[ratio_id] = ratio, result.reason(ratio_id) or "", result.machine
    return [_judged(bound, *found.get(bound.id, (None, "", {}))) for bound in bounds]


def _judged(
    bound: Bound, ratio: float | None, reason: str, machine: Mapping[str, str | int]
) -> Judged:
    held = bound.held_on(machine)
    if ratio is not None:
        judgement = bound.judge(ratio, held=held)
        return Judged(bound=bound, ratio=ratio, judgement=judgement, held=held)
    reason = reason or bound.apart or ""
    if reason:
        return Judged(bound=bound, ratio=None, judgement="not_measured", held=held, reason=reason)
    reason = f"no result has it; run `python bench/{bound.bench}.py`"
    return Judged(bound=bound, ratio=None, judgement="fail", held=held, reason=reason)
