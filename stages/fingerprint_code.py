from pathlib import Path
from typing import Annotated

import typer

from door import main


def fingerprint_code(
    root: Annotated[Path, typer.Option(help="the repository")] = Path(),
    out: Annotated[Path, typer.Option(help="where the fingerprints go")] = Path("reports/code"),
    sources: Annotated[Path, typer.Option(help="where the digests of all sources go")] = Path(
        "reports/sources.json"
    ),
) -> None:
    """Write which code each stage can reach, with a digest of every file, for DVC to depend on."""
    from canvaslm.code_fingerprint import fingerprint, source_digests
    from canvaslm.params import read_yaml
    from canvaslm.reporting.files import write_json

    # DVC takes no dvc.yaml for a dep; a stage that is new there has a new file in stages/.
    for name in read_yaml(root / "dvc.yaml")["stages"]:
        write_json(out / f"{name}.json", fingerprint(root / "stages" / f"{name}.py", root))
    write_json(sources, source_digests(root))


if __name__ == "__main__":
    main(fingerprint_code)
