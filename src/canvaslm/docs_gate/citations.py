"""Does every symbol that a page cites exist, and is every public symbol explained somewhere?"""

import re
from collections.abc import Iterable, Iterator

from canvaslm.docs_gate.pages import Fault, Page
from canvaslm.docs_gate.sources import Sources

_CITATION = re.compile(r"(?P<file>[\w./-]+\.py)(?P<colons>::?)(?P<name>[A-Za-z_][\w.:]*)(\[.*\])?")
_BY_LINE = re.compile(r"[\w./-]+\.\w+(:\d+|#L\d+)")
_FILE = re.compile(r"(src|stages|tests|bench|configs|docs)/[\w./-]*\.(py|md|yaml)")


def check_citations(page: Page, sources: Sources) -> Iterator[Fault]:
    """Find citations of what is not there: ``file.py:Symbol``, ``file.py::test``, ``file.py``."""
    for span in page.spans:
        message = _wrong_with(span.text, sources)
        if message:
            yield Fault(file=page.file, line=span.line, kind="citation", message=message)
    for span in [*page.prose, *page.spans]:
        if _BY_LINE.fullmatch(span.text) or re.search(r"\.py:\d", span.text):
            yield Fault(
                file=page.file,
                line=span.line,
                kind="line_citation",
                message=f"{span.text!r} cites a line, which the next edit moves; cite the symbol",
            )


def uncited_symbols(pages: Iterable[Page], sources: Sources) -> Iterator[Fault]:
    """Find public top-level symbols of the library that no page explains."""
    cited = set()
    for page in pages:
        for span in page.spans:
            match = _CITATION.fullmatch(span.text)
            if match:
                cited.add((match["file"], match["name"].partition(".")[0]))
    for file, name, line in sources.public_symbols():
        if (file, name) not in cited:
            message = (
                f"no page cites `{file}:{name}`; explain it where it belongs, or make it _{name}"
            )
            yield Fault(file=file, line=line, kind="uncited_symbol", message=message)


def _wrong_with(text: str, sources: Sources) -> str | None:
    """What is wrong with a code span that names a file, if anything."""
    match = _CITATION.fullmatch(text)
    if match is None:
        if _FILE.fullmatch(text) and not (sources.root / text).is_file():
            return f"there is no file {text}"
        return None
    if not (sources.root / match["file"]).is_file():
        return f"there is no file {match['file']} (paths start at the repository's root)"
    if match["colons"] == "::":
        dotted = match["name"].replace("::", ".")
        if not dotted.rpartition(".")[2].startswith("test_"):
            return f"{text} names no test; cite a symbol with one colon"
    else:
        dotted = match["name"]
    return None if sources.has_symbol(match["file"], dotted) else f"{text} does not exist"
