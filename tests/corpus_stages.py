"""Fixtures of the corpus stages' tests: a small corpus in a folder of its own, stages run there."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.params import read_yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with forty documents and a params file, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    lines = [
        {"text": f"Document {n} tells of {n * n} things and of {n % 7} others.\n" * (1 + n % 3)}
        for n in range(40)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "texts/all.jsonl").write_text(content)
    _set_params(
        tmp_path,
        layout={"canvas_tokens": 4, "canvases_per_window": 4, "vocab_size": 300},
        fetch_corpus={"source": "files", "path": "texts", "pattern": "*.jsonl"},
        collect_documents={"val_share": 0.3},
        pack_shards={"shard_tokens": 400},
        audit_windows={"max_shared_ngram_share": 1.0},
    )
    return tmp_path


@pytest.fixture
def change_params(corpus: Path) -> Callable[..., None]:
    """Change knobs of some sections in the params file."""

    def change(**sections: dict[str, Any]) -> None:
        _set_params(corpus, **sections)

    return change


@pytest.fixture
def run_stage(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a stage in the corpus folder as its command line does and give the exit status."""

    def run(name: str, *arguments: str) -> int:
        assert Path.cwd() == corpus, "a stage must not write into the checkout"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        door, stage = importlib.import_module("door"), importlib.import_module(name)
        with pytest.raises(SystemExit) as left:
            door.main(getattr(stage, name))
        return int(left.value.code or 0)

    return run


def _set_params(folder: Path, **sections: dict[str, Any]) -> None:
    path = folder / "params.yaml"
    values = read_yaml(path if path.exists() else ROOT / "configs/base.yaml")
    for section, knobs in sections.items():
        values[section] |= knobs
    with path.open("w") as file:
        YAML().dump(values, file)
