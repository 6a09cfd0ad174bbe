"""Finished runs of a few steps, trained once, and opened anew for each test."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvaslm.layout import Layout
from canvaslm.params import read_yaml
from canvaslm.reporting.files import write_json
from canvaslm.reporting.progress import untracked
from canvaslm.run_audit.check import Check
from canvaslm.run_audit.params import AuditRunParams
from canvaslm.run_audit.subject import Subject, open_subject
from canvaslm.training.job import make_job
from canvaslm.training.plan import PretrainParams, Recipe, recipe
from canvaslm.training.run import pretrain
from shapes import tiny_diffusion, tiny_shape

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout(canvas_tokens=4, canvases_per_window=4, vocab_size=37)
KNOBS: dict[str, Any] = {
    "device": "cpu", "seed": 3, "steps": 12, "windows_per_step": 4, "micro_batch_windows": 4,
    "optimizer": "adamw", "learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 3,
    "decay_steps": 0, "vocab_chunk": 16, "log_every": 2, "save_every": 6, "loader_workers": 0,
}  # fmt: skip
BASE = read_yaml(ROOT / "configs" / "base.yaml")
SIZES = ("width", "n_layers", "n_heads", "n_kv_heads", "head_width", "ffn_width", "time_width")
KINDS: dict[str, dict[str, Any]] = {
    "default": {"model": {key: x for key, x in BASE["model"].items() if key not in SIZES},
                "diffusion": BASE["diffusion"] | {"train_times": 4},
                "pretrain": {key: BASE["pretrain"][key] for key in ("optimizer", "ema_decay")}},
    "diffusion": {},
    "prefix": {"model": {"clean_mask": "block", "self_conditioning": "input"},
               "diffusion": {"context": "prefix"}},
    "autoregressive": {},
    "phased": {"model": {"tied": False, "self_conditioning_form": "gated"},
               "diffusion": {"first_phase": "next_token", "first_phase_share": 0.5,
                             "next_token_weight": 0.5, "time_draw": "spread",
                             "train_times": None}},
    "biased": {"model": {"likelihood_bias": True},
               "diffusion": {"first_phase": "noisy", "first_phase_share": 0.5,
                             "loss": "changed"}},
    "previous": {"model": {"likelihood_bias": True, "noisy_input": "previous", "token_shift": True,
                           "tilt": 2.0},
                 "diffusion": {"next_token_weight": 1.0}},
    "single": {"layout": Layout(canvas_tokens=1, canvases_per_window=LAYOUT.window_tokens,
                                vocab_size=LAYOUT.vocab_size),
               "model": {"likelihood_bias": True, "noisy_input": "previous", "tilt": 2.0}},
    "bound": {"model": {"tilt": 1.0}, "diffusion": {"loss": "bound", "time_draw": "middle"}},
    "muon": {"pretrain": {"optimizer": "muon", "muon_learning_rate": 0.02, "ema_decay": 0.6}},
}  # fmt: skip

Open = Callable[[str], Subject]


def make_recipe(kind: str) -> Recipe:
    """The tiny recipe of a kind of run."""
    changes = KINDS[kind]
    return recipe(
        "autoregressive" if kind == "autoregressive" else "diffusion",
        layout=changes.get("layout", LAYOUT),
        model=tiny_shape(**changes.get("model", {})),
        diffusion=tiny_diffusion(**changes.get("diffusion", {})),
        pretrain=PretrainParams(**(BASE["pretrain"] | KNOBS | changes.get("pretrain", {}))),
    )


def write_shards(place: Path) -> Path:
    """Twenty training windows and eight held-out ones of ids that follow each other by a rule."""
    rng, splits = np.random.default_rng(0), {}
    for split, n_windows in (("train", 20), ("val", 8)):
        ids = rng.integers(0, LAYOUT.vocab_size, n_windows * LAYOUT.window_tokens)
        ids[1::2] = (ids[::2] * 3 + 1) % LAYOUT.vocab_size
        file = place / split / "shard_00000.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(ids.astype("<u2").tobytes())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        facts = {"file": f"{split}/shard_00000.bin", "tokens": len(ids), "documents": 1}
        splits[split] = [facts | {"text_bytes": len(ids), "sha256": digest}]
    token_bytes = place / "token_bytes.bin"
    token_bytes.write_bytes(np.full(LAYOUT.vocab_size, 2, "<u4").tobytes())
    manifest = {
        "format_version": 1,
        "dtype": "uint16",
        "vocab_size": LAYOUT.vocab_size,
        "eot_id": 0,
        "tokenizer_sha256": "t",
        "documents_sha256": "d",
        "token_bytes_sha256": hashlib.sha256(token_bytes.read_bytes()).hexdigest(),
        "splits": splits,
    }
    write_json(place / "manifest.json", manifest)
    return place


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run of a kind, trained when it is first asked for."""
    root = tmp_path_factory.mktemp("finished")
    shards, done = write_shards(root / "shards"), set()

    def finish(kind: str) -> Path:
        if kind not in done:
            job = make_job(make_recipe(kind), shards=shards, code_digest="c")
            pretrain(
                job,
                work=root / "work",
                out=root / kind / "checkpoint",
                reports=root / kind / "reports",
                track=untracked,
            )
            write_json(root / kind / "corpus.json", {"entropy_rate_nats_per_byte": "not_measured"})
            done.add(kind)
        return root / kind

    return finish


@pytest.fixture
def open_run(finished_runs: Callable[[str], Path]) -> Open:
    """``open_run("diffusion")``: a finished run, open for one test."""
    params = AuditRunParams(
        seed=5,
        device="cpu",
        n_windows=4,
        max_held_out_windows=8,
        overfit_steps=4,
        overfit_nats=0.1,
        overfit_learning_rate=0.01,
    )

    def open_one(kind: str) -> Subject:
        run = finished_runs(kind)
        return open_subject(
            make_recipe(kind),
            params=params,
            checkpoint=run / "checkpoint",
            shards=run.parent / "shards",
            tokenizer=run / "no_tokenizer.json",
            reports=run / "reports",
            corpus_metrics=run / "corpus.json",
            code_digest="c",
            track=untracked,
        )

    return open_one


@pytest.fixture
def failures() -> Callable[[list[Check]], list[str]]:
    """Names of the checks that failed, in the order of the walk."""

    def names(checks: list[Check]) -> list[str]:
        return [check.name for check in checks if check.verdict == "fail"]

    return names
