"""What does the file of a byte-level BPE tokenizer say, and can it be trusted to the letter?

``tokenizer.json`` spells each token in letters that stand for bytes. This room reads that spelling,
and refuses a foreign tokenizer that the encoder here would not follow id for id: one that changes
texts before it splits them, splits them by another pattern, or merges in another order than that of
its ids.
"""

import json
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from canvaslm.corpus.written import parse_written
from canvaslm.errors import InputError

_EXPECTED = "a byte-level BPE tokenizer.json with the split pattern of GPT-2"
_FIX = "use such a tokenizer, or set train_tokenizer.source: train"
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Merge = Annotated[str, Field(pattern="^[^ ]+ [^ ]+$")] | tuple[str, str]


class _Part(BaseModel):
    """What is read here of a part of the file; there may be more in it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class _AddedToken(_Part):
    content: str = Field(min_length=1)
    id: _Id
    special: bool


class _Bpe(_Part):
    type: Literal["BPE"]
    vocab: dict[str, _Id]
    merges: list[_Merge]


class _File(_Part):
    model: _Bpe
    added_tokens: list[_AddedToken]
    pre_tokenizer: dict[str, Any] | None = None


def parse_tokenizer(content: bytes, where: str) -> dict[str, Any]:
    """The JSON of a tokenizer, with the parts that are read here in place.

    Raises:
        InputError: it is not the JSON of a BPE tokenizer.
    """
    parse_written(content, where, _File, expected=_EXPECTED, broken="another file", fix=_FIX)
    return json.loads(content)


def token_bytes(parsed: dict[str, Any], where: str) -> list[bytes]:
    """The bytes of each id 0..V-1.

    Raises:
        InputError: an id is missing or given twice, or one of the 256 bytes has no token.
    """
    vocab, added = parsed["model"]["vocab"], parsed["added_tokens"]
    spellings = {token["content"]: token["id"] for token in added}
    plain = {
        rank: _spelled(token, where) for token, rank in vocab.items() if token not in spellings
    }
    missing = {bytes([byte]) for byte in range(256)} - set(plain.values())
    if missing:
        raise _not_ours(where, f"no token for {len(missing)} of the 256 bytes")
    table = plain | {rank: spelling.encode() for spelling, rank in spellings.items()}
    n_tokens = len(vocab.keys() | spellings.keys())
    if len(spellings) != len(added) or sorted(table) != list(range(n_tokens)):
        raise _not_ours(where, f"ids that are not 0..{n_tokens - 1}, each once")
    return [table[rank] for rank in range(n_tokens)]


def require_exact_bpe(parsed: dict[str, Any], where: str) -> None:
    """Refuse what this pipeline would encode in another way than its own library does.

    tiktoken always merges the pair whose joint token has the lowest id, and takes a whole pre-token
    that is a token without looking at merges. That is the same as following the list of merges when
    the list is in the order of the ids and every token's own spelling merges into it.

    Raises:
        InputError: the tokenizer is of another kind.
    """
    model, splitter = parsed["model"], parsed.get("pre_tokenizer") or {}
    if parsed.get("normalizer"):
        raise _not_ours(where, "a normalizer, so that texts would not come back as they were")
    if splitter.get("type") != "ByteLevel" or not splitter.get("use_regex", True):
        raise _not_ours(where, f"pre-tokenizer {splitter.get('type')}")
    if splitter.get("add_prefix_space"):
        raise _not_ours(where, "add_prefix_space, so that texts would not come back as they were")
    for knob in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(knob):
            raise _not_ours(where, f"{knob} {model[knob]!r}")
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    parts = {part for pair in merges for part in pair}
    if not parts <= model["vocab"].keys():
        raise _not_ours(where, "merges of what is no token")
    ranks = [model["vocab"].get("".join(pair), -1) for pair in merges]
    if ranks != sorted(ranks) or min(ranks, default=0) < 0:
        raise _not_ours(where, "merges in another order than the ids of their tokens")
    spellings = {token["content"] for token in parsed["added_tokens"]}
    _require_reachable(model["vocab"], merges, spellings, where)


def _require_reachable(
    vocab: dict[str, int], merges: list[list[str]], added: set[str], where: str
) -> None:
    """Each token's own spelling must merge into that token, as tiktoken takes for granted."""
    from tokenizers.models import BPE

    model = BPE(vocab=vocab, merges=[(left, right) for left, right in merges])
    for token, rank in vocab.items():
        if token not in added and [part.id for part in model.tokenize(token)] != [rank]:
            raise _not_ours(where, f"token {token!r}, which its merges never make")


def _not_ours(where: str, got: str) -> InputError:
    return InputError(
        where,
        expected=_EXPECTED,
        got=got,
        fix=_FIX,
    )


@cache
def _byte_of_letter() -> dict[str, int]:
    """The printable letters that stand for the 256 bytes (Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


def _spelled(token: str, where: str) -> bytes:
    """The bytes that a token's letters stand for."""
    letters = _byte_of_letter()
    if not token or any(letter not in letters for letter in token):
        raise _not_ours(where, f"token {token!r}, which is not spelled in bytes")
    return bytes(letters[letter] for letter in token)
