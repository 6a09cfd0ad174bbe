"""Train one objective, or go on with a run that was killed."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from door import PARAMS, ROOT, code_digest, main, track

_OBJECTIVE = typer.Option(help="what to train")
_OUT = typer.Option(help="the final checkpoint [default: checkpoints/OBJECTIVE]")
_REPORTS = typer.Option(help="loss and metrics [default: reports/pretrain/OBJECTIVE]")
_RESUME = typer.Option(help="a run's folder, or a checkpoint in it, to go on from")
_FORK = typer.Option(help="a checkpoint whose weights begin a new run")


def pretrain(
    objective: Annotated[Literal["diffusion", "autoregressive"], _OBJECTIVE],
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    out: Annotated[Path | None, _OUT] = None,
    reports: Annotated[Path | None, _REPORTS] = None,
    params: PARAMS = Path("params.yaml"),
    resume: Annotated[Path | None, _RESUME] = None,
    fork: Annotated[Path | None, _FORK] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="two steps, no file touched")] = False,
) -> None:
    """Train one objective; a killed run goes on from its own state under .work/pretrain."""
    from canvaslm.diffusion.schedule import DiffusionParams
    from canvaslm.layout import Layout
    from canvaslm.model.shape import ModelParams
    from canvaslm.params import load_section
    from canvaslm.training import dry_run as rehearsal
    from canvaslm.training import job, lineage, plan, run

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
    origin = lineage.open_origin(resume=resume, fork=fork)
    run.pretrain(
        job.make_job(recipe, shards=shards, code_digest=code, parent=origin.parent),
        work=Path(os.environ.get("DVC_ROOT", ROOT)) / ".work" / "pretrain",
        out=out or Path("checkpoints") / objective,
        reports=reports or Path("reports/pretrain") / objective,
        track=track,
        origin=origin,
    )


if __name__ == "__main__":
    main(pretrain)
