from pathlib import Path
from typing import Annotated

import typer

from door import main, say


def check_floor(
    n_errors: Annotated[
        float, typer.Option(min=0, help="standard errors by which chance may go below the floor")
    ],
    max_twin_ratio: Annotated[
        float, typer.Option(min=1, help="times the floor that the twin's loss may be")
    ],
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
) -> None:
    """Hold both losses against the least that text of a known law can cost; exit 1 when below."""
    from canvaslm.errors import GateClosedError
    from canvaslm.evaluation.floor import check_floor as check

    checks = check(
        reports / "collect_documents" / "metrics.json",
        reports / "eval_loss_parity" / "metrics.json",
        n_errors=n_errors,
        max_twin_ratio=max_twin_ratio,
    )
    for one in checks:
        say(str(one))
    faults = [f"{one.model} is {one.fault}" for one in checks if one.fault]
    if faults:
        raise GateClosedError("; ".join(faults))


if __name__ == "__main__":
    main(check_floor)
