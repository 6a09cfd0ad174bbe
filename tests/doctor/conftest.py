"""A project with one finished run of each objective, small enough to be damaged many times."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from canvaslm.code_fingerprint import fingerprint
from canvaslm.corpus.shards import PackParams, pack_shards
from canvaslm.corpus.tokenizer import Tokenizer, TokenizerParams, train_tokenizer
from canvaslm.doctor.patient import Patient, Places
from canvaslm.params import read_yaml
from canvaslm.reporting.files import write_json
from canvaslm.reporting.progress import untracked
from canvaslm.training.run import pretrain
from shapes import PLAIN

ROOT = Path(__file__).parents[2]
OBJECTIVES = ("diffusion", "autoregressive")
CODE = ("src", "stages", "tests", "bench", "docs", "configs")
FILES = (
    "constraints.txt",
    "Makefile",
    "dvc.yaml",
    "README.md",
    "CONTRIBUTING.md",
    "requirements",
    "reports",
    ".ci",
    ".github",
    "pyproject.toml",
)
VALUES: dict[str, dict[str, Any]] = {
    "layout": {"canvas_tokens": 4, "canvases_per_window": 4, "vocab_size": 280},
    "model": {
        "width": 16,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_width": 8,
        "ffn_width": 16,
        "time_width": 8,
    },
    "diffusion": {"train_times": 4},
    "pretrain": {
        "steps": 5,
        "windows_per_step": 2,
        "micro_batch_windows": 1,
        "learning_rate": 0.01,
        "warmup_steps": 1,
        "decay_steps": 0,
        "device": "cpu",
        "vocab_chunk": 100,
        "log_every": 2,
        "save_every": 2,
    },
    "audit_run": {"device": "cpu", "n_windows": 2},
}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {"default": {}, "plain": PLAIN}


def _pack(place: Path) -> None:
    """Documents, a tokenizer and shards, as the stages before a training make them."""
    rng, words = np.random.default_rng(0), ["canvas", "window", "shard", "noise", "clean", "token"]
    texts = [f"{n} " + " ".join(rng.choice(words, size=60)) for n in range(6)]
    place.mkdir()
    for split, part in (("train", texts[:4]), ("val", texts[4:])):
        rows = [
            {
                "doc_id": number,
                "source": f"{split}:{number}",
                "text": text,
                "n_bytes": len(text.encode()),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
            for number, text in enumerate(part)
        ]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{split}.parquet")
    knobs = TokenizerParams(source="train", end_of_text="<|endoftext|>", min_frequency=1)
    tokenizer = place / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir()
    tokenizer.write_bytes(train_tokenizer(texts[:4], knobs, VALUES["layout"]["vocab_size"]))
    pack = PackParams(shard_tokens=10_000, n_threads=1)
    pack_shards(place, Tokenizer.load(tokenizer), pack, place / "shards", track=untracked)


def _write_params(path: Path, recipe: str) -> None:
    values = read_yaml(ROOT / "configs" / "base.yaml")
    for section, changes in (*VALUES.items(), *RECIPES[recipe].items()):
        values[section] |= changes
    with path.open("w") as file:
        YAML().dump(values, file)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and the docs of this project, which do not change while tests run."""
    place = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*CODE, *FILES):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, place)
    return place


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Callable[[str], Path]:
    """The folder in which a recipe trained both objectives to their end, when first asked for."""
    root = tmp_path_factory.mktemp("projects")

    def finish(recipe: str) -> Path:
        if not (root / recipe).exists():
            _finish(root / recipe, recipe, checkout)
        return root / recipe

    return finish


def _finish(place: Path, recipe: str, checkout: Path) -> None:
    """Pack, train both objectives, and write the reports of their audits."""
    place.mkdir()
    _pack(place / "data")
    _write_params(place / "params.yaml", recipe)
    for objective in OBJECTIVES:
        patient = Patient(places_of(place, checkout), objective, untracked)
        pretrain(
            patient.job,
            work=place / "work",
            out=place / "checkpoints" / objective,
            reports=patient.reports,
            track=untracked,
        )
        audit = {
            "verdict": "pass",
            "verdict_reason": "40 checks pass",
            "trained_model_sha256": sha256_of_model(place, objective),
        }
        write_json(place / "reports" / "audit_run" / objective / "metrics.json", audit)


def sha256_of_model(place: Path, objective: str) -> str:
    """Of the weights of a finished run."""
    file = place / "checkpoints" / objective / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def project(
    request: pytest.FixtureRequest,
    finished: Callable[[str], Path],
    checkout: Path,
    tmp_path: Path,
) -> Places:
    """That folder as a copy of its own, to be damaged; a test may ask for another recipe."""
    shutil.copytree(finished(getattr(request, "param", "default")), tmp_path / "project")
    return places_of(tmp_path / "project", checkout)


def places_of(place: Path, root: Path) -> Places:
    return Places(
        root=root,
        params=place / "params.yaml",
        shards=place / "data" / "shards",
        tokenizer=place / "data" / "tokenizer" / "tokenizer.json",
        checkpoints=place / "checkpoints",
        reports=place / "reports",
        work=place / "work",
        validate=_validate,
    )


def _validate(path: Path) -> None:
    """As the door does for all sections; here for one."""
    from canvaslm.params import load_section
    from canvaslm.training.plan import PretrainParams

    load_section(path, "pretrain", PretrainParams)


@pytest.fixture
def with_fingerprint(project: Places) -> Places:
    """A project whose code has a fingerprint of one stage; it takes a while to make and to read."""
    stage = fingerprint(project.root / "stages" / "pretrain.py", project.root)
    write_json(project.reports / "code" / "pretrain.json", stage)
    return project


@pytest.fixture
def change_params() -> Callable[..., None]:
    """Write other values into a project's params file."""

    def change(places: Places, section: str, **values: Any) -> None:
        content = read_yaml(places.params)
        content[section] |= values
        with places.params.open("w") as file:
            YAML().dump(content, file)

    return change
