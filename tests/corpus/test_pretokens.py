import sys
from collections.abc import Iterator

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from canvaslm.corpus import pretokens
from canvaslm.corpus.tokenizer import Tokenizer

SPLITTER = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BLANKS = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]
LETTERS = st.sampled_from([" ", " ", "\n", "\t", "\u3000", "\x1c", "a", "'s", "'", "1", "!", "é"])


def spans(text: str) -> list[tuple[int, int]]:
    """Edges of the pre-tokens, by the library whose pattern it is."""
    return [span for _, span in SPLITTER.pre_tokenize_str(text)]


def spans_of_parts(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for part, is_one_pretoken in pretokens.cut(text):
        inner = [(0, len(part))] if is_one_pretoken else spans(part)
        yield from ((start + first, start + last) for first, last in inner)
        start += len(part)


@pytest.mark.parametrize("long_run", [2, 3, 1000])
def test_cutting_never_moves_an_edge_between_pretokens(
    monkeypatch: pytest.MonkeyPatch, long_run: int
) -> None:
    """With parts so short that short texts meet every case."""
    monkeypatch.setattr(pretokens, "_CUT_CHARS", 3)
    long_blanks = pretokens.re.compile(f"[{pretokens._BLANK}]{{{long_run},}}")
    monkeypatch.setattr(pretokens, "_LONG_BLANKS", long_blanks)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(LETTERS, max_size=30).map("".join))
    def holds(text: str) -> None:
        assert list(spans_of_parts(text)) == spans(text)

    holds()


@pytest.mark.parametrize("blank", BLANKS)
def test_each_blank_is_a_blank_for_both_or_for_neither(blank: str) -> None:
    # Before a letter, a run of blanks gives its last one back: three of them show it.
    is_blank = spans(f"{blank * 3}x")[0] == (0, 2)
    assert (pretokens._LONG_BLANKS.match(blank * 5000) is not None) == is_blank


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000", "\t"])
@pytest.mark.parametrize("tail", ["", "x", " x", "\nx"])
def test_long_run_of_blanks_has_the_ids_of_the_reference(
    tokenizer: Tokenizer, tokenizer_json: bytes, blank: str, tail: str
) -> None:
    reference = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    text = f"a{blank * 9000}{tail}"
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids


@pytest.mark.parametrize("tail", ["", "x"])
def test_million_blanks_do_not_break_the_encoder(tokenizer: Tokenizer, tail: str) -> None:
    text = " " * 1_000_000 + tail
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_is_cut_and_keeps_its_ids(
    tokenizer: Tokenizer, tokenizer_json: bytes, prose: list[str]
) -> None:
    text = "".join(prose * 150)
    parts = list(pretokens.cut(text + "y" * 200_000))
    assert len(parts) > 1
    assert "".join(part for part, _ in parts) == text + "y" * 200_000
    reference = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids
