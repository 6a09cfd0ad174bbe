import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

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
