import os
from pathlib import Path

import typer

from door import ROOT, main


def clear_runs() -> None:
    """Remove the states of all trainings under .work that no live process holds."""
    from canvaslm.training.run_state import clear_runs as clear

    work = Path(os.environ.get("DVC_ROOT", ROOT)) / ".work" / "pretrain"
    for directory in clear(work):
        typer.echo(f"removed {directory}", err=True)


if __name__ == "__main__":
    main(clear_runs)
