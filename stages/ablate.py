from pathlib import Path
from typing import Annotated, Literal

import typer

from door import ROOT, main, say, track, validate_params

_DO = typer.Option(help="write down what is held fixed; run what is missing; or only tabulate")


def ablate(
    id: Annotated[str, typer.Option(help="a file of docs/ablations/")],
    do: Annotated[Literal["freeze", "run", "tabulate"], _DO] = "run",
    root: Annotated[Path, typer.Option(help="the repository")] = ROOT,
) -> None:
    """Run an ablation that was written down before, and say what follows and what does not."""
    from canvaslm.ablation.programme import freeze, run_programme
    from canvaslm.ablation.spec import read_spec, report_folder

    spec = read_spec(root, id)
    if do == "freeze":
        freeze(root, spec, validate=validate_params)
        say(f"docs/ablations/{id}.yaml holds what stays fixed; commit it, then make ablate ID={id}")
        return
    if do == "run":
        first = run_programme(root, spec, validate=validate_params, track=track)[0]
        from canvaslm.ablation.timing import measure_seconds

        measure_seconds(root, spec, first, track)
    from canvaslm.ablation.report import tabulate

    for result in tabulate(root, spec).values():
        judged = f": {result.judgement}" if result.judgement else ""
        say(f"{result.name}: {spec.measure.key} {result.mean:.4f}{judged}")
    say(f"the table is {report_folder(root, spec) / 'table.md'}")


if __name__ == "__main__":
    main(ablate)
