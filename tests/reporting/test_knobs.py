from pathlib import Path

from pydantic import Field

import door
from canvaslm.params import Params, read_yaml
from canvaslm.reporting.knobs import knobs_page
from list_knobs import list_knobs

ROOT = Path(__file__).resolve().parents[2]


class Knobs(Params):
    """A section."""

    rate: float = Field(gt=0, le=1, description="how fast | how far")
    most: int | None = Field(ge=1, description="null: all")


def test_a_row_has_type_bounds_base_value_and_meaning() -> None:
    page = knobs_page({"work": Knobs}, {"work": {"rate": 0.5, "most": None}})
    assert "## work" in page
    assert "| `rate` | float | > 0, ≤ 1 | `0.5` | how fast \\| how far |" in page
    assert "| `most` | int \\| null | ≥ 1 | `null` | null: all |" in page


def test_the_committed_page_is_what_the_models_say(tmp_path: Path) -> None:
    list_knobs(base=ROOT / "configs" / "base.yaml", out=tmp_path / "knobs.md")
    assert (tmp_path / "knobs.md").read_text() == (ROOT / "docs" / "knobs.md").read_text(), (
        "run `make knobs`"
    )


def test_every_key_of_the_base_has_its_row() -> None:
    page = (ROOT / "docs" / "knobs.md").read_text()
    base = read_yaml(ROOT / "configs" / "base.yaml")
    for section in door.SECTIONS:
        _, _, rows = page.partition(f"\n## {section}\n")
        for key in base[section]:
            assert f"| `{key}` |" in rows.partition("\n## ")[0], f"{section}.{key}"
