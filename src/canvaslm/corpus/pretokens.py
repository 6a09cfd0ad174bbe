"""Where may a long text be cut so that no id changes?

The split pattern of GPT-2 (Radford et al. 2019) cuts a text into pre-tokens, and BPE never merges
across their edges. No alternative of the pattern has a blank after something that is not blank, so
a pre-token always ends there: before a space that follows a non-space, a text may be cut, and each
part splits as it did within the whole. (The one look-ahead, ``(?!\\S)``, looks past the end of a
run of blanks, and a part never ends in such a run unless the text does.)

A run of thousands of blanks needs care: the regular expression engine gives back one after the
other and its stack overflows near a million. Such a run is one pre-token by the pattern's own rule,
without its last character when something follows, so it needs no pattern at all.
"""

import re
from collections.abc import Iterator

SPLIT_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CUT_CHARS = 1 << 16
_LONG_RUN = 1 << 12
# The characters of Unicode's White_Space, which is what \s means in the pattern. Python's own \s
# has U+001C..U+001F besides.
_BLANK = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LONG_BLANKS = re.compile(f"[{_BLANK}]{{{_LONG_RUN},}}")


def cut(text: str) -> Iterator[tuple[str, bool]]:
    """Cut a text into parts whose ids, one after the other, are the ids of the text.

    Yields:
        Each part, and whether it is one pre-token as it stands (a long run of blanks).
    """
    start = 0
    for run in _LONG_BLANKS.finditer(text):
        end = run.end() if run.end() == len(text) else run.end() - 1
        yield from _cut_at_spaces(text, start, run.start())
        yield text[run.start() : end], True
        start = end
    yield from _cut_at_spaces(text, start, len(text))


def _cut_at_spaces(text: str, start: int, end: int) -> Iterator[tuple[str, bool]]:
    """Parts of about ``_CUT_CHARS``; each but the first begins with a space after a non-space."""
    while end - start > _CUT_CHARS:
        edge = text.find(" ", start + _CUT_CHARS, end)
        while edge > 0 and text[edge - 1].isspace():
            edge = text.find(" ", edge + 1, end)
        if edge < 0:
            break
        yield text[start:edge], False
        start = edge
    if start < end:
        yield text[start:end], False
