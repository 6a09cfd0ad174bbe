"""Is the rate of a chain what the textbooks say, and the cost of a text what its factors say?"""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from canvaslm.corpus.chain import CHAIN, Chain, read_chain, write_chain
from canvaslm.errors import InputError


def chain_of(symbols: str, rows: list[list[float]], order: int = 1) -> Chain:
    return Chain(order=order, symbols=symbols, probabilities=np.array(rows))


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.999, 1e-12])
def test_two_symbols_that_flip_have_the_binary_entropy(p: float) -> None:
    chain = chain_of("ab", [[1 - p, p], [p, 1 - p]])
    assert chain.entropy_rate_nats == pytest.approx(binary_entropy(p), rel=1e-12)
    assert chain.stationary == pytest.approx([0.5, 0.5], abs=1e-15)


def test_two_symbols_of_unlike_rows_have_the_law_that_balances_their_exchange() -> None:
    p, q = 0.3, 1e-9
    chain = chain_of("ab", [[1 - p, p], [q, 1 - q]])
    assert chain.stationary == pytest.approx([q / (p + q), p / (p + q)], rel=1e-14)
    expected = (q * binary_entropy(p) + p * binary_entropy(q)) / (p + q)
    assert chain.entropy_rate_nats == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("n_symbols", "order"), [(2, 1), (7, 1), (5, 2)])
def test_pure_chance_has_the_logarithm_of_the_number_of_symbols(n_symbols: int, order: int) -> None:
    rows = [[1 / n_symbols] * n_symbols] * n_symbols**order
    chain = chain_of("abcdefg"[:n_symbols], rows, order)
    assert chain.entropy_rate_nats == pytest.approx(math.log(n_symbols), rel=1e-14)


def random_rows(n_rows: int, n_symbols: int) -> np.ndarray:
    laws = np.random.default_rng(3).dirichlet(np.full(n_symbols, 0.5), n_rows)
    return 0.9 * laws + 0.1 / n_symbols


def test_order_2_that_ignores_its_older_symbol_is_order_1() -> None:
    rows = random_rows(5, 5)
    first = Chain(order=1, symbols="abcde", probabilities=rows)
    second = Chain(order=2, symbols="abcde", probabilities=np.tile(rows, (5, 1)))
    assert second.entropy_rate_nats == pytest.approx(first.entropy_rate_nats, rel=1e-13)
    pairs = first.stationary[:, None] * rows
    assert second.stationary == pytest.approx(pairs.ravel(), rel=1e-12)
    assert second.nats_of("abacadae") == pytest.approx(first.nats_of("abacadae"), rel=1e-13)


@pytest.mark.parametrize("order", [1, 2])
def test_a_step_leaves_the_stationary_law_as_it_is(order: int) -> None:
    rows = random_rows(4**order, 4)
    chain = Chain(order=order, symbols="abcd", probabilities=rows)
    after = np.zeros(4**order)
    for context, symbol in itertools.product(range(4**order), range(4)):
        to = symbol if order == 1 else 4 * (context % 4) + symbol
        after[to] += chain.stationary[context] * rows[context, symbol]
    assert after == pytest.approx(chain.stationary, rel=1e-13)
    assert math.fsum(chain.stationary) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("order", [1, 2])
def test_the_probabilities_of_all_texts_of_a_length_add_up_to_1(order: int) -> None:
    chain = Chain(order=order, symbols="xyz", probabilities=random_rows(3**order, 3))
    for length in (2, 3, 5):
        texts = map("".join, itertools.product("xyz", repeat=length))
        assert math.fsum(math.exp(-chain.nats_of(text)) for text in texts) == pytest.approx(1)


def test_the_cost_of_a_text_is_that_of_its_first_symbols_and_of_each_step() -> None:
    rows = random_rows(9, 3)
    chain = Chain(order=2, symbols="xyz", probabilities=rows)
    steps = chain.stationary[3 * 0 + 2] * rows[3 * 0 + 2, 1] * rows[3 * 2 + 1, 1]
    assert chain.nats_of("xzyy") == pytest.approx(-math.log(steps))


@pytest.mark.parametrize(("text", "told"), [("ab!", "got '!'"), ("", "a text of 0"), ("é", "é")])
def test_a_text_that_the_chain_cannot_make_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        chain_of("ab", [[0.5, 0.5], [0.5, 0.5]]).nats_of(text)


@pytest.mark.parametrize("order", [1, 2])
def test_a_chain_comes_back_from_its_file_to_the_last_bit(tmp_path: Path, order: int) -> None:
    rows = random_rows(3**order, 3)
    rows /= rows.sum(axis=1, keepdims=True)
    write_chain(Chain(order=order, symbols="x z", probabilities=rows), tmp_path)
    back = read_chain(tmp_path)
    assert (back.order, back.symbols) == (order, "x z")
    assert np.array_equal(back.probabilities, rows)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"order": 3}, "order"),
        ({"symbols": "a"}, "symbols"),
        ({"symbols": "aa"}, "all different"),
        ({"symbols": "aé"}, "ASCII"),
        ({"probabilities": [[0.0, 1.0], [0.5, 0.5]]}, "greater than 0"),
        ({"probabilities": [[0.5, 0.5]]}, "2 rows of 2"),
        ({"probabilities": [[0.5, 0.5], [0.5, 0.4]]}, "add up to 1"),
        ({"more": 1}, "more"),
    ],
)
def test_a_file_that_holds_no_chain_is_refused_in_one_line(
    tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    whole = {"order": 1, "symbols": "ab", "probabilities": [[0.5, 0.5], [0.25, 0.75]]}
    (tmp_path / CHAIN).write_text(json.dumps(whole))
    read_chain(tmp_path)
    (tmp_path / CHAIN).write_text(json.dumps(whole | changed))
    with pytest.raises(InputError, match=told) as refused:
        read_chain(tmp_path)
    assert "run stages/fetch_corpus.py again" in str(refused.value)


def test_a_chain_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_chain(tmp_path)
