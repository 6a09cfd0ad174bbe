"""Which values make a profile, and how are they spelled in the params file?"""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from canvaslm.errors import InputError
from canvaslm.params import compose, read_yaml

_WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def composed_profile(name: str, configs: Path) -> str:
    """Compose the text of a params file: every key of the base, in its order, with its value.

    Args:
        name: of the file of overrides, ``configs/NAME.yaml``, whose ``profile`` says it too.
        configs: the folder of ``base.yaml`` and of the overrides.

    Raises:
        InputError: there is no such profile, or it overrides a key that the base does not have.
    """
    overrides = configs / f"{name}.yaml"
    if name == "base" or not overrides.is_file():
        known = ", ".join(sorted({file.stem for file in configs.glob("*.yaml")} - {"base"}))
        raise InputError(overrides, expected="a profile", got=repr(name), fix=f"there are {known}")
    values = compose(read_yaml(configs / "base.yaml"), read_yaml(overrides), where=str(overrides))
    if values["profile"] != name:
        raise InputError(
            f"{overrides}:profile",
            expected=repr(name),
            got=repr(values["profile"]),
            fix="give the profile the name of its file",
        )
    return _to_yaml(values)


def _to_yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Spell values so that readers of YAML 1.1 and of YAML 1.2 agree about each of them."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_to_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    """JSON, but for floats, which get a point and no exponent, and for plain words.

    YAML 1.1 takes ``1e-05`` for text, and ``on`` and ``no`` for booleans.
    """
    if isinstance(value, float):
        digits = f"{Decimal(repr(value)):f}"
        return digits if "." in digits else f"{digits}.0"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return json.dumps(value) if value.lower() in _WORDS_OF_YAML else value
    return json.dumps(value)
