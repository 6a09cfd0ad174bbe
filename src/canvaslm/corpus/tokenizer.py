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

import numpy as np
import tiktoken
from pydantic import Field

from canvaslm.corpus.byte_level import parse_tokenizer, require_exact_bpe, token_bytes
from canvaslm.corpus.pretokens import SPLIT_PATTERN, cut
from canvaslm.corpus.written import read_written
from canvaslm.errors import InputError
from canvaslm.params import Params


class TokenizerParams(Params):
    """Where the vocabulary comes from."""

    source: str = Field(
        min_length=1,
        description="train: learn it from the train documents; otherwise PATH#sha256=HASH of your "
        "own byte-level BPE tokenizer.json",
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
        parsed = parse_tokenizer(content, where)
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
        self.token_bytes = token_bytes(parsed, where)
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
        fix = "run stages/train_tokenizer.py"
        content = read_written(path, expected="a tokenizer", missing="no such file", fix=fix)
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
        return _adopt(params.source, params.end_of_text, vocab_size)
    if vocab_size < 257:
        raise InputError(
            "layout.vocab_size",
            expected="at least 257 (256 bytes and the end of text)",
            got=str(vocab_size),
            fix="raise it",
        )
    return _learn(texts, params, vocab_size)


def _learn(texts: Iterable[str], params: TokenizerParams, vocab_size: int) -> bytes:
    """Learn the merges, then give the end of text the last id."""
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
    if learner.token_to_id(params.end_of_text) is not None:
        raise InputError(
            "train_tokenizer.end_of_text",
            expected="a spelling that no piece of text has",
            got=repr(params.end_of_text),
            fix="use <|endoftext|>",
        )
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


def _adopt(source: str, end_of_text: str, vocab_size: int) -> bytes:
    """Check the user's tokenizer and leave one special token in it, the end of text."""
    path, content = _read_pinned(source)
    parsed = parse_tokenizer(content, str(path))
    require_exact_bpe(parsed, str(path))
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
    reached = len(token_bytes(parsed, str(path)))
    if reached != vocab_size:
        raise InputError(
            path,
            expected=f"layout.vocab_size {vocab_size}",
            got=f"{reached} tokens",
            fix=f"set layout.vocab_size to {reached}",
        )
    return (json.dumps(parsed, ensure_ascii=False, indent=2) + "\n").encode()


def _read_pinned(source: str) -> tuple[Path, bytes]:
    """The user's file, whose hash stands in the parameters: DVC sees those, not the file."""
    name, _, pinned = source.partition("#sha256=")
    path = Path(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            path,
            expected="a tokenizer.json",
            got=error.strerror or "an error",
            fix="correct train_tokenizer.source",
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != pinned:
        raise InputError(
            path,
            expected=f"sha256 {pinned}" if pinned else "its hash in train_tokenizer.source",
            got=f"sha256 {found}" if pinned else "a path alone",
            fix=f"set train_tokenizer.source: {name}#sha256={found}",
        )
    return path, content


def _in_range(token: int, vocab_size: int) -> int:
    """Negative ids would silently count from the end."""
    if not 0 <= token < vocab_size:
        raise InputError(
            "ids", expected=f"0..{vocab_size - 1}", got=str(token), fix="use the tokenizer's ids"
        )
    return token
