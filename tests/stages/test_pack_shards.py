import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canvaslm.corpus.manifest import read_manifest
from canvaslm.corpus.tokenizer import Tokenizer

pytest_plugins = ["corpus_stages"]

ROOT = Path(__file__).parents[2]
CORPUS_STAGES = [
    "fetch_corpus",
    "collect_documents",
    "train_tokenizer",
    "pack_shards",
    "audit_windows",
]


@pytest.fixture
def _tokenizer(run_stage: Callable[..., int]) -> None:
    for stage in CORPUS_STAGES[:3]:
        assert run_stage(stage) == 0


@pytest.mark.usefixtures("_tokenizer")
def test_shards_have_the_same_bytes_with_one_thread_and_with_four(
    corpus: Path, run_stage: Callable[..., int], change_params: Callable[..., None]
) -> None:
    # BR-06
    hashes = []
    for n_threads in (1, 4):
        change_params(pack_shards={"n_threads": n_threads})
        assert run_stage("pack_shards") == 0
        hashes.append(read_manifest(corpus / "data/shards").sha256)
    assert hashes[0] == hashes[1]
    manifest = read_manifest(corpus / "data/shards")
    assert (
        manifest.tokenizer_sha256 == Tokenizer.load(corpus / "data/tokenizer/tokenizer.json").sha256
    )
    assert len(manifest.splits["train"]) > 1


@pytest.mark.usefixtures("_tokenizer")
def test_empty_split_is_one_line_and_exit_2(
    corpus: Path, run_stage: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    path = corpus / "data/documents/val.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    capfd.readouterr()
    assert run_stage("pack_shards") == 2
    assert "val.parquet: expected documents in the split, got none" in capfd.readouterr().err
    assert not (corpus / "data/shards/manifest.json").exists()


def test_corpus_stages_never_import_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'stages')!r})\n"
        "import door\n"
        f"for name in {CORPUS_STAGES!r}:\n"
        "    importlib.import_module(name)\n"
        "for name in 'fetch documents tokenizer shards windows batches audit'.split():\n"
        "    importlib.import_module(f'canvaslm.corpus.{name}')\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_help_comes_before_anything_heavy_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", ROOT / "stages/pack_shards.py", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "lay their ids into shards" in result.stdout
    for heavy in ("numpy", "pyarrow", "tokenizers", "tiktoken", "pydantic", "torch"):
        assert f" {heavy}\n" not in result.stderr


def test_order_in_which_files_are_found_reaches_no_shard(
    corpus: Path, run_stage: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # BR-06
    lines = (corpus / "texts/all.jsonl").read_text().splitlines(keepends=True)
    (corpus / "texts/all.jsonl").unlink()
    parts = {"a.jsonl": "".join(lines[:20]), "b.jsonl": "".join(lines[20:])}
    walk, hashes = os.walk, []
    for names in (["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"]):
        for name in names:
            (corpus / "texts" / name).unlink(missing_ok=True)
            (corpus / "texts" / name).write_text(parts[name])

        def in_that_order(
            top: Path, names: list[str] = names, **options: Any
        ) -> Iterator[tuple[str, list[str], list[str]]]:
            for folder, folders, files in walk(top, **options):
                yield folder, folders, names if Path(folder).name == "texts" else files

        monkeypatch.setattr(os, "walk", in_that_order)
        for stage in CORPUS_STAGES[:4]:
            assert run_stage(stage) == 0
        hashes.append(read_manifest(corpus / "data/shards").sha256)
    assert hashes[0] == hashes[1]
