"""Take the likelihood bound in full, place by place, and prove it on the twin's predictions."""

from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def eval_bound(
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    autoregressive: Annotated[Path, typer.Option(help="the twin's checkpoint")] = Path(
        "checkpoints/autoregressive"
    ),
    diffusion: Annotated[Path, typer.Option(help="the diffusion checkpoint")] = Path(
        "checkpoints/diffusion"
    ),
    out: Annotated[Path, typer.Option(help="where the report goes")] = Path("reports/eval_bound"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Score held-out text at several numbers of times and in continuous time, place by place."""
    from canvaslm.evaluation.bound import judge_bound
    from canvaslm.evaluation.bound_params import EvalBoundParams
    from canvaslm.params import load_section

    judge_bound(
        shards=shards,
        autoregressive=autoregressive,
        diffusion=diffusion,
        out=out,
        params=load_section(params, "eval_bound", EvalBoundParams),
        track=track,
    )


if __name__ == "__main__":
    main(eval_bound)
