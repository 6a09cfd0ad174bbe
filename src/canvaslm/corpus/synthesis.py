"""How is a corpus made whose law is known to the last digit?

A recipe says how many symbols there are and how predictable they should be; a seed draws the chain,
and then each document from a stream of its own, so that more documents never change the first ones.
"""

import json
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from canvaslm.corpus.chain import Chain, Law, write_chain
from canvaslm.errors import InputError
from canvaslm.params import parse_section, read_yaml
from canvaslm.randomness import stream
from canvaslm.reporting.files import write_bytes

TEXTS = "documents.jsonl"
_AT_ONCE = 256  # documents that are drawn side by side, or fewer
_CHANCES_AT_ONCE = 1 << 24  # of all of them: 128 MiB
_MOST_OF_ONE = 1 << 20
_MOST_IN_ALL = 1 << 28  # of symbols; a corpus is held in memory until it is written
_EXAMPLE = "configs/markov/order_1.yaml"


class MarkovRecipe(Law):
    """How a chain is drawn, and how much text from it."""

    seed: int = Field(ge=0, description="draws the chain and the documents")
    documents: int = Field(ge=2, le=_MOST_OF_ONE, description="documents to draw")
    symbols_per_document: int = Field(
        ge=2, le=_MOST_OF_ONE, description="symbols, and bytes, of each document"
    )
    concentration: float = Field(
        ge=0.01, le=1000, description="of the Dirichlet law of each row: the less, the sharper"
    )
    uniform_share: float = Field(
        ge=1e-6, le=1, description="share of each row given to all symbols alike; 1 is pure chance"
    )

    @field_validator("symbols_per_document")
    @classmethod
    def _fit_into_memory(cls, length: int, info: ValidationInfo) -> int:
        documents = info.data.get("documents", 0)  # none when it is wrong itself
        if documents * length > _MOST_IN_ALL:
            raise ValueError(f"at most {_MOST_IN_ALL // documents} for {documents} documents")
        return length


def read_recipe(path: Path) -> MarkovRecipe:
    """Read the recipe of a chain.

    Raises:
        InputError: there is no such file, a key is unknown or missing, or a value is out of bounds.
    """
    if not path.is_file():
        raise InputError(
            path,
            expected="the recipe of a Markov chain",
            got="no such file",
            fix=f"set fetch_corpus.path: {_EXAMPLE}",
        )
    try:
        values, known = read_yaml(path), MarkovRecipe.model_fields
    except InputError as error:  # it speaks of params files, and this is none
        raise InputError(
            path,
            expected="the recipe of a Markov chain, a mapping in YAML",
            got=error.got,
            fix=f"correct the recipe (see {_EXAMPLE})",
        ) from None
    missing = sorted(known.keys() - values.keys())
    if missing and values.keys() <= known.keys():
        raise InputError(
            f"{path}:{missing[0]}",
            expected="a value",
            got="nothing",
            fix=f"add the key (see {_EXAMPLE})",
        )
    return parse_section(values, MarkovRecipe, where=str(path))


def draw_chain(recipe: MarkovRecipe) -> Chain:
    """Draw the rows of a chain, each a symmetric Dirichlet law mixed with the uniform one."""
    n_symbols = len(recipe.symbols)
    laws = stream(recipe.seed, "markov chain").dirichlet(
        np.full(n_symbols, recipe.concentration), size=n_symbols**recipe.order
    )
    rows = (1 - recipe.uniform_share) * laws + recipe.uniform_share / n_symbols
    rows /= rows.sum(axis=1, keepdims=True)
    return Chain(order=recipe.order, symbols=recipe.symbols, probabilities=rows)


def draw_documents(chain: Chain, *, seed: int, documents: int, length: int) -> list[str]:
    """Draw texts from a chain, each begun in the stationary law.

    Args:
        chain: the law.
        seed: of the streams; document i has stream number i.
        documents: how many.
        length: symbols of each, at least one context.
    """
    texts: list[str] = []
    spelling = np.frombuffer(chain.symbols.encode(), dtype=np.uint8)
    at_once = max(1, min(_AT_ONCE, _CHANCES_AT_ONCE // length))
    for first in range(0, documents, at_once):
        numbers = range(first, min(first + at_once, documents))
        chances = [stream(seed, "markov document", number).random(length) for number in numbers]
        codes = _draw(chain, np.stack(chances, axis=1))
        texts += [spelling[column].tobytes().decode() for column in codes.T]
    return texts


def synthesise_corpus(recipe: MarkovRecipe, out_dir: Path, *, text_field: str) -> None:
    """Write the chain of a recipe, and its documents as lines of JSON.

    Args:
        recipe: what to draw.
        out_dir: an empty folder.
        text_field: the key of the text in each line.
    """
    chain = draw_chain(recipe)
    texts = draw_documents(
        chain,
        seed=recipe.seed,
        documents=recipe.documents,
        length=recipe.symbols_per_document,
    )
    write_chain(chain, out_dir)
    lines = (json.dumps({text_field: text}) + "\n" for text in texts)
    write_bytes(out_dir / TEXTS, "".join(lines).encode())


def _draw(chain: Chain, chances: np.ndarray) -> np.ndarray:
    """Invert one uniform number per place, (n, D): the first context takes as many as it is long.

    Returns:
        (n, D) uint8, the number of each symbol.
    """
    n_symbols, order = len(chain.symbols), chain.order
    codes = np.empty(chances.shape, dtype=np.uint8)
    contexts = _invert(np.cumsum(chain.stationary), chances[0])
    for place in range(order):
        codes[place] = contexts // n_symbols ** (order - 1 - place) % n_symbols
    steps = np.cumsum(chain.probabilities, axis=1)
    for place in range(order, len(chances)):
        symbols = _invert(steps[contexts], chances[place])
        contexts, codes[place] = chain.next_contexts(contexts, symbols), symbols
    return codes


def _invert(cumulated: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """How many cumulated shares each chance has reached; all but the last, which is 1 or nearly."""
    return np.sum(chances[:, None] >= cumulated[..., :-1], axis=1)
