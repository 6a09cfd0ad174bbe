"""Which pages are checked, by which checks, and what comes of it?"""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canvaslm.docs_gate import DocsGateParams
from canvaslm.docs_gate.citations import check_citations, uncited_symbols
from canvaslm.docs_gate.commands import check_commands
from canvaslm.docs_gate.figures import check_figures
from canvaslm.docs_gate.links import check_links, check_measured_cells
from canvaslm.docs_gate.pages import Fault, read_page
from canvaslm.docs_gate.sources import Sources


@dataclass(frozen=True, kw_only=True)
class DocsReport:
    """What the gate read and what is wrong with it."""

    n_checked: dict[str, int]
    faults: list[Fault]

    def metrics(self) -> dict[str, Any]:
        """Counts and the verdict, as ``reports/docs_gate/metrics.json`` holds them."""
        by_kind = Counter(fault.kind for fault in self.faults)
        return {
            "n_checked": self.n_checked,
            "n_faults": len(self.faults),
            "n_faults_by_kind": dict(by_kind),
            "verdict": "fail" if self.faults else "pass",
        }

    def listed(self) -> dict[str, Any]:
        """Every fault with its file and line, as ``faults.json`` holds them."""
        return {"faults": [asdict(fault) for fault in self.faults]}


def check_docs(params: DocsGateParams, root: Path) -> DocsReport:
    """Read all pages and hold them against the sources.

    Args:
        params: which pages.
        root: the repository.

    Raises:
        InputError: a source file of the project cannot be parsed.
    """
    sources = Sources(root)
    pages, faults = [], []
    for file in _page_files(params.roots, root):
        if (root / file).is_file():
            pages.append(read_page(root, file))
        else:
            faults.append(Fault(file=file, line=1, kind="page", message="there is no such page"))
    by_file = {page.file: page for page in pages}
    for page in pages:
        faults += check_citations(page, sources)
        faults += check_commands(page, sources)
        faults += check_links(page, by_file, root)
        faults += check_measured_cells(page)
        faults += check_figures(page, root)
    faults += uncited_symbols(pages, sources)
    counts = {
        "pages": len(pages),
        "code_spans": sum(len(page.spans) for page in pages),
        "command_blocks": sum(len(page.blocks) for page in pages),
        "links": sum(len(page.links) for page in pages),
    }
    faults.sort(key=lambda fault: (fault.file, fault.line, fault.kind, fault.message))
    return DocsReport(n_checked=counts, faults=faults)


def _page_files(roots: list[str], root: Path) -> list[str]:
    """The pages, in one order: those named, and all those below the folders named."""
    files = []
    for name in roots:
        if (root / name).is_dir():
            below = (root / name).rglob("*.md")
            files += sorted(file.relative_to(root).as_posix() for file in below)
        else:
            files.append(name)
    return files
