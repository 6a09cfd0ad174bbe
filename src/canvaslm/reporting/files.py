"""How does a result reach the disk so that nothing half-written is ever taken for whole?

Every file is written aside in the same directory, flushed, and renamed over its name. JSON is
strict: keys sorted, no NaN or infinity. A figure that is not finite is written as null with a
``<key>_reason`` beside it, so that every parser can read the file and no gate mistakes it for a
number.
"""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: aside, flushed, renamed. On failure the old file stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Write strict JSON with sorted keys; non-finite numbers become null with a reason."""
    write_bytes(path, to_json(payload).encode())


def to_json(payload: Mapping[str, Any]) -> str:
    """Render strict JSON with sorted keys, indented, with a final newline."""
    return json.dumps(_finite(payload), sort_keys=True, indent=2, allow_nan=False) + "\n"


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows under a header, one line each, with ``\\n`` line ends."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def _finite(value: Any) -> Any:
    """Replace what strict JSON cannot hold."""
    if isinstance(value, Mapping):
        clean: dict[str, Any] = {}
        for key, item in value.items():
            clean[key] = _finite(item)
            if isinstance(item, float) and not math.isfinite(item):
                clean[f"{key}_reason"] = f"not finite: {item}"
        return clean
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
