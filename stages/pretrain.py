"""Train one objective, or go on with a run that was killed."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from door import PARAMS, ROOT, code_digest, main, track


def pretrain(
    objective: Annotated[
        Literal["diffusion", "autoregressive"], typer.Option(help="what to train")
    ],
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    out: Annotated[
        Path | None, typer.Option(help="the final checkpoint [default: checkpoints/OBJECTIVE]")
    ] = None,
    reports: Annotated[
        Path | None, typer.Option(help="loss and metrics [default: reports/pretrain/OBJECTIVE]")
    ] = None,
    params: PARAMS = Path("params.yaml"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="two steps of everything, no file touched")
    ] = False,
) -> None:
    """Train one objective; a killed run goes on from its own state under .work/pretrain."""
    from canvaslm.diffusion.schedule import DiffusionParams
    from canvaslm.layout import Layout
    from canvaslm.model.shape import ModelParams
    from canvaslm.params import load_section
    from canvaslm.training import dry_run as rehearsal
    from canvaslm.training import job, plan, run

    recipe = plan.recipe(
        objective,
        layout=load_section(params, "layout", Layout),
        model=load_section(params, "model", ModelParams),
        diffusion=load_section(params, "diffusion", DiffusionParams),
        pretrain=load_section(params, "pretrain", plan.PretrainParams),
    )
    code = code_digest("pretrain")
    if dry_run:
        typer.echo(rehearsal.dry_run(recipe, shards=shards, code_digest=code))
        return
    run.pretrain(
        job.make_job(recipe, shards=shards, code_digest=code),
        work=Path(os.environ.get("DVC_ROOT", ROOT)) / ".work" / "pretrain",
        out=out or Path("checkpoints") / objective,
        reports=reports or Path("reports/pretrain") / objective,
        track=track,
    )


if __name__ == "__main__":
    main(pretrain)
