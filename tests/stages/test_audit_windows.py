import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["corpus_stages"]


@pytest.fixture
def _shards(run_stage: Callable[..., int]) -> None:
    for stage in ("fetch_corpus", "collect_documents", "train_tokenizer", "pack_shards"):
        assert run_stage(stage) == 0


def report(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "reports/audit_windows" / name).read_text())


@pytest.mark.usefixtures("_shards")
def test_good_shards_pass_and_the_report_counts_what_was_collected(
    corpus: Path, run_stage: Callable[..., int]
) -> None:
    assert run_stage("audit_windows") == 0
    figures = report(corpus, "metrics.json")
    counts = json.loads((corpus / "reports/collect_documents/metrics.json").read_text())
    for split in ("train", "val"):
        assert figures[split]["documents"] == counts["documents"][split]
        assert figures[split]["text_bytes"] == counts["text_bytes"][split]
        whole = figures[split]["windows"] * 16 + figures[split]["tail_tokens"]
        assert whole == figures[split]["tokens"]
    assert figures["verdict"] == "pass"
    assert report(corpus, "faults.json") == {"faults": []}
    assert len(report(corpus, "samples.json")["val"]) == 4


@pytest.mark.usefixtures("_shards")
def test_damaged_shard_closes_the_gate_after_the_report(
    corpus: Path, run_stage: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    # BR-09
    last = sorted((corpus / "data/shards/train").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-2])
    capfd.readouterr()
    assert run_stage("audit_windows") == 1
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"gate closed: train/{last.name} at token")
    assert report(corpus, "metrics.json")["verdict"] == "fail"
    assert report(corpus, "faults.json")["faults"][0]["shard"] == f"train/{last.name}"


@pytest.mark.usefixtures("_shards")
def test_too_many_shared_runs_close_the_gate(
    corpus: Path, run_stage: Callable[..., int], change_params: Callable[..., None]
) -> None:
    # BR-07
    change_params(audit_windows={"ngram_tokens": 3, "max_shared_ngram_share": 0.0})
    assert run_stage("audit_windows") == 1
    assert report(corpus, "metrics.json")["shared_ngram_share"] > 0


@pytest.mark.usefixtures("_shards")
def test_window_that_fits_nowhere_is_refused_with_both_numbers(
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    # BR-11
    change_params(layout={"canvases_per_window": 1000})
    capfd.readouterr()
    assert run_stage("audit_windows") == 2
    assert "expected at least one window of 4000 tokens" in capfd.readouterr().err


def test_dataset_without_a_manifest_is_incomplete(
    run_stage: Callable[..., int],
    corpus: Path,
    tokenizer_file: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # BR-10
    (corpus / "data/shards").mkdir(parents=True)
    assert run_stage("audit_windows", "--tokenizer", str(tokenizer_file)) == 2
    assert "incomplete dataset" in capfd.readouterr().err


@pytest.fixture
def tokenizer_file(corpus: Path) -> Path:
    from canvaslm.corpus.tokenizer import TokenizerParams, train_tokenizer

    params = TokenizerParams(source="train", end_of_text="<|endoftext|>", min_frequency=1)
    path = corpus / "tokenizer.json"
    path.write_bytes(train_tokenizer(["some words, some more words"], params, 260))
    return path
