from collections.abc import Callable
from pathlib import Path

import pytest

from canvaslm.corpus.tokenizer import Tokenizer

pytest_plugins = ["corpus_stages"]


@pytest.fixture
def _documents(corpus: Path, run_stage: Callable[..., int]) -> None:
    assert run_stage("fetch_corpus") == 0
    assert run_stage("collect_documents") == 0
    assert (corpus / "data/documents/train.parquet").is_file()


@pytest.mark.usefixtures("_documents")
def test_vocabulary_has_the_size_of_the_layout_and_the_same_bytes_each_time(
    corpus: Path, run_stage: Callable[..., int]
) -> None:
    contents = []
    for place in ("one.json", "two.json"):
        assert run_stage("train_tokenizer", "--tokenizer", place) == 0
        contents.append((corpus / place).read_bytes())
    assert contents[0] == contents[1]
    assert Tokenizer.load(corpus / "one.json").vocab_size == 300


@pytest.mark.usefixtures("_documents")
def test_vocabulary_that_cannot_be_reached_is_one_line_and_exit_2(
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    change_params(layout={"vocab_size": 50_000})
    assert run_stage("train_tokenizer") == 2
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("layout.vocab_size: expected 50000 tokens")


@pytest.mark.usefixtures("_documents")
def test_held_out_text_teaches_the_vocabulary_nothing(
    corpus: Path, run_stage: Callable[..., int]
) -> None:
    assert run_stage("train_tokenizer") == 0
    before = (corpus / "data/tokenizer/tokenizer.json").read_bytes()
    (corpus / "data/documents/val.parquet").unlink()
    assert run_stage("train_tokenizer") == 0
    assert (corpus / "data/tokenizer/tokenizer.json").read_bytes() == before


@pytest.mark.usefixtures("_documents")
def test_end_of_text_that_the_own_tokenizer_lacks_stops_before_any_shard(
    corpus: Path,
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    # BR-04
    assert run_stage("train_tokenizer", "--tokenizer", "own.json") == 0
    sha256 = Tokenizer.load(corpus / "own.json").sha256
    change_params(train_tokenizer={"source": f"own.json#sha256={sha256}", "end_of_text": "</s>"})
    assert run_stage("train_tokenizer") == 2
    assert "own.json: expected the special token '</s>'" in capfd.readouterr().err
    assert run_stage("pack_shards") == 2
    assert not (corpus / "data/shards").exists()
