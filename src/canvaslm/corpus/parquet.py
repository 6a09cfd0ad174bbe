"""How does a table lie in a Parquet file?

pyarrow is imported where a file is opened and nowhere else: each stage reads the knobs of all
sections at its door, and none should wait there for a library that it does not need.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from canvaslm.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH_ROWS = 1024


def schema_of(columns: Mapping[str, str]) -> "pa.Schema":
    """A schema from column names and the names of their types."""
    import pyarrow as pa

    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])


@contextmanager
def open_parquet(path: Path, where: str, expected: str, fix: str) -> Iterator["pq.ParquetFile"]:
    """Open a file for as long as it is read.

    Args:
        path: where the file lies.
        where: what to call it in messages.
        expected: what it should be.
        fix: what to do when it is not.

    Raises:
        InputError: it cannot be opened, or turns out to be damaged while it is read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        got = f"unreadable: {str(error).splitlines()[0]}"
        raise InputError(where, expected=expected, got=got, fix=fix) from None


@contextmanager
def open_table(
    path: Path, columns: Mapping[str, str], expected: str, fix: str
) -> Iterator["pq.ParquetFile"]:
    """Open a table that an earlier stage wrote, which has these columns and no others.

    Args:
        path: where the file lies.
        columns: names and the names of their types, in order.
        expected: what it should be.
        fix: what to do when it is not.

    Raises:
        InputError: as :func:`open_parquet`, or its columns are others.
    """
    with open_parquet(path, str(path), expected, fix) as file:
        found = {name: str(file.schema_arrow.field(name).type) for name in file.schema_arrow.names}
        if found != dict(columns):
            told = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise InputError(path, expected=expected, got=f"columns {told or 'none'}", fix=fix)
        yield file


def checked_batches(
    file: "pq.ParquetFile", columns: Sequence[str], batch_rows: int
) -> Iterator["pa.RecordBatch"]:
    """The rows of a table of ours, in which nothing is null and every string is UTF-8.

    Raises:
        pa.ArrowInvalid: they are not; :func:`open_table` tells it as an InputError.
    """
    import pyarrow as pa

    for batch in file.iter_batches(batch_size=batch_rows, columns=list(columns)):
        batch.validate(full=True)
        for name in columns:
            if batch.column(name).null_count:
                raise pa.ArrowInvalid(f"a null in column {name!r}")
        yield batch


def read_strings(path: Path, name: str, field: str) -> Iterator[bytes | None]:
    """The values of a column of strings in file order, across row groups, as bytes.

    As bytes, since Arrow does not check that a string is UTF-8.

    Args:
        path: where the file lies.
        name: what to call it in messages.
        field: the column; a literal name with dots in it wins over a path into objects.

    Raises:
        InputError: it is no whole Parquet file, or has no such column of strings.
    """
    with open_parquet(path, name, "a Parquet file", "write it again") as file:
        column, *inner = _column_keys(file.schema_arrow, name, field)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            yield from _as_bytes(batch.column(column), inner)


def _column_keys(schema: "pa.Schema", name: str, field: str) -> list[str]:
    """The column, and the keys inside it, that hold the text; its type must be a string."""
    import pyarrow as pa

    keys = [field] if field in schema.names else field.split(".")
    if keys[0] not in schema.names:
        raise InputError(
            name,
            expected=f"a column {field!r}",
            got=f"no column {field!r}; columns: {', '.join(sorted(schema.names)) or 'none'}",
            fix="set fetch_corpus.text_field",
        )
    kind = schema.field(keys[0]).type
    for key in keys[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(key) < 0:
            raise InputError(
                name,
                expected=f"a column {field!r}",
                got=f"no field {key!r} in type {kind}",
                fix="set fetch_corpus.text_field",
            )
        kind = kind.field(key).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise InputError(
            name,
            expected="type string",
            got=f"column {field!r} has type {kind}",
            fix="set fetch_corpus.text_field to a column of strings",
        )
    return keys


def _as_bytes(column: "pa.Array", keys: list[str]) -> Iterator[bytes | None]:
    """The values as bytes, since Arrow does not check that a string is UTF-8."""
    import pyarrow as pa

    for key in keys:
        column = _field_values(column, key)
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    return (value.as_py() for value in column.cast(pa.large_binary()))


def _field_values(column: "pa.StructArray", key: str) -> "pa.Array":
    """One field of a column of objects; null where the object itself is null."""
    return column.flatten()[column.type.get_field_index(key)]
