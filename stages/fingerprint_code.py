from pathlib import Path
from typing import Annotated

import typer

from door import main


def fingerprint_code(
    root: Annotated[Path, typer.Option(help="the repository")] = Path(),
    out: Annotated[Path, typer.Option(help="where the fingerprints go")] = Path("reports/code"),
) -> None:
    """Write which code each stage can reach, with a digest of every file, for DVC to depend on."""
    from canvaslm.code_fingerprint import fingerprint
    from canvaslm.reporting.files import write_json

    for stage in sorted((root / "stages").glob("*.py")):
        if stage.stem != "door":
            write_json(out / f"{stage.stem}.json", fingerprint(stage, root))


if __name__ == "__main__":
    main(fingerprint_code)
