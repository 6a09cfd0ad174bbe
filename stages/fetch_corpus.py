from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main


def fetch_corpus(
    raw: Annotated[Path, typer.Option(help="where the record of the corpus goes")] = Path(
        "data/raw"
    ),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Fetch the embedded corpus, draw one, or find your own files, and record every file's hash."""
    from canvaslm.corpus.fetch import FetchParams
    from canvaslm.corpus.fetch import fetch_corpus as fetch
    from canvaslm.params import load_section

    fetch(load_section(params, "fetch_corpus", FetchParams), raw)


if __name__ == "__main__":
    main(fetch_corpus)
