from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from door import PARAMS, main, track


def audit_windows(
    shards: Annotated[Path, typer.Option(help="the shards")] = Path("data/shards"),
    tokenizer: Annotated[Path, typer.Option(help="the tokenizer")] = Path(
        "data/tokenizer/tokenizer.json"
    ),
    reports: Annotated[Path, typer.Option(help="where the findings go")] = Path(
        "reports/audit_windows"
    ),
    params: PARAMS = Path("params.yaml"),
) -> None:
    """Count everything in the shards again and check that no held-out text is trained on."""
    from canvaslm.corpus.audit import AuditParams
    from canvaslm.corpus.audit import audit_windows as audit
    from canvaslm.corpus.tokenizer import Tokenizer
    from canvaslm.errors import GateClosedError
    from canvaslm.layout import Layout
    from canvaslm.params import load_section
    from canvaslm.reporting.files import to_json, write_files

    section = load_section(params, "audit_windows", AuditParams)
    layout = load_section(params, "layout", Layout)
    found = audit(shards, Tokenizer.load(tokenizer), section, layout, track=track)
    contents = {
        "samples.json": found.samples,
        "faults.json": {"faults": [asdict(fault) for fault in found.faults]},
        "metrics.json": found.metrics,
    }
    write_files({reports / name: to_json(content).encode() for name, content in contents.items()})
    if found.faults:
        raise GateClosedError(f"{found.faults[0]} ({len(found.faults)} fault(s) in {reports})")


if __name__ == "__main__":
    main(audit_windows)
