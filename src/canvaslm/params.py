"""Which values did the user choose, and are they values that make sense?

``params.yaml`` holds every value; nothing in Python has a default. Each room describes its own
section with a frozen, strict model derived from :class:`Params`, and a stage reads a section with
:func:`load_section`. YAML is read by the 1.2 rules, so ``3e-05`` is a number, ``on`` is text and
``010`` is ten.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from canvaslm.errors import InputError

_SWITCHES = {"false": False, "0": False, "no": False, "true": True, "1": True, "yes": True}


def _as_switch(value: object) -> bool:
    """Read what people write for on and off; text is never true for being there."""
    if isinstance(value, (bool, int, str)) and str(value).lower() in _SWITCHES:
        return _SWITCHES[str(value).lower()]
    raise ValueError("true (True, 1, yes) or false (False, 0, no)")


Switch = Annotated[bool, BeforeValidator(_as_switch)]
"""A knob that is on or off; every knob that is one has this type."""


_LARGEST = 2**31 - 1  # of any whole number; counts beyond it are slips of the keyboard


class Params(BaseModel):
    """Base of every section: frozen, strict in types, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


P = TypeVar("P", bound=Params)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML 1.2 mapping.

    Raises:
        InputError: the file is missing, is not YAML, repeats a key, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            path, expected="a params file", got="no such file", fix="run `make profile NAME=laptop`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            path, expected="a readable UTF-8 file", got=str(error), fix="check the path"
        ) from None
    try:
        content = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:  # dates, numbers, nesting among them
        got = " ".join(str(error).split())[:200]
        raise InputError(path, expected="YAML", got=got, fix="correct that line") from None
    if not isinstance(content, dict):
        raise InputError(
            path,
            expected="a mapping of sections",
            got=type(content).__name__,
            fix="run `make profile NAME=laptop`",
        )
    return content


def load_section(path: Path, section: str, model: type[P]) -> P:
    """Read one section of a params file as its strict model.

    Args:
        path: the params file, usually ``params.yaml``.
        section: the top-level key, for example ``"pack_shards"``.
        model: the :class:`Params` subclass that describes the section.

    Raises:
        InputError: the file or section is missing, a key is unknown (the nearest known key is
            suggested), a key is missing, or a value has the wrong type or lies out of bounds.
    """
    content = read_yaml(path)
    if section not in content:
        raise InputError(
            f"{path}:{section}",
            expected="a section of that name",
            got=_listed(content),
            fix="run `make profile NAME=laptop`",
        )
    return parse_section(content[section], model, where=f"{path}:{section}")


def parse_section(values: object, model: type[P], *, where: str) -> P:
    """Turn the values of one section into its model, or say what is wrong with the first of them.

    Raises:
        InputError: as :func:`load_section`.
    """
    if not isinstance(values, Mapping):
        raise InputError(
            where, expected="a mapping", got=repr(values), fix="indent the keys of the section"
        )
    for key, value in values.items():
        if type(value) is int and abs(value) > _LARGEST:
            raise InputError(
                f"{where}.{key}",
                expected=f"a whole number up to {_LARGEST}",
                got=f"{len(str(abs(value)))} digits",
                fix="correct the value",
            )
    try:
        return model.model_validate({str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise _as_input_error(error, model, where) from None


def compose(base: Mapping[str, Any], overrides: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Lay a profile's overrides over the base configuration.

    Args:
        base: every key with its base value.
        overrides: the few keys that the profile changes.
        where: the name of the override file, for the message.

    Raises:
        InputError: an override names a key that the base does not have.
    """
    merged = dict(base)
    for key, value in overrides.items():
        if key not in base:
            raise _unknown_key(f"{where}:{key}", str(key), base)
        inner = base[key]
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[key] = compose(inner, value, where=f"{where}:{key}")
        elif isinstance(inner, Mapping) or isinstance(value, Mapping):
            raise InputError(
                f"{where}:{key}",
                expected="a mapping" if isinstance(inner, Mapping) else "a single value",
                got=repr(value),
                fix="write it as configs/base.yaml does",
            )
        else:
            merged[key] = value
    return merged


def describe_knobs(model: type[Params]) -> list[dict[str, str]]:
    """List the knobs of a section for the documentation: name, type, bounds, meaning."""
    rows = []
    for name, field in model.model_fields.items():
        bounds = ", ".join(
            str(item)
            for item in field.metadata
            if type(item).__name__ in {"Ge", "Gt", "Le", "Lt", "MinLen", "MaxLen", "MultipleOf"}
        )
        rows.append(
            {
                "name": name,
                "type": _type_name(field.annotation),
                "bounds": bounds,
                "meaning": field.description or "",
            }
        )
    return rows


def nearest_name(name: object, known: Iterable[str]) -> str:
    """Advise on a name that is not known: the nearest one, or all of them."""
    names = list(known)
    nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else f"the names are {_listed(names)}"


def _type_name(annotation: object) -> str:
    """Spell a field's type as the documentation shows it."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if annotation is type(None):
        return "null"
    if annotation is bool:
        return "true | false"
    return getattr(annotation, "__name__", str(annotation))


def _as_input_error(error: ValidationError, model: type[Params], where: str) -> InputError:
    """Tell one fault of a section as where, expected, got and what to do.

    A misspelt key leaves another one missing; the misspelling is the fault to tell.
    """
    faults = error.errors()
    fault = next((item for item in faults if item["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(part) for part in fault["loc"])
    place = f"{where}.{key}" if key else where
    if fault["type"] == "extra_forbidden":
        return _unknown_key(place, key, model.model_fields)
    if fault["type"] == "missing":
        return InputError(
            place, expected="a value", got="nothing", fix="add the key (see configs/base.yaml)"
        )
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    got = f"{fault['input']!r} ({type(fault['input']).__name__})"
    return InputError(place, expected=message, got=got, fix="correct the value")


def _unknown_key(where: str, key: str, known: Iterable[str]) -> InputError:
    """Refuse a key that nothing reads, with the nearest one that something reads."""
    return InputError(where, expected="a known key", got=repr(key), fix=nearest_name(key, known))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(str(name) for name in names)) or "none"
