"""Is a synthetic corpus drawn from the chain that is written beside it, and from its seed alone?"""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from canvaslm.corpus.chain import CHAIN, Chain, read_chain
from canvaslm.corpus.synthesis import (
    TEXTS,
    MarkovRecipe,
    draw_chain,
    draw_documents,
    read_recipe,
    synthesise_corpus,
)
from canvaslm.errors import InputError
from canvaslm.params import read_yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "markov").glob("*.yaml"))
VALUES = {
    "seed": 3,
    "order": 1,
    "symbols": "abcd ",
    "documents": 300,
    "symbols_per_document": 50,
    "concentration": 0.5,
    "uniform_share": 0.05,
}


def recipe_of(**changed: object) -> MarkovRecipe:
    return MarkovRecipe.model_validate(VALUES | changed)


def written(folder: Path, **changed: object) -> dict[str, bytes]:
    folder.mkdir()
    synthesise_corpus(recipe_of(**changed), folder, text_field="text")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def texts_of(**changed: object) -> tuple[Chain, list[str]]:
    recipe = recipe_of(**changed)
    chain = draw_chain(recipe)
    length = recipe.symbols_per_document
    return chain, draw_documents(chain, seed=3, documents=recipe.documents, length=length)


@pytest.mark.parametrize("order", [1, 2])
def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, order: int) -> None:
    one, two = (written(tmp_path / name, order=order) for name in ("one", "two"))
    assert one.keys() == {CHAIN, TEXTS}
    assert one == two
    other = written(tmp_path / "other", order=order, seed=4)
    assert all(other[name] != content for name, content in one.items())


def test_more_documents_do_not_change_the_first_ones(tmp_path: Path) -> None:
    few, many = (written(tmp_path / str(n), documents=n)[TEXTS] for n in (7, 300))
    assert many.startswith(few)
    assert len(set(many.splitlines())) == 300


def test_the_file_holds_the_texts_under_the_field_and_the_chain_that_made_them(
    tmp_path: Path,
) -> None:
    synthesise_corpus(recipe_of(), tmp_path, text_field="body.text")
    lines = [json.loads(line) for line in (tmp_path / TEXTS).read_text().splitlines()]
    chain, texts = texts_of()
    assert [line["body.text"] for line in lines] == texts
    assert np.array_equal(read_chain(tmp_path).probabilities, chain.probabilities)


@pytest.mark.parametrize("order", [1, 2])
def test_symbols_follow_each_context_as_often_as_the_chain_says(order: int) -> None:
    chain, texts = texts_of(order=order, documents=200, symbols_per_document=2000)
    table = {symbol: number for number, symbol in enumerate(chain.symbols)}
    seen = np.zeros_like(chain.probabilities)
    for text in texts:
        for place, times in Counter(
            text[k : k + order + 1] for k in range(len(text) - order)
        ).items():
            context = 0
            for symbol in place[:-1]:
                context = context * len(table) + table[symbol]
            seen[context, table[place[-1]]] += times
    visits = seen.sum(axis=1, keepdims=True)
    p = chain.probabilities
    z = (seen / visits - p) / np.sqrt(p * (1 - p) / visits)
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1, abs=0.4)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize("order", [1, 2])
def test_documents_begin_in_the_stationary_law(order: int) -> None:
    n = 20_000
    chain, texts = texts_of(order=order, documents=n, symbols_per_document=3)
    begun = Counter(text[:order] for text in texts)
    contexts = ["".join(symbols) for symbols in itertools.product(chain.symbols, repeat=order)]
    pi = chain.stationary
    z = (np.array([begun[c] for c in contexts]) / n - pi) / np.sqrt(pi * (1 - pi) / n)
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("order", [1, 2])
def test_long_texts_cost_the_rate_within_their_standard_error(order: int) -> None:
    chain, texts = texts_of(order=order, documents=100, symbols_per_document=5000)
    costs = np.array([chain.nats_of(text) / len(text) for text in texts])
    error = costs.std(ddof=1) / math.sqrt(len(costs))
    assert error < 0.003
    assert abs(costs.mean() - chain.entropy_rate_nats) < 4 * error


def test_order_2_pays_less_for_its_text_than_the_best_order_1_would() -> None:
    chain, texts = texts_of(order=2, documents=50, symbols_per_document=4000)
    own = sum(map(chain.nats_of, texts)) / sum(map(len, texts))
    pairs = Counter(text[k : k + 2] for text in texts for k in range(len(text) - 1))
    firsts = Counter[str]()
    for pair, times in pairs.items():
        firsts[pair[0]] += times
    total = sum(pairs.values())
    order_1 = -sum(n * math.log(n / firsts[pair[0]]) for pair, n in pairs.items()) / total
    assert own < order_1 - 0.05


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("concentration", [0.01, 1000.0])
def test_every_symbol_can_follow_every_context_however_sharp_the_law(
    order: int, concentration: float
) -> None:
    recipe = recipe_of(order=order, concentration=concentration, uniform_share=1e-6)
    chain = draw_chain(recipe)
    assert chain.probabilities.min() >= 1e-6 / 5 * 0.999
    assert chain.stationary.min() > 0
    assert 0 < chain.entropy_rate_nats <= math.log(5)


