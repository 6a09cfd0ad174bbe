"""What stands on a page: code spans, links, command blocks, anchors, tables, each with its line?"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something on a page that is not so."""

    file: str
    line: int
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of inline code, or of plain text, and its line."""

    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: what it shows, where it leads, its line."""

    line: int
    text: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its text, and the line on which the text starts."""

    line: int
    language: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table's body under its column's header, with the targets of its links.

    ``section`` is the text of the headings above it, outermost first.
    """

    line: int
    header: str
    section: str
    text: str
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A Markdown page, taken apart."""

    file: str
    spans: list[Span]
    prose: list[Span]
    links: list[Link]
    blocks: list[Block]
    cells: list[Cell]
    anchors: frozenset[str]


def read_page(root: Path, file: str) -> Page:
    """Take a Markdown page apart.

    Args:
        root: the repository.
        file: the page, relative to it, with forward slashes.
    """
    text = (root / file).read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    spans, prose, links = [], [], []
    for line, children in _inline(tokens):
        spans += [Span(line=at, text=x.content) for at, x in _lines(line, children, "code_inline")]
        prose += [Span(line=at, text=x.content) for at, x in _lines(line, children, "text")]
        links += _links(line, children)
    blocks = [
        Block(line=token.map[0] + 2, language=token.info.strip(), text=token.content)
        for token in tokens
        if token.type == "fence" and token.map
    ]
    return Page(
        file=file,
        spans=spans,
        prose=prose,
        links=links,
        blocks=blocks,
        cells=list(_cells(tokens)),
        anchors=_anchors(tokens, text),
    )


def _inline(tokens: list[Token]) -> Iterator[tuple[int, list[Token]]]:
    """The inline content of each block with the line on which it starts."""
    for token in tokens:
        if token.type == "inline" and token.children is not None and token.map:
            yield token.map[0] + 1, token.children


def _lines(line: int, children: list[Token], kind: str) -> Iterator[tuple[int, Token]]:
    """The children of one kind, each with its line."""
    for child in children:
        if child.type in {"softbreak", "hardbreak"}:
            line += 1
        elif child.type == kind:
            yield line, child


def _links(line: int, children: list[Token]) -> Iterator[Link]:
    """Links and images; a link's text is what it shows."""
    target, shown, at = None, "", line
    for child in children:
        if child.type in {"softbreak", "hardbreak"}:
            line += 1
        if child.type == "image":
            yield Link(line=line, text=child.content, target=str(child.attrs["src"]))
        elif child.type == "link_open":
            target, shown, at = str(child.attrs["href"]), "", line
        elif child.type == "link_close" and target is not None:
            yield Link(line=at, text=shown, target=target)
            target = None
        elif target is not None:
            shown += child.content


def _cells(tokens: list[Token]) -> Iterator[Cell]:
    """The cells of all tables' bodies."""
    headers: list[str] = []
    above: dict[str, str] = {}  # heading by level, h1 to h6
    column, in_head = 0, False
    for before, token in itertools.pairwise(tokens):
        if before.type == "heading_open":
            above = {level: text for level, text in above.items() if level < before.tag}
            above[before.tag] = token.content
        if before.type == "thead_open":
            headers, in_head = [], True
        elif before.type == "tbody_open":
            in_head = False
        if before.type == "tr_open":
            column = 0
        if before.type == "th_open" and in_head:
            headers.append(token.content)
        elif before.type == "td_open":
            links = _links(1, token.children or [])
            yield Cell(
                line=token.map[0] + 1 if token.map else 1,
                header=headers[column],
                section=" / ".join(above.values()),
                text="".join(child.content for child in token.children or []),
                targets=tuple(link.target for link in links),
            )
            column += 1


def _anchors(tokens: list[Token], text: str) -> frozenset[str]:
    """The anchors that a page offers: GitHub's slugs of its headings, and its own ``id``."""
    found: list[str] = re.findall(r"""<a\s+(?:id|name)=["']([^"']+)["']""", text)
    for before, token in itertools.pairwise(tokens):
        if before.type != "heading_open":
            continue
        shown = "".join(child.content for child in token.children or [])
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")
        n_same = sum(1 for name in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", name))
        found.append(f"{slug}-{n_same}" if n_same else slug)
    return frozenset(found)
