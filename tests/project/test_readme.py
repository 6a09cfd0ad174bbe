"""Is what the pages say still so?"""

from pathlib import Path

import pytest

from canvaslm.docs_gate import DocsGateParams
from canvaslm.docs_gate.gate import DocsReport, check_docs
from canvaslm.params import load_section

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report() -> DocsReport:
    return check_docs(load_section(ROOT / "params.yaml", "docs_gate", DocsGateParams), ROOT)


@pytest.mark.parametrize(
    "kind", ["page", "citation", "line_citation", "link", "command", "figure", "uncited_symbol"]
)
def test_no_page_says_what_is_not_so(report: DocsReport, kind: str) -> None:
    told = [f"{x.file}:{x.line}: {x.message}" for x in report.faults if x.kind == kind]
    assert told == []


def test_the_readme_shows_commands_and_they_are_checked(report: DocsReport) -> None:
    assert "```bash" in (ROOT / "README.md").read_text()
    assert report.n_checked["command_blocks"] > 0
