"""Continue a prompt with a trained model; no part of the pipeline."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, say


def generate(
    prompt: Annotated[str, typer.Option(help="the text to continue")] = "",
    new_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens asked for; without it, to the window's end")
    ] = None,
    checkpoint: Annotated[Path, typer.Option(help="of either objective")] = Path(
        "checkpoints/diffusion"
    ),
    tokenizer: Annotated[Path, typer.Option(help="the tokenizer of the shards")] = Path(
        "data/tokenizer/tokenizer.json"
    ),
    watch: Annotated[bool, typer.Option("--watch", help="draw every step on stderr")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="instead of generate.seed")] = None,
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Print the prompt's continuation on stdout."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from canvaslm.evaluation.continuation import Pieces, continue_text, unshown
    from canvaslm.evaluation.speedup_params import GenerateParams
    from canvaslm.params import load_section

    setup = load_section(params, "generate", GenerateParams)
    if seed is not None:
        setup = setup.model_copy(update={"seed": seed})
    console = Console(stderr=True)  # the finished canvas gives way to the text where both are seen
    live = Live(console=console, transient=console.is_terminal) if watch else None

    def draw(pieces: Pieces) -> None:
        assert live is not None
        live.update(Text.assemble(*((text, "" if sure else "dim") for text, sure in pieces)))

    with live or contextlib.nullcontext():
        continuation = continue_text(
            prompt,
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            new_tokens=new_tokens,
            params=setup,
            show=draw if watch else unshown,
        )
    say(continuation.text)


if __name__ == "__main__":
    main(generate)
