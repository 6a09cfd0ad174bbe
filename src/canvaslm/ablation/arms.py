"""Which trainings is an ablation made of, and with which params does each of them run?"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from canvaslm.ablation.spec import SEED, Changes, Spec, spec_path, with_changes
from canvaslm.errors import InputError
from canvaslm.profiles import composed_profile
from canvaslm.reporting.differences import differences

_WORDS = {"true", "false", "null", "nan", "inf"}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting: an arm, or the baseline at another length.

    Attributes:
        name: unique in its ablation.
        changes: what it sets beside the profile and the overrides.
        params: the whole of ``params.yaml`` but for the seed, which is the profile's.
    """

    name: str
    changes: Changes
    params: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm with one seed: one experiment of DVC."""

    arm: str
    seed: int
    name: str
    params: Mapping[str, Any]


def find_arms(root: Path, spec: Spec) -> dict[str, Arm]:
    """Every setting with its params: arms in their order, then the other lengths of the baseline.

    Raises:
        InputError: the profile is none, a key is none of params.yaml, or two arms are the same.
    """
    where = str(spec_path(root, spec.id))
    profile = YAML(typ="safe", pure=True).load(composed_profile(spec.profile, root / "configs"))
    common = with_changes(profile, spec.overrides, where=f"{where}:overrides")
    with_changes(common, dict.fromkeys((spec.varies, *spec.follows)), where=f"{where}:varies")
    base = spec.arms[spec.baseline]
    settings = {**spec.arms, **{name: base | x for name, x in spec.reference_lengths.items()}}
    arms = {
        name: Arm(name=name, changes=changes,
                  params=with_changes(common, changes, where=f"{where}:{name}"))
        for name, changes in settings.items()
    }  # fmt: skip
    _refuse_twins(arms, where)
    return arms


def find_trials(arms: Mapping[str, Arm], spec: Spec) -> list[Trial]:
    """Every experiment: all arms of the first seed, then all of the next."""
    return [
        Trial(
            arm=arm.name,
            seed=seed,
            name=f"{spec.id}-{arm.name}-s{seed}",
            params=with_changes(arm.params, {SEED: seed}, where=spec.id),
        )
        for seed in spec.seeds
        for arm in arms.values()
    ]


def as_overrides(params: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What ``dvc exp run -S`` has to change for a params file to hold these values.

    Args:
        params: the values that are wanted.
        current: those that lie there.

    Raises:
        InputError: the two do not have the same keys.
    """
    found = differences(current, params)
    for difference in found:
        if "absent" in (difference.stored, difference.wanted):
            raise InputError(
                "params.yaml",
                expected="the keys of configs/base.yaml",
                got=f"{difference.key} in one of them only",
                fix="run `make profile NAME=laptop`",
            )
    return [f"{item.key}={_spell(json.loads(item.wanted))}" for item in found]


def _spell(value: Any) -> str:
    """A value in the grammar of Hydra, which DVC reads ``-S`` by."""
    if isinstance(value, list):
        return f"[{','.join(_spell(item) for item in value)}]"
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in _WORDS
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _refuse_twins(arms: Mapping[str, Arm], where: str) -> None:
    seen: list[Arm] = []
    for arm in arms.values():
        for other in seen:
            if arm.params == other.params:
                raise InputError(
                    f"{where}:{arm.name}",
                    expected="values of its own",
                    got=f"those of {other.name}",
                    fix="leave one of them out",
                )
        seen.append(arm)
