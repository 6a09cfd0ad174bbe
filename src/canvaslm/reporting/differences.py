"""In what do two sets of settings differ, so that a person can see it at a glance?"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = "absent"
_HASH = re.compile(r'"([0-9a-f]{12})[0-9a-f]{20,}"')


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key under which two nested mappings hold different values, as JSON or ``absent``."""

    key: str  # with dots between the levels
    stored: str
    wanted: str


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """List every key under which two nested mappings of JSON values differ, sorted.

    A key that only one of the two has is a difference too; numbers are compared as numbers.
    """
    old, new = dict(_leaves(stored, "")), dict(_leaves(wanted, ""))
    return [
        Difference(key=key, stored=_told(key, old), wanted=_told(key, new))
        for key in sorted(old.keys() | new.keys())
        if key not in old or key not in new or old[key] != new[key]
    ]


def as_table(found: Sequence[Difference]) -> str:
    """Lay differences out in lines under a heading, values in full."""
    heading = Difference(key="key", stored="stored", wanted="wanted")
    rows = [heading, *found]
    keys, stored = (max(len(getattr(row, name)) for row in rows) for name in ("key", "stored"))
    return "\n".join(f"{row.key:<{keys}}  {row.stored:<{stored}}  {row.wanted}" for row in rows)


def in_one_line(found: Sequence[Difference]) -> str:
    """Write differences as ``key: stored -> wanted`` in one line, hashes by their first digits."""
    return "; ".join(f"{x.key}: {_short(x.stored)} -> {_short(x.wanted)}" for x in found)


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _told(key: str, values: Mapping[str, Any]) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else _ABSENT


def _short(value: str) -> str:
    return _HASH.sub(r"\1..", value)
