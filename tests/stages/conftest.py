"""What a pipeline leaves for the stages that decode: tokenizer, shards, two checkpoints."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ruamel.yaml import YAML

from canvaslm.checkpoint import save_checkpoint
from canvaslm.checkpoint_state import Progress, read_state
from canvaslm.corpus.shards import PackParams, pack_shards
from canvaslm.corpus.tokenizer import Tokenizer, TokenizerParams, train_tokenizer
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.shape import ModelParams
from canvaslm.params import read_yaml
from canvaslm.reporting.progress import untracked
from shapes import tiny_diffusion

ROOT = Path(__file__).parents[2]
VOCAB = 280
SHAPE = {
    "width": 16,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_width": 8,
    "ffn_width": 16,
    "time_width": 8,
}
LAYOUT = {"canvas_tokens": 4, "canvases_per_window": 8, "vocab_size": VOCAB}
SPEEDUP = {
    "device": "cpu",
    "n_prompts": 2,
    "batch_rows": 2,
    "prompt_tokens": 8,
    "new_tokens": 8,
    "short_new_tokens": 4,
    "rounds": 2,
    "warmup_rounds": 1,
}


def _documents(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    words = ["canvas", "window", "shard", "noise", "clean", "token"]
    texts = [" ".join(rng.choice(words, size=60)) for _ in range(8)]
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
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return texts[:4]


@pytest.fixture(scope="session")
def save_decodable(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a network that has seen nothing as pretrain would."""

    def save(
        objective: str, data: dict[str, Any], *, next_token_weight: float = 0.0, **changes: Any
    ) -> Path:
        values = read_yaml(ROOT / "configs" / "base.yaml")["model"] | SHAPE | changes
        params, layout = ModelParams.model_validate(values), Layout.model_validate(LAYOUT)
        params = params.twin() if objective == "autoregressive" else params
        model = Backbone(params, layout)
        initialise(model, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return save_checkpoint(
            tmp_path_factory.mktemp(objective),
            model=model,
            optimizer=optimizer,
            progress=Progress(
                step=1,
                windows_consumed=2,
                tokens=64,
                flops=1e6,
                skipped=(),
                rollbacks=(),
                log_sha256="",
            ),
            identity={
                "objective": objective,
                "layout": layout.model_dump(),
                "model": params.model_dump(),
                "diffusion": tiny_diffusion(next_token_weight=next_token_weight).model_dump(),
                "pretrain": {"steps": 4, "windows_per_step": 2, "ema_decay": 0.0},
                "data": data,
                "code": "c",
                "parent": None,
            },
            keep_last=None,
        )

    return save


@pytest.fixture(scope="session")
def decodable(
    tmp_path_factory: pytest.TempPathFactory, save_decodable: Callable[..., Path]
) -> dict[str, Path]:
    """Places by the name of the option that takes them."""
    root = tmp_path_factory.mktemp("decodable")
    train = _documents(root)
    knobs = TokenizerParams(source="train", end_of_text="<|endoftext|>", min_frequency=1)
    (root / "tokenizer.json").write_bytes(train_tokenizer(train, knobs, VOCAB))
    manifest = pack_shards(
        root,
        Tokenizer.load(root / "tokenizer.json"),
        PackParams(shard_tokens=10_000, n_threads=1),
        root / "shards",
        track=untracked,
    )
    values = read_yaml(ROOT / "configs" / "base.yaml")
    values["layout"] |= LAYOUT
    values["model"] |= SHAPE
    values["eval_speedup"] |= SPEEDUP
    values["generate"] |= {"device": "cpu", "denoise_steps": 4}
    with (root / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    data = {
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "eot_id": manifest.eot_id,
        "manifest_sha256": manifest.sha256,
        "shards": {},
    }
    return {
        "shards": root / "shards",
        "tokenizer": root / "tokenizer.json",
        "autoregressive": save_decodable("autoregressive", data),
        "diffusion": save_decodable("diffusion", data),
        "params": root / "params.yaml",
    }


@pytest.fixture(scope="session")
def companion(decodable: dict[str, Path], save_decodable: Callable[..., Path]) -> Path:
    """A diffusion checkpoint whose clean stream learned the next token."""
    data = read_state(decodable["diffusion"]).identity.data.model_dump()
    return save_decodable("diffusion", data, next_token_weight=1.0)
