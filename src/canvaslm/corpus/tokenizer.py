"""Which ids does a text become, and which text do ids become?

A byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909; the byte alphabet and split pattern of
Radford et al. 2019): every text has ids and gives the same bytes back, so there is no unknown
token and no normalisation. ``tokenizers`` trains it; ``tiktoken`` encodes with the same ranks and
the same split pattern, several times faster and in bounded memory. The one special token ends a
document. Its spelling inside a text is text like any other: no text can forge a document's end.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from pydantic import Field

from canvaslm.corpus.pretokens import SPLIT_PATTERN, cut
from canvaslm.errors import InputError
from canvaslm.params import Params


class TokenizerParams(Params):
    """Where the vocabulary comes from."""

    source: str = Field(
        min_length=1,
        description="train: learn it from the train documents; otherwise the path of your own "
        "byte-level BPE tokenizer.json",
    )
    end_of_text: str = Field(min_length=1, description="spelling of the token that ends a document")
    min_frequency: int = Field(ge=1, description="merge only pairs seen at least so often")


class Tokenizer:
    """The ids of a text and the text of ids, read from a ``tokenizer.json`` of this pipeline."""

    def __init__(self, content: bytes, where: str) -> None:
        """Read the JSON of a byte-level BPE with exactly one special token.

        Args:
            content: the bytes of ``tokenizer.json``.
            where: what to call it in messages.

        Raises:
            InputError: it is not such a tokenizer.
        """
        parsed = _parse(content, where)
        specials = [token for token in parsed["added_tokens"] if token["special"]]
        if len(specials) != 1:
            raise InputError(
                where,
                expected="exactly one special token, the end of text",
                got=str(len(specials)),
                fix="run stages/train_tokenizer.py",
            )
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.eot_id: int = specials[0]["id"]
        self.token_bytes = _token_bytes(parsed, where)
        self.vocab_size = len(self.token_bytes)
        added = {token["id"] for token in parsed["added_tokens"]}
        self._ranks = {
            token: rank for rank, token in enumerate(self.token_bytes) if rank not in added
        }

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read ``tokenizer.json``.

        Raises:
            InputError: there is no such file, or it is not a tokenizer of this pipeline.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise InputError(
                path,
                expected="a tokenizer",
                got="no such file",
                fix="run stages/train_tokenizer.py",
            ) from None
        return cls(content, str(path))

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) int64, without an end-of-text token."""
        ids: list[int] = []
        for piece, is_one_pretoken in cut(text):
            encoding = self._unsplit if is_one_pretoken else self._splitting
            ids.extend(encoding.encode_ordinary(piece))
        return np.array(ids, dtype=np.int64)

    def encode_many(self, texts: Sequence[str], *, n_threads: int) -> list[np.ndarray]:
        """The ids of each text, in order; the threads change nothing but the time."""
        with ThreadPoolExecutor(n_threads) as pool:
            return list(pool.map(self.encode, texts))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for; the end of text gives its spelling."""
        table = self.token_bytes
        return b"".join(table[_in_range(int(i), len(table))] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids stand for; a character cut at an edge shows as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def _splitting(self) -> tiktoken.Encoding:
        return self._encoding(SPLIT_PATTERN)

    @cached_property
    def _unsplit(self) -> tiktoken.Encoding:
        return self._encoding(r"(?s).+")

    def _encoding(self, pattern: str) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            self.sha256, pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={}
        )


def train_tokenizer(texts: Iterable[str], params: TokenizerParams, vocab_size: int) -> bytes:
    """Learn a vocabulary of exactly ``vocab_size`` tokens, or adopt the user's.

    Args:
        texts: the train documents; not read when ``params.source`` is a path.
        params: the section ``train_tokenizer``.
        vocab_size: ``layout.vocab_size``: 256 bytes, the merges, and the end of text as the last.

    Returns:
        The bytes of ``tokenizer.json``; the same for the same texts and parameters.

    Raises:
        InputError: the vocabulary is too small for the bytes, the texts do not give enough merges,
            or the user's tokenizer does not fit.
    """
    if params.source != "train":
        return _adopt(Path(params.source), params.end_of_text, vocab_size)
    if vocab_size < 257:
        raise InputError(
            "layout.vocab_size",
            expected="at least 257 (256 bytes and the end of text)",
            got=str(vocab_size),
            fix="raise it",
        )
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Learner
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    learner = Learner(BPE())
    learner.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    learner.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=params.min_frequency,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator((piece for text in texts for piece, _ in cut(text)), trainer)
    learner.add_special_tokens([AddedToken(params.end_of_text, normalized=False, special=True)])
    reached = learner.get_vocab_size()
    if reached != vocab_size:
        raise InputError(
            "layout.vocab_size",
            expected=f"{vocab_size} tokens from the train documents",
            got=str(reached),
            fix=f"add text, lower train_tokenizer.min_frequency, or set it to {reached} or less",
        )
    return learner.to_str(pretty=True).encode()


def _adopt(path: Path, end_of_text: str, vocab_size: int) -> bytes:
    """Check the user's tokenizer and leave one special token in it, the end of text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            path,
            expected="a tokenizer.json",
            got=error.strerror or "an error",
            fix="correct train_tokenizer.source",
        ) from None
    parsed = _parse(content, str(path))
    _require_exact_bpe(parsed, str(path))
    spellings = [token["content"] for token in parsed["added_tokens"]]
    if end_of_text not in spellings:
        raise InputError(
            path,
            expected=f"the special token {end_of_text!r}",
            got=", ".join(map(repr, spellings[:8])) or "no special token",
            fix="set train_tokenizer.end_of_text to one of its special tokens",
        )
    for token in parsed["added_tokens"]:
        token["special"] = token["content"] == end_of_text
    reached = len(_token_bytes(parsed, str(path)))
    if reached != vocab_size:
        raise InputError(
            path,
            expected=f"layout.vocab_size {vocab_size}",
            got=f"{reached} tokens",
            fix=f"set layout.vocab_size to {reached}",
        )
    return (json.dumps(parsed, ensure_ascii=False, indent=2) + "\n").encode()


