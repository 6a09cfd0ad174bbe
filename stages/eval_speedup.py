"""Compare the speed of the decoders, and the quality of what they write at that speed."""

from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def eval_speedup(
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    tokenizer: Annotated[Path, typer.Option(help="their tokenizer")] = Path(
        "data/tokenizer/tokenizer.json"
    ),
    autoregressive: Annotated[Path, typer.Option(help="the twin's checkpoint")] = Path(
        "checkpoints/autoregressive"
    ),
    diffusion: Annotated[Path, typer.Option(help="the diffusion checkpoint")] = Path(
        "checkpoints/diffusion"
    ),
    out: Annotated[Path, typer.Option(help="where the report goes")] = Path("reports/eval_speedup"),
    counts_only: Annotated[
        bool, typer.Option("--counts-only", help="count forwards only; needs no checkpoint")
    ] = False,
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Decode held-out prompts four ways: forwards, tokens per second, quality of the samples."""
    from canvaslm.evaluation.speedup_params import EvalSpeedupParams
    from canvaslm.evaluation.speedup_report import count_speedup, measure_speedup
    from canvaslm.layout import Layout
    from canvaslm.model.shape import ModelParams
    from canvaslm.params import load_section

    setup = load_section(params, "eval_speedup", EvalSpeedupParams)
    if counts_only:
        count_speedup(
            shards=shards,
            out=out,
            layout=load_section(params, "layout", Layout),
            model=load_section(params, "model", ModelParams),
            params=setup,
            track=track,
        )
        return
    measure_speedup(
        shards=shards,
        tokenizer=tokenizer,
        autoregressive=autoregressive,
        diffusion=diffusion,
        out=out,
        params=setup,
        track=track,
    )


if __name__ == "__main__":
    main(eval_speedup)
