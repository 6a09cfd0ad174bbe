import importlib
from pathlib import Path
from typing import Annotated

import typer

from door import SECTIONS, main


def list_knobs(
    base: Annotated[Path, typer.Option(help="the base configuration")] = Path("configs/base.yaml"),
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("docs/knobs.md"),
) -> None:
    """Write the page of all knobs from the models that read them."""
    from canvaslm.params import read_yaml
    from canvaslm.reporting.files import write_bytes
    from canvaslm.reporting.knobs import knobs_page

    models = {}
    for section, place in SECTIONS.items():
        module, _, name = place.partition(":")
        models[section] = getattr(importlib.import_module(module), name)
    write_bytes(out, knobs_page(models, read_yaml(base)).encode())


if __name__ == "__main__":
    main(list_knobs)
