"""Compare the diffusion bound with the twin's likelihood on the same held-out tokens."""

from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def eval_loss_parity(
    shards: Annotated[Path, typer.Option(help="packed shards")] = Path("data/shards"),
    autoregressive: Annotated[Path, typer.Option(help="the twin's checkpoint")] = Path(
        "checkpoints/autoregressive"
    ),
    diffusion: Annotated[Path, typer.Option(help="the diffusion checkpoint")] = Path(
        "checkpoints/diffusion"
    ),
    out: Annotated[Path, typer.Option(help="where the report goes")] = Path(
        "reports/eval_loss_parity"
    ),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Score held-out text with both models: exact likelihood against the summed bound."""
    from canvaslm.evaluation.loss_parity import judge_loss_parity
    from canvaslm.evaluation.parity_params import EvalLossParityParams
    from canvaslm.params import load_section

    judge_loss_parity(
        shards=shards,
        autoregressive=autoregressive,
        diffusion=diffusion,
        out=out,
        params=load_section(params, "eval_loss_parity", EvalLossParityParams),
        track=track,
    )


if __name__ == "__main__":
    main(eval_loss_parity)
