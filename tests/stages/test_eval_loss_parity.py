import csv
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ruamel.yaml import YAML

from averages import save_other_weights
from canvaslm.checkpoint import save_checkpoint
from canvaslm.checkpoint_state import Progress, SkippedStep
from canvaslm.corpus.manifest import Manifest, read_manifest
from canvaslm.corpus.shards import PackParams, pack_shards
from canvaslm.corpus.tokenizer import Tokenizer, TokenizerParams, train_tokenizer
from canvaslm.errors import InputError
from canvaslm.evaluation.contestant import load_contestant
from canvaslm.evaluation.loss_parity import judge_loss_parity
from canvaslm.evaluation.parity_params import EvalLossParityParams
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.model.shape import ModelParams
from canvaslm.params import read_yaml
from canvaslm.reporting.progress import untracked
from shapes import tiny_diffusion, tiny_shape

ROOT = Path(__file__).parents[2]
VOCAB = 280
LAYOUT = Layout(canvas_tokens=4, canvases_per_window=4, vocab_size=VOCAB)
TWIN_LAYOUT = Layout(canvas_tokens=1, canvases_per_window=16, vocab_size=VOCAB)
SHAPE = tiny_shape(
    n_layers=1, n_heads=2, n_kv_heads=1, head_width=8, ffn_width=16, vocab_multiple=1
)


def write_documents(folder: Path) -> list[str]:
    """Both splits, in the columns that collect_documents writes."""
    rng = np.random.default_rng(0)
    words = ["canvas", "window", "shard", "noise", "clean", "token"]
    texts = [" ".join(rng.choice(words, size=40)) for _ in range(12)]
    for split, part in (("train", texts[:6]), ("val", texts[6:])):
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
    return texts[:6]


