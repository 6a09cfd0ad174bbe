"""A run of a few steps over random windows, small enough to be trained many times."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams
from canvaslm.reporting.files import write_json
from canvaslm.training.plan import ObjectiveKind, PretrainParams, Recipe, recipe
from shapes import tiny_diffusion, tiny_shape

LAYOUT = Layout(canvas_tokens=4, canvases_per_window=4, vocab_size=37)
MODEL = tiny_shape()
DIFFUSION = tiny_diffusion()
PRETRAIN = PretrainParams(
    seed=3,
    steps=15,
    windows_per_step=4,
    micro_batch_windows=2,
    optimizer="adamw",
    learning_rate=0.01,
    muon_learning_rate=0.02,
    final_learning_rate_share=0.1,
    schedule="cosine",
    warmup_steps=3,
    decay_steps=0,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    adam_eps=1e-8,
    muon_momentum=0.9,
    ema_decay=0.0,
    max_gradient_norm=1.0,
    max_consecutive_bad_steps=3,
    max_rollbacks=3,
    device="cpu",
    precision="float32",
    compile=False,
    gradient_checkpointing=False,
    vocab_chunk=16,
    log_every=2,
    save_every=5,
    trace_steps=2,
    keep_last=2,
    keep_best=0,
    loader_workers=0,
)


def make_recipe(
    objective: ObjectiveKind = "diffusion",
    *,
    layout: Layout = LAYOUT,
    model: dict[str, Any] | None = None,
    diffusion: dict[str, Any] | None = None,
    **pretrain: Any,
) -> Recipe:
    """The tiny recipe with some values changed."""
    return recipe(
        objective,
        layout=layout,
        model=ModelParams(**(MODEL.model_dump() | (model or {}))),
        diffusion=DiffusionParams(**(DIFFUSION.model_dump() | (diffusion or {}))),
        pretrain=PretrainParams(**(PRETRAIN.model_dump() | pretrain)),
    )


@pytest.fixture
def tiny_recipe() -> Callable[..., Recipe]:
    return make_recipe


@pytest.fixture
def windows() -> np.ndarray:
    """Ten windows of random ids, (10, 16) int64."""
    return np.random.default_rng(0).integers(0, LAYOUT.vocab_size, (10, LAYOUT.window_tokens))


@pytest.fixture
def shards(tmp_path: Path, windows: np.ndarray) -> Path:
    """The ten windows and a tail of three as one training shard, and four more to validate on."""
    return write_shards(tmp_path / "shards", np.append(windows, [1, 2, 3]))


@pytest.fixture
def repacked(tmp_path: Path, windows: np.ndarray) -> Path:
    """The same windows with one other token, packed again, so that the manifest fits them."""
    changed = np.append(windows, [1, 2, 3])
    changed[77] = (changed[77] + 1) % LAYOUT.vocab_size
    return write_shards(tmp_path / "repacked", changed)


def write_shards(place: Path, train: np.ndarray) -> Path:
    """Lay ids down as `pack_shards` does."""
    splits = {}
    for split, ids in (("train", train), ("val", train[:64])):
        file = place / split / "shard_00000.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(ids.astype("<u2").tobytes())
        facts = {"file": f"{split}/shard_00000.bin", "tokens": len(ids), "documents": 1}
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        splits[split] = [facts | {"text_bytes": len(ids), "sha256": digest}]
    (place / "token_bytes.bin").write_bytes(np.ones(LAYOUT.vocab_size, "<u4").tobytes())
    manifest = {
        "format_version": 1,
        "dtype": "uint16",
        "vocab_size": LAYOUT.vocab_size,
        "eot_id": 0,
        "tokenizer_sha256": "t",
        "documents_sha256": "d",
        "token_bytes_sha256": "b",
        "splits": splits,
    }
    write_json(place / "manifest.json", manifest)
    return place
