from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def collect_documents(
    raw: Annotated[Path, typer.Option(help="the record of the corpus")] = Path("data/raw"),
    documents: Annotated[Path, typer.Option(help="where the documents go")] = Path(
        "data/documents"
    ),
    reports: Annotated[Path, typer.Option(help="where the counts go")] = Path(
        "reports/collect_documents"
    ),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Read all texts of the corpus strictly, drop exact copies, and hold some documents out."""
    from canvaslm.corpus.chain import read_chain
    from canvaslm.corpus.documents import CollectParams
    from canvaslm.corpus.documents import collect_documents as collect
    from canvaslm.corpus.fetch import read_inputs
    from canvaslm.corpus.markov import measure_floor
    from canvaslm.params import load_section
    from canvaslm.reporting.files import write_json

    section = load_section(params, "collect_documents", CollectParams)
    inputs = read_inputs(raw)
    chain = read_chain(raw) if inputs.source == "markov" else None
    counts = collect(inputs, section, documents, track=track)
    floor = measure_floor(chain, documents, track=track)
    write_json(reports / "metrics.json", asdict(counts) | floor)


if __name__ == "__main__":
    main(collect_documents)