def save_model(
    place: Path, objective: str, shape: ModelParams, layout: Layout, manifest: Manifest
) -> Path:
    """A checkpoint as pretrain leaves it, of a network that has seen nothing."""
    model = Backbone(shape, layout)
    initialise(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return save_checkpoint(
        place / objective,
        model=model,
        optimizer=optimizer,
        progress=Progress(
            step=1,
            windows_consumed=2,
            tokens=2 * layout.window_tokens,
            flops=1e6,
            skipped=(SkippedStep(step=0, first_window=0, last_window=1, cause="loss is nan"),),
            rollbacks=(),
            log_sha256="",
        ),
        identity={
            "objective": objective,
            "layout": layout.model_dump(),
            "model": shape.model_dump(),
            "diffusion": tiny_diffusion().model_dump(),
            "data": {
                "tokenizer_sha256": manifest.tokenizer_sha256,
                "eot_id": manifest.eot_id,
                "manifest_sha256": manifest.sha256,
                "shards": {},
            },
            "pretrain": {"steps": 4, "windows_per_step": 2, "ema_decay": 0.0},
            "code": "c",
            "parent": None,
        },
        keep_last=None,
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards, two checkpoints and a params file."""
    root = tmp_path_factory.mktemp("inputs")
    train = write_documents(root)
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
    values["eval_loss_parity"] |= {"device": "cpu", "n_times": 2, "max_windows": 6}
    with (root / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    return {
        "shards": root / "shards",
        "autoregressive": save_model(root, "autoregressive", SHAPE.twin(), TWIN_LAYOUT, manifest),
        "diffusion": save_model(root, "diffusion", SHAPE, LAYOUT, manifest),
        "params": root / "params.yaml",
    }


def run_stage(inputs: dict[str, Path], out: Path) -> subprocess.CompletedProcess[str]:
    options = [text for name, path in inputs.items() for text in (f"--{name}", str(path))]
    return subprocess.run(
        [sys.executable, ROOT / "stages" / "eval_loss_parity.py", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=inputs["params"].parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def judge(inputs: dict[str, Path], out: Path, **changes: Any) -> None:
    knobs = read_yaml(inputs["params"])["eval_loss_parity"]
    places = {name: inputs[name] for name in ("shards", "autoregressive", "diffusion")}
    judge_loss_parity(
        **(places | changes),
        out=out,
        params=EvalLossParityParams.model_validate(knobs),
        track=untracked,
    )


def test_stage_scores_both_checkpoints_on_the_same_tokens(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    done = run_stage(inputs, tmp_path / "first")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "first" / "metrics.json").read_text())
    assert metrics["n_windows"] == 6
    assert metrics["n_tokens"] == 6 * LAYOUT.window_tokens
    assert metrics["n_text_bytes"] > metrics["n_tokens"]
    # An untrained network is uniform up to its tiny weights; the bound punishes what the plain
    # cross-entropy of the same network does not show.
    twin, bound = metrics["autoregressive"], metrics["diffusion"]
    assert twin["nats_per_token"] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert bound["diagnostic_cross_entropy_nats"] == pytest.approx(math.log(VOCAB), abs=0.2)
    assert bound["bound_nats_per_token"] > math.log(VOCAB)
    assert metrics["verdict"] in ("pass", "fail")
    assert twin["trained_tokens"] == bound["trained_tokens"] == 32
    assert (bound["trained_skipped_steps"], bound["trained_rollbacks"]) == (1, 0)
    with (tmp_path / "first" / "by_time.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["t"] for row in rows] == ["1", "2"]
    summed = sum(float(row["bound_nats_per_token"]) for row in rows)
    assert summed == pytest.approx(bound["bound_nats_per_token"], rel=1e-12)
    with (tmp_path / "first" / "by_document.csv").open() as file:
        rows = list(csv.DictReader(file))
    tokens = sum(int(row["tokens"]) for row in rows)
    assert (len(rows), tokens) == (metrics["n_documents"], metrics["n_tokens"])
    for column, figure in (
        ("twin_nats", twin["nats_per_token"]),
        ("bound_nats", bound["bound_nats_per_token"]),
    ):
        total = sum(float(row[column]) for row in rows)
        assert total / tokens == pytest.approx(figure, rel=1e-12)


def test_an_average_of_the_weights_is_what_is_judged_and_the_report_says_so(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    """As a checkpoint is that was trained to those weights; the hash is that of its own file."""
    found = {}
    for name, as_average in (("averaged", True), ("trained", False)):
        other = save_other_weights(inputs["diffusion"], tmp_path / name, as_average=as_average)
        judge(inputs, tmp_path / "out" / name, diffusion=other)
        text = (tmp_path / "out" / name / "metrics.json").read_text()
        found[name] = json.loads(text)["diffusion"]
        assert found[name].pop("judged_weights") == name
        sha256 = hashlib.sha256((other / "model.safetensors").read_bytes()).hexdigest()
        assert found[name].pop("trained_model_sha256") == sha256
    assert found["averaged"] == found["trained"]
    judge(inputs, tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "metrics.json").read_text())
    assert plain["diffusion"]["bound_nats_per_token"] != found["trained"]["bound_nats_per_token"]
    assert plain["autoregressive"]["judged_weights"] == "trained"


def test_evaluating_again_writes_the_same_bytes(inputs: dict[str, Path], tmp_path: Path) -> None:
    judge(inputs, tmp_path / "first")
    judge(inputs, tmp_path / "second")
    for name in ("metrics.json", "by_time.csv", "by_document.csv"):
        first, second = (tmp_path / run / name for run in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_a_missing_checkpoint_is_told_in_one_line_with_status_2(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    done = run_stage({**inputs, "diffusion": tmp_path / "nowhere"}, tmp_path / "out")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nowhere" in done.stderr
    assert not (tmp_path / "out").exists()


def test_checkpoints_given_in_each_others_place_are_refused(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="expected diffusion, got autoregressive"):
        judge(inputs, tmp_path, diffusion=inputs["autoregressive"])


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", VOCAB + 1), ("tokenizer_sha256", "other"), ("eot_id", 3)]
)
def test_a_checkpoint_of_other_shards_is_refused(
    inputs: dict[str, Path], tmp_path: Path, field: str, value: Any
) -> None:
    manifest = read_manifest(inputs["shards"]).model_copy(update={field: value})
    with pytest.raises(InputError, match=f"{field}: expected {value}"):
        load_contestant(inputs["diffusion"], "diffusion", manifest)


@pytest.mark.parametrize("key", ["identity", "progress", "files"])
@pytest.mark.parametrize("value", [None, {}])
def test_a_checkpoint_that_does_not_say_what_it_is_is_refused(
    inputs: dict[str, Path], tmp_path: Path, key: str, value: object
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(inputs["diffusion"], broken)
    state = json.loads((broken / "state.json").read_text())
    (broken / "state.json").write_text(json.dumps(state | {key: value}))
    with pytest.raises(InputError, match=rf"state\.json: expected the state .* \({key}"):
        load_contestant(broken, "diffusion", read_manifest(inputs["shards"]))


def test_models_of_other_windows_are_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    longer = LAYOUT.model_copy(update={"canvases_per_window": 5})
    manifest = read_manifest(inputs["shards"])
    other = save_model(tmp_path, "diffusion", SHAPE, longer, manifest)
    with pytest.raises(InputError, match="windows of 16 tokens"):
        judge(inputs, tmp_path / "out", diffusion=other)