def _parse(content: bytes, where: str) -> dict[str, Any]:
    """The JSON of a tokenizer, with the parts that are read here in place."""
    try:
        parsed = json.loads(content)
        kind = parsed["model"]["type"]
        _ = parsed["model"]["vocab"], parsed["model"]["merges"], parsed["added_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise _not_ours(where, f"{type(error).__name__}: {error}") from None
    if kind != "BPE":
        raise _not_ours(where, f"a model of type {kind}")
    return parsed


def _require_exact_bpe(parsed: dict[str, Any], where: str) -> None:
    """Refuse what this pipeline would encode in another way than its own library does."""
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
    ranks = [model["vocab"].get("".join(pair), -1) for pair in merges]
    if ranks != sorted(ranks) or min(ranks, default=0) < 0:
        raise _not_ours(where, "merges in another order than the ids of their tokens")
    _require_reachable(
        model["vocab"], merges, {t["content"] for t in parsed["added_tokens"]}, where
    )


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
        expected="a byte-level BPE tokenizer.json with the split pattern of GPT-2",
        got=got,
        fix="use such a tokenizer, or set train_tokenizer.source: train",
    )


def _token_bytes(parsed: dict[str, Any], where: str) -> list[bytes]:
    """The bytes of each id 0..V-1: every id once, all 256 bytes among them."""
    letters = _byte_of_letter()
    table: dict[int, bytes] = {}
    added = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    for token, rank in parsed["model"]["vocab"].items():
        if token in added:
            continue
        if not token or any(letter not in letters for letter in token):
            raise _not_ours(where, f"token {token!r}, which is not spelled in bytes")
        table[rank] = bytes(letters[letter] for letter in token)
    n_plain = len(table)
    table |= {rank: spelling.encode() for spelling, rank in added.items()}
    n_named = len(added) + sum(token not in added for token in parsed["model"]["vocab"])
    if len(table) != n_named or sorted(table) != list(range(n_named)):
        raise _not_ours(where, f"ids that are not 0..{n_named - 1}, each once")
    missing = set(range(256)) - {token[0] for token in table.values() if len(token) == 1}
    if missing or n_plain < 256:
        raise _not_ours(where, f"no token for {len(missing)} of the 256 bytes")
    return [table[rank] for rank in range(n_named)]


def _byte_of_letter() -> dict[str, int]:
    """The printable letters that stand for the 256 bytes (Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


def _in_range(token: int, vocab_size: int) -> int:
    """Negative ids would silently count from the end."""
    if not 0 <= token < vocab_size:
        raise InputError(
            "ids", expected=f"0..{vocab_size - 1}", got=str(token), fix="use the tokenizer's ids"
        )
    return token
