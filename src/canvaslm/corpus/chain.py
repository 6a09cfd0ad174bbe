"""Which law does a text of a Markov chain follow, and what does the text cost under it?

A chain of order k draws each symbol by a row of probabilities that the k symbols before it choose
(Shannon 1948, sections 4 to 7). Every probability is above 0, so that each context can be reached
from each other one, none keeps the chain for ever, and there is exactly one stationary law. A text
begins in it, hence the rate of the chain is what its next symbol costs on average anywhere.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from canvaslm.corpus.written import parse_written, read_written
from canvaslm.errors import InputError
from canvaslm.params import Params
from canvaslm.reporting.files import write_json

CHAIN = "chain.json"
_SUM_ERROR = 1e-12  # of a row, whose probabilities are written in full
_Row = tuple[Annotated[float, Field(gt=0, le=1)], ...]


class Law(Params):
    """How many symbols of the past choose the row of the next one, and what the symbols are."""

    order: Literal[1, 2] = Field(description="symbols of the past that the next one depends on")
    symbols: str = Field(
        min_length=2, max_length=32, description="printable ASCII characters, each one byte of text"
    )

    @field_validator("order", mode="before")
    @classmethod
    def _be_a_whole_number(cls, order: object) -> object:
        """True and 1.0 are equal to 1, and are slips."""
        if type(order) is not int:
            raise ValueError("1 or 2")
        return order

    @field_validator("symbols")
    @classmethod
    def _be_different_bytes(cls, symbols: str) -> str:
        if not (symbols.isascii() and symbols.isprintable()):
            raise ValueError("printable ASCII characters")
        if len(set(symbols)) != len(symbols):
            raise ValueError("symbols that are all different")
        return symbols


class _File(Law):
    """What ``chain.json`` holds: a row for each context, contexts in the order of the symbols."""

    probabilities: tuple[_Row, ...]

    @model_validator(mode="after")
    def _hold_a_law_for_every_context(self) -> "_File":
        n_symbols = len(self.symbols)
        lengths = [len(row) for row in self.probabilities]
        if lengths != [n_symbols] * n_symbols**self.order:
            raise ValueError(f"{n_symbols**self.order} rows of {n_symbols} probabilities")
        if any(abs(sum(row) - 1) > _SUM_ERROR for row in self.probabilities):
            raise ValueError("rows that add up to 1")
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """A Markov chain over characters.

    Attributes:
        order: k.
        symbols: S different characters.
        probabilities: (S**k, S), all above 0, rows that add up to 1. The context of the symbols
            a, b (b the newer one) is row ``S * a + b``.
    """

    order: int
    symbols: str
    probabilities: np.ndarray

    @cached_property
    def stationary(self) -> np.ndarray:
        """(S**k,) how often each context stands at any place of a text."""
        n_contexts = len(self.probabilities)
        steps = np.zeros((n_contexts, n_contexts))
        contexts = np.arange(n_contexts)[:, None]
        symbols = np.arange(len(self.symbols))[None, :]
        steps[contexts, self.next_contexts(contexts, symbols)] = self.probabilities
        return _stationary_law(steps)

    @property
    def entropy_rate_nats(self) -> float:
        """What the next symbol costs on average, given all of the past: Σ π(c) H(p(· | c))."""
        per_context = -np.sum(self.probabilities * np.log(self.probabilities), axis=1)
        return abs(float(np.sum(self.stationary * per_context)))

    def next_contexts(self, contexts: np.ndarray, symbols: np.ndarray) -> np.ndarray:
        """The contexts after symbols: the oldest symbol leaves, the new one enters."""
        return (contexts * len(self.symbols) + symbols) % len(self.probabilities)

    def nats_of(self, text: str) -> float:
        """−log of the probability of a text, its first symbols by the stationary law.

        Raises:
            InputError: the text has another character, or fewer symbols than a context.
        """
        codes = self._codes_of(text)
        contexts = np.zeros(len(codes) - self.order + 1, dtype=np.int64)
        for place in range(self.order):
            contexts = contexts * len(self.symbols) + codes[place : place + len(contexts)]
        drawn = self.probabilities[contexts[:-1], codes[self.order :]]
        return -float(np.log(self.stationary[contexts[0]]) + np.sum(np.log(drawn)))

    def _codes_of(self, text: str) -> np.ndarray:
        """The number of each symbol of a text."""
        foreign = set(text) - set(self.symbols)
        if foreign or len(text) < self.order:
            raise InputError(
                CHAIN,
                expected=f"texts of at least {self.order} of the symbols {self.symbols!r}",
                got=repr(min(foreign)) if foreign else f"a text of {len(text)}",
                fix="run stages/fetch_corpus.py again",
            )
        table = np.zeros(128, dtype=np.int64)
        table[np.frombuffer(self.symbols.encode(), dtype=np.uint8)] = np.arange(len(self.symbols))
        return table[np.frombuffer(text.encode(), dtype=np.uint8)]


def write_chain(chain: Chain, folder: Path) -> None:
    """Write ``chain.json``; its numbers are those of the chain to the last bit."""
    rows = chain.probabilities.tolist()
    values = {"order": chain.order, "symbols": chain.symbols, "probabilities": rows}
    write_json(folder / CHAIN, values)


def read_chain(folder: Path) -> Chain:
    """Read what :func:`write_chain` wrote.

    Raises:
        InputError: there is no such file, or it holds no chain.
    """
    path, expected = folder / CHAIN, "the chain that made the corpus"
    fix = "run stages/fetch_corpus.py again"
    content = read_written(path, expected=expected, missing="no such file", fix=fix)
    file = parse_written(content, path, _File, expected=expected, broken="a damaged one", fix=fix)
    rows = np.array(file.probabilities)
    return Chain(order=file.order, symbols=file.symbols, probabilities=rows)


def _stationary_law(steps: np.ndarray) -> np.ndarray:
    """The law that one step leaves as it is, by elimination of one context after the other.

    Nothing is subtracted, so that each share is right to its own last digits, however small
    (Grassmann, Taksar and Heyman 1985, Operations Research 33).

    Args:
        steps: (n, n) probabilities of going from row to column, irreducible; not changed.
    """
    rest = steps.copy()
    for last in range(len(rest) - 1, 0, -1):
        rest[:last, last] /= np.sum(rest[last, :last])
        rest[:last, :last] += np.outer(rest[:last, last], rest[last, :last])
    shares = np.ones(len(rest))
    for number in range(1, len(rest)):
        shares[number] = np.sum(shares[:number] * rest[:number, number])
    return shares / np.sum(shares)
