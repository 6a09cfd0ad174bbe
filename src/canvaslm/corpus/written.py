"""Can a JSON file that an earlier stage wrote be believed?

Each such file has a strict, closed model. What does not fit it was cut, edited or written by other
code, and is told in one line with its place in the file.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from canvaslm.errors import InputError

M = TypeVar("M", bound=BaseModel)
_SHOWN = 60


def read_written(path: Path, *, expected: str, missing: str, fix: str) -> bytes:
    """The bytes of a file that an earlier stage wrote.

    Args:
        path: where it lies.
        expected: what it should be.
        missing: what to call it when there is no such file.
        fix: what to do then.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        got = missing if is_missing else error.strerror or "an error"
        raise InputError(path, expected=expected, got=got, fix=fix) from None


def parse_written(
    content: bytes, where: str | Path, model: type[M], *, expected: str, broken: str, fix: str
) -> M:
    """Turn the bytes of a JSON file into its model.

    Args:
        content: the bytes.
        where: what to call the file in messages.
        model: a strict model.
        expected: what the file should be.
        broken: what to call it when it does not fit.
        fix: what to do then.

    Raises:
        InputError: it is no JSON, or a value is missing, unknown or of another kind.
    """
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        got = f"{broken} ({_told(error)})"
        raise InputError(where, expected=expected, got=got, fix=fix) from None


def _told(error: ValidationError) -> str:
    """The first thing that does not fit, and its place."""
    fault = error.errors(include_url=False)[0]
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "json_invalid":
        return message
    place = ".".join(str(part) for part in fault["loc"]) or "the whole"
    if fault["type"] in ("missing", "extra_forbidden"):
        return f"{place}: {message}"
    shown = repr(fault["input"])
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"{place}: {message}, got {shown}"
