from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def train_tokenizer(
    documents: Annotated[Path, typer.Option(help="the documents")] = Path("data/documents"),
    tokenizer: Annotated[Path, typer.Option(help="the tokenizer to write")] = Path(
        "data/tokenizer/tokenizer.json"
    ),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Learn a byte-level vocabulary from the train documents, or check and adopt your own."""
    from canvaslm.corpus.documents import read_texts
    from canvaslm.corpus.tokenizer import TokenizerParams
    from canvaslm.corpus.tokenizer import train_tokenizer as train
    from canvaslm.layout import Layout
    from canvaslm.params import load_section
    from canvaslm.reporting.files import write_bytes

    section = load_section(params, "train_tokenizer", TokenizerParams)
    layout = load_section(params, "layout", Layout)
    texts = read_texts(documents / "train.parquet", track=track)
    write_bytes(tokenizer, train(texts, section, layout.vocab_size))


if __name__ == "__main__":
    main(train_tokenizer)
