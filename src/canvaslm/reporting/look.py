"""How do all our pages look: one style, light and dark, that needs nothing but itself?"""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

NOT_MEASURED = "not measured"


def render(template: Path, **content: Any) -> str:
    """Lay out a page.

    Args:
        template: its template, which may import the macros and the style of ``look.html``.
        content: what the template names.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template.name).render(not_measured=NOT_MEASURED, **content)
    return f"{page}\n".encode(errors="replace").decode()  # JSON may hold half a surrogate pair


def printable(text: str) -> str:
    """Show control characters, which a page may not hold, as what cannot be shown."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
