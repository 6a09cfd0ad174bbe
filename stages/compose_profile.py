from pathlib import Path
from typing import Annotated

import typer

from door import main, validate_params


def compose_profile(
    name: Annotated[str, typer.Option(help="ci, laptop, cpu_small, gpu_343m or your own")],
    configs: Annotated[Path, typer.Option(help="where base.yaml and NAME.yaml lie")] = Path(
        "configs"
    ),
    out: Annotated[Path, typer.Option(help="the params file to write")] = Path("params.yaml"),
) -> None:
    """Write the params file: configs/base.yaml with the overrides of configs/NAME.yaml."""
    from canvaslm.profiles import composed_profile
    from canvaslm.reporting.files import write_bytes

    write_bytes(out, composed_profile(name, configs).encode())
    validate_params(out)


if __name__ == "__main__":
    main(compose_profile)
