"""Audit a finished run before anybody reads its loss."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from door import PARAMS, code_digest, main, track


def audit_run(
    objective: Annotated[
        Literal["diffusion", "autoregressive"], typer.Option(help="which run to audit")
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="its checkpoint [default: checkpoints/OBJECTIVE]")
    ] = None,
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    tokenizer: Annotated[Path, typer.Option(help="the tokenizer of the shards")] = Path(
        "data/tokenizer/tokenizer.json"
    ),
    reports: Annotated[Path, typer.Option(help="where the reports lie")] = Path("reports"),
    out: Annotated[
        Path | None, typer.Option(help="the page [default: REPORTS/audit_run/OBJECTIVE]")
    ] = None,
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Hold a finished run against its data, its params and itself; exit 1 when a check fails."""
    from canvaslm.diffusion.schedule import DiffusionParams
    from canvaslm.layout import Layout
    from canvaslm.model.shape import ModelParams
    from canvaslm.params import load_section
    from canvaslm.run_audit import subject, walk
    from canvaslm.run_audit.params import AuditRunParams
    from canvaslm.training import plan

    recipe = plan.recipe(
        objective,
        layout=load_section(params, "layout", Layout),
        model=load_section(params, "model", ModelParams),
        diffusion=load_section(params, "diffusion", DiffusionParams),
        pretrain=load_section(params, "pretrain", plan.PretrainParams),
    )
    opened = subject.open_subject(
        recipe,
        params=load_section(params, "audit_run", AuditRunParams),
        checkpoint=checkpoint or Path("checkpoints") / objective,
        shards=shards,
        tokenizer=tokenizer,
        reports=reports / "pretrain" / objective,
        corpus_metrics=reports / "collect_documents" / "metrics.json",
        code_digest=code_digest("pretrain"),
        track=track,
    )
    walk.audit_run(opened, out=out or reports / "audit_run" / objective)


if __name__ == "__main__":
    main(audit_run)
