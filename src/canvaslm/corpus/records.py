"""What does one file hold, record by record?

Files are read strictly: a record that is not what it should be stops the stage with its file and
record number, and nothing is guessed or repaired. Lines of JSON are counted from 1, as editors do;
rows of Parquet from 0, as data frames do.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from canvaslm.corpus.parquet import read_strings
from canvaslm.errors import InputError

_BOM = b"\xef\xbb\xbf"
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PAR1": "parquet"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of a file; ``text`` is None where the file holds a null."""

    place: str
    text: str | None


def read_records(path: Path, *, name: str, kind: str, text_field: str) -> Iterator[Record]:
    """Read the records of one file strictly, one after the other.

    Args:
        path: where the file lies.
        name: what to call it in messages and in ``source``.
        kind: ``txt``, ``jsonl``, ``jsonl.gz`` or ``parquet``.
        text_field: the key or column of the text; a literal key with dots in it wins over a path
            into objects.

    Raises:
        InputError: with the file and, where there is one, the number of the bad record.
    """
    reader: dict[str, Callable[[Path, str, str], Iterator[Record]]] = {
        "txt": _read_txt,
        "jsonl": _read_jsonl,
        "jsonl.gz": _read_jsonl_gz,
        "parquet": _read_parquet,
    }
    return reader[kind](path, name, text_field)


def _read_txt(path: Path, name: str, _text_field: str) -> Iterator[Record]:
    """A whole file is one document; line ends become ``\\n`` on every system."""
    content = path.read_bytes()
    _check_magic(name, content[:4], None)
    text = _decode(content.removeprefix(_BOM), name)
    yield Record(place=name, text=text.replace("\r\n", "\n").replace("\r", "\n"))


def _read_jsonl(path: Path, name: str, text_field: str) -> Iterator[Record]:
    with path.open("rb") as handle:
        _check_magic(name, handle.read(4), None)
        handle.seek(0)
        yield from _parse_lines(handle, name, text_field)


def _read_jsonl_gz(path: Path, name: str, text_field: str) -> Iterator[Record]:
    with path.open("rb") as handle:
        head = handle.read(4)
    if not head:
        raise InputError(name, expected="a gzip file", got="an empty file", fix="fetch it again")
    _check_magic(name, head, "gzip")
    try:
        with gzip.open(path, "rb") as lines:
            yield from _parse_lines(lines, name, text_field)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            name, expected="a whole gzip file", got=f"damaged gzip: {error}", fix="fetch it again"
        ) from None


def _parse_lines(lines: BinaryIO | gzip.GzipFile, name: str, field: str) -> Iterator[Record]:
    """One JSON object a line. Only the byte ``\\n`` ends a line; blank lines are not records."""
    for number, line in enumerate(lines, start=1):
        content = line.removeprefix(_BOM) if number == 1 else line
        content = content.strip(b" \t\r\n")
        if content:
            place = f"{name}:{number}"
            yield Record(place=place, text=_text_of(content, place, field))


def _text_of(content: bytes, place: str, field: str) -> str | None:
    """The text in one line of JSON, None for a null."""
    try:
        record = json.loads(_utf8(content, place))
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(
            place,
            expected="one JSON object a line",
            got=f"malformed JSON: {told}",
            fix="correct or remove the line",
        ) from None
    if not isinstance(record, dict):
        raise InputError(
            place,
            expected="a JSON object",
            got=f"record is not an object but {type(record).__name__}",
            fix="correct or remove the line",
        )
    value = _field_of(record, place, field)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(
            place,
            expected=f"a string in {field!r}",
            got=f"text is not a string but {type(value).__name__}",
            fix="correct or remove the line",
        )
    return _clean(value, place)


def _field_of(record: dict[str, Any], place: str, field: str) -> object:
    """A literal key wins; otherwise the dots of the field reach into objects."""
    if field in record:
        return record[field]
    value: object = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise InputError(
                place,
                expected=f"a field {field!r}",
                got=f"no field {field!r}; the keys are {', '.join(map(repr, record)) or 'none'}",
                fix="set fetch_corpus.text_field",
            )
        value = value[key]
    return value


def _read_parquet(path: Path, name: str, field: str) -> Iterator[Record]:
    """The rows of a column of strings, each checked as text."""
    for number, value in enumerate(read_strings(path, name, field)):
        place = f"{name}:row {number}"
        yield Record(place=place, text=None if value is None else _decode(value, place))


def _decode(content: bytes, place: str) -> str:
    return _clean(_utf8(content, place), place)


def _utf8(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            place,
            expected="UTF-8",
            got=f"invalid UTF-8 at byte {error.start}",
            fix="convert it to UTF-8",
        ) from None


def _clean(text: str, place: str) -> str:
    """Refuse text that no tokenizer could give back: NUL bytes and halves of a pair."""
    got = "a NUL byte" if "\0" in text else None
    try:
        text.encode()
    except UnicodeEncodeError:
        got = "a lone surrogate"
    if got is None:
        return text
    raise InputError(place, expected="text", got=got, fix="correct or remove the record")


def _check_magic(name: str, head: bytes, want: str | None) -> None:
    """Suffix and content must agree."""
    got = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if got != want:
        raise InputError(
            name,
            expected=f"{want or 'plain text'}, as the suffix says",
            got=got or "something else",
            fix="rename or convert the file",
        )
