"""Hold the samplers against each other: quality of their samples against forwards and seconds."""

from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def eval_samples(
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    autoregressive: Annotated[Path, typer.Option(help="the twin's checkpoint")] = Path(
        "checkpoints/autoregressive"
    ),
    diffusion: Annotated[Path, typer.Option(help="the diffusion checkpoint")] = Path(
        "checkpoints/diffusion"
    ),
    out: Annotated[Path, typer.Option(help="where the report goes")] = Path("reports/eval_samples"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Sample by every rule and number of steps: what each wins in quality, and by losing what."""
    from canvaslm.evaluation.samples_params import EvalSamplesParams
    from canvaslm.evaluation.samples_report import measure_samples
    from canvaslm.params import load_section

    measure_samples(
        shards=shards,
        autoregressive=autoregressive,
        diffusion=diffusion,
        out=out,
        params=load_section(params, "eval_samples", EvalSamplesParams),
        track=track,
    )


if __name__ == "__main__":
    main(eval_samples)
