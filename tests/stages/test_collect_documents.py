import json
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from canvaslm.corpus.chain import CHAIN, read_chain

pytest_plugins = ["corpus_stages"]


def test_documents_and_their_counts_are_written(
    corpus: Path, run_stage: Callable[..., int]
) -> None:
    assert run_stage("fetch_corpus") == 0
    assert run_stage("collect_documents") == 0
    counts = json.loads((corpus / "reports/collect_documents/metrics.json").read_text())
    assert counts["read"] == 40
    assert sum(counts["documents"].values()) == 40
    for split, number in counts["documents"].items():
        table = pq.read_table(corpus / f"data/documents/{split}.parquet")
        assert table.num_rows == number > 0
        assert sum(table["n_bytes"].to_pylist()) == counts["text_bytes"][split]
    assert counts["entropy_rate_nats_per_byte"] == "not_measured"
    assert counts["chain_nats_per_byte"] == "not_measured"


@pytest.fixture
def markov(corpus: Path, change_params: Callable[..., None]) -> Path:
    """A recipe for a tiny corpus instead of the user's files."""
    recipe = corpus / "recipe.yaml"
    recipe.write_text(
        'seed: 1\norder: 2\nsymbols: "abc "\ndocuments: 40\nsymbols_per_document: 200\n'
        "concentration: 0.5\nuniform_share: 0.1\n"
    )
    change_params(fetch_corpus={"source": "markov", "path": "recipe.yaml"})
    return recipe


@pytest.mark.parametrize("order", [1, 2])
def test_a_drawn_corpus_goes_the_whole_way_and_brings_its_floor(
    corpus: Path, run_stage: Callable[..., int], markov: Path, order: int
) -> None:
    markov.write_text(markov.read_text().replace("order: 2", f"order: {order}"))
    for name in ("fetch_corpus", "collect_documents", "train_tokenizer", "pack_shards"):
        assert run_stage(name) == 0
    assert run_stage("audit_windows") == 0
    counts = json.loads((corpus / "reports/collect_documents/metrics.json").read_text())
    assert sum(counts["documents"].values()) == 40
    chain = read_chain(corpus / "data/raw")
    assert counts["entropy_rate_nats_per_byte"] == chain.entropy_rate_nats
    for split, cost in counts["chain_nats_per_byte"].items():
        texts = pq.read_table(corpus / f"data/documents/{split}.parquet")["text"].to_pylist()
        nats = math.fsum(chain.nats_of(text) for text in texts)
        assert cost == pytest.approx(nats / sum(map(len, texts)))
    audit = json.loads((corpus / "reports/audit_windows/metrics.json").read_text())
    assert audit["verdict"] == "pass"


@pytest.mark.parametrize(
    ("symbols", "length", "told"),
    [("ab", 6, "copies and 0 blank ones among 400"), ("a ", 9, "blank ones among ")],
    ids=["copies", "blank"],
)
def test_a_drawn_corpus_that_would_lose_documents_is_refused(
    corpus: Path,
    run_stage: Callable[..., int],
    markov: Path,
    capfd: pytest.CaptureFixture[str],
    symbols: str,
    length: int,
    told: str,
) -> None:
    """What is dropped is dropped for what it says, so the rest has another law and no floor."""
    recipe = markov.read_text().replace('"abc "', f'"{symbols}"')
    recipe = recipe.replace("symbols_per_document: 200", f"symbols_per_document: {length}")
    markov.write_text(recipe.replace("documents: 40", "documents: 400"))
    assert run_stage("fetch_corpus") == 0
    capfd.readouterr()
    assert run_stage("collect_documents") == 2
    line = capfd.readouterr().err
    assert len(line.splitlines()) == 1
    assert told in line
    assert "raise symbols_per_document in the recipe" in line
    assert not (corpus / "data/documents").exists()
    assert not (corpus / "reports/collect_documents").exists()


def test_a_damaged_chain_is_one_line_and_exit_2_and_nothing_is_collected(
    corpus: Path,
    run_stage: Callable[..., int],
    markov: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert markov.is_file()
    assert run_stage("fetch_corpus") == 0
    (corpus / "data/raw" / CHAIN).write_text("{}")
    capfd.readouterr()
    assert run_stage("collect_documents") == 2
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("data/raw/chain.json: expected the chain that made the corpus")
    assert not (corpus / "data/documents").exists()


def test_bad_record_is_one_line_with_file_and_record_and_exit_2(
    corpus: Path, run_stage: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    with (corpus / "texts/all.jsonl").open("a") as file:
        file.write('{"text": 3}\n')
    assert run_stage("fetch_corpus") == 0
    assert run_stage("collect_documents") == 2
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("all.jsonl:41: expected a string in 'text'")
    assert not (corpus / "reports/collect_documents").exists()


def test_without_a_record_of_the_corpus_the_stage_says_what_to_run(
    corpus: Path, run_stage: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_stage("collect_documents") == 2
    assert "run stages/fetch_corpus.py" in capfd.readouterr().err
    assert not (corpus / "data/documents").exists()
