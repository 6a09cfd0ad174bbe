from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def pack_shards(
    documents: Annotated[Path, typer.Option(help="the documents")] = Path("data/documents"),
    tokenizer: Annotated[Path, typer.Option(help="the tokenizer")] = Path(
        "data/tokenizer/tokenizer.json"
    ),
    shards: Annotated[Path, typer.Option(help="where the shards go")] = Path("data/shards"),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Encode the documents and lay their ids into shards, each document whole in one shard."""
    from canvaslm.corpus.shards import PackParams
    from canvaslm.corpus.shards import pack_shards as pack
    from canvaslm.corpus.tokenizer import Tokenizer
    from canvaslm.params import load_section

    section = load_section(params, "pack_shards", PackParams)
    pack(documents, Tokenizer.load(tokenizer), section, shards, track=track)


if __name__ == "__main__":
    main(pack_shards)