def test_pure_chance_is_uniform_whatever_the_concentration() -> None:
    chain = draw_chain(recipe_of(uniform_share=1.0, concentration=0.01))
    assert chain.entropy_rate_nats == pytest.approx(math.log(5), rel=1e-14)


def test_a_sharper_law_has_a_lower_rate() -> None:
    rates = [draw_chain(recipe_of(concentration=c)).entropy_rate_nats for c in (0.1, 1.0, 100.0)]
    assert rates == sorted(rates)
    assert rates[0] < 0.7 * rates[-1]


def recipe_file(folder: Path, **changed: object) -> Path:
    values = {key: value for key, value in (VALUES | changed).items() if value is not None}
    path = folder / "recipe.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_project_draw_chains_with_words(path: Path) -> None:
    recipe = read_recipe(path)
    assert path.stem == f"order_{recipe.order}"
    space = draw_chain(recipe).stationary.reshape(-1, len(recipe.symbols)).sum(axis=0)[
        recipe.symbols.index(" ")
    ]  # fmt: skip
    assert 0.05 < space < 0.3


def test_there_is_a_recipe_of_each_order_that_differs_in_nothing_else() -> None:
    one, two = (read_yaml(path) for path in RECIPES)
    assert one | {"order": 2} == two


def test_a_recipe_is_read_as_it_is_written(tmp_path: Path) -> None:
    assert read_recipe(recipe_file(tmp_path)) == recipe_of()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"order": 3}, "order"),
        ({"order": 0}, "order"),
        ({"symbols": "a"}, "symbols: expected String should have at least 2"),
        ({"symbols": "abca"}, "all different"),
        ({"symbols": "a\n"}, "printable ASCII"),
        ({"symbols": "aé"}, "printable ASCII"),
        ({"uniform_share": 0.0}, "uniform_share"),
        ({"uniform_share": 1.1}, "uniform_share"),
        ({"uniform_share": 5e-324}, "uniform_share: expected greater than or equal to 0.000001"),
        ({"order": True}, "order: expected 1 or 2, got True"),
        ({"order": 1.0}, "order: expected 1 or 2, got 1.0"),
        ({"symbols_per_document": 2**31 - 1}, "symbols_per_document: expected less than or equal"),
        ({"documents": 2**31 - 1}, "documents: expected less than or equal"),
        (
            {"documents": 2**20, "symbols_per_document": 257},
            "symbols_per_document: expected at most 256 for 1048576 documents, got 257",
        ),
        ({"concentration": 0.0}, "concentration"),
        ({"documents": 1}, "documents"),
        ({"symbols_per_document": 1}, "symbols_per_document"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "recipe.yaml:seed: expected a value, got nothing"),
        ({"sede": 1, "seed": None}, "did you mean 'seed'"),
    ],
)
def test_a_recipe_that_draws_no_chain_is_refused(
    tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        read_recipe(recipe_file(tmp_path, **changed))


@pytest.mark.parametrize("content", ["", "- seed: 1\n", "seed", "seed: [", "seed: 1\nseed: 2\n"])
def test_what_is_no_recipe_is_told_as_one_and_not_as_a_params_file(
    tmp_path: Path, content: str
) -> None:
    """The advice names the recipe's file: composing a profile would overwrite other knobs."""
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=r"recipe\.yaml: expected the recipe of a Markov") as told:
        read_recipe(path)
    assert "make profile" not in str(told.value)
    assert "correct the recipe (see configs/markov/order_1.yaml)" in str(told.value)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("symbols", ["ab", "".join(map(chr, range(33, 65)))])
def test_every_chain_that_a_recipe_can_draw_is_read_back(
    tmp_path: Path, order: int, symbols: str
) -> None:
    """At the outermost values of both knobs: what fetch_corpus writes, collect_documents takes."""
    for seed, (concentration, share) in enumerate(itertools.product((0.01, 1000.0), (1e-6, 1.0))):
        recipe = recipe_of(
            order=order,
            symbols=symbols,
            seed=seed,
            concentration=concentration,
            uniform_share=share,
            documents=2,
        )
        synthesise_corpus(recipe, tmp_path, text_field="text")
        chain = read_chain(tmp_path)
        costs = [
            chain.nats_of(json.loads(line)["text"])
            for line in (tmp_path / TEXTS).read_text().splitlines()
        ]
        assert all(map(math.isfinite, costs))
        assert 0 < chain.entropy_rate_nats <= math.log(len(symbols)) * (1 + 1e-12)


def test_long_documents_are_drawn_fewer_at_once_and_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many are drawn side by side is a matter of memory alone."""
    _, whole = texts_of(documents=20)
    monkeypatch.setattr("canvaslm.corpus.synthesis._CHANCES_AT_ONCE", 50 * 3)
    assert texts_of(documents=20)[1] == whole


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a Markov chain, got no such file"):
        read_recipe(tmp_path / "none.yaml")
