import tempfile
from pathlib import Path
from typing import Annotated

import typer

from door import main, validate_params


def compose_profile(
    name: Annotated[
        str,
        typer.Option(help="ci, markov, ablation, laptop, cpu_small, gpu_343m or your own"),
    ],
    configs: Annotated[Path, typer.Option(help="where base.yaml and NAME.yaml lie")] = Path(
        "configs"
    ),
    out: Annotated[Path, typer.Option(help="the params file to write")] = Path("params.yaml"),
) -> None:
    """Write the params file: configs/base.yaml with the overrides of configs/NAME.yaml."""
    from canvaslm.profiles import composed_profile
    from canvaslm.reporting.files import write_bytes

    text = composed_profile(name, configs)
    with tempfile.TemporaryDirectory() as aside:
        draft = Path(aside) / f"{name}.yaml"
        draft.write_text(text, encoding="utf-8")
        validate_params(draft)
    write_bytes(out, text.encode())


if __name__ == "__main__":
    main(compose_profile)
