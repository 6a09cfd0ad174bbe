"""How is the page of all knobs made from the models that read them?"""

import json
import re
from collections.abc import Mapping
from typing import Any

from canvaslm.params import Params, describe_knobs

_HEAD = """# Knobs

Every value of the pipeline stands in `params.yaml`, which `make profile` composes from `configs/`.
This page is made from the models that read the sections, by `make knobs`; do not edit it. The
values are those of `configs/base.yaml`, which a profile overrides in part.
"""
_SIGNS = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}


def knobs_page(sections: Mapping[str, type[Params]], base: Mapping[str, Any]) -> str:
    """Write the Markdown page of all knobs.

    Args:
        sections: the model of each section of the params file.
        base: the content of ``configs/base.yaml``.
    """
    lines = [_HEAD]
    for section, model in sections.items():
        lines.append(f"## {section}\n")
        lines.append("| knob | type | bounds | base value | meaning |\n|---|---|---|---|---|")
        for knob in describe_knobs(model):
            value = json.dumps(base[section][knob["name"]], ensure_ascii=False)
            cells = [
                f"`{knob['name']}`",
                knob["type"],
                _bounds(knob["bounds"]),
                f"`{value}`",
                knob["meaning"],
            ]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _bounds(text: str) -> str:
    """``Ge(ge=1), Lt(lt=2)`` becomes ``≥ 1, < 2``."""
    for name, sign in _SIGNS.items():
        text = re.sub(rf"\b{name}\({name.lower()}=([^)]+)\)", rf"{sign} \1", text)
    text = re.sub(r"MinLen\(min_length=(\d+)\)", r"at least \1 of them", text)
    return re.sub(r"MultipleOf\(multiple_of=(\d+)\)", r"a multiple of \1", text)
