"""Which changes make another run, and which go on with the same one?"""

import json

import pytest

from canvaslm.layout import Layout
from canvaslm.training.identity import identity_name, run_identity


def name(recipe, **changes):
    facts = {
        "manifest_sha256": "m",
        "tokenizer_sha256": "t",
        "eot_id": 0,
        "shards": {},
        "code_digest": "c",
        "parent": None,
    }
    return identity_name(run_identity(recipe, **(facts | changes)))


@pytest.mark.parametrize(
    "change",
    [
        {"log_every": 7},
        {"save_every": 7},
        {"trace_steps": 0},
        {"keep_last": None},
        {"keep_best": 3},
        {"loader_workers": 2},
        {"device": "auto"},
        {"max_rollbacks": 9},
        {"micro_batch_windows": 4},
        {"compile": True},
        {"gradient_checkpointing": True},
        {"vocab_chunk": 37},
    ],
)
def test_cadence_place_and_the_way_of_computing_are_not_identity(tiny_recipe, change):
    assert name(tiny_recipe(**change)) == name(tiny_recipe())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"steps": 16},
        {"learning_rate": 0.02},
        {"optimizer": "muon"},
        {"muon_learning_rate": 0.01},
        {"muon_momentum": 0.95},
        {"ema_decay": 0.9},
        {"schedule": "warmup_stable_decay"},
        {"precision": "bfloat16"},
        {"max_consecutive_bad_steps": 9},  # it decides which steps are marked
        {"weight_decay": 0.0},
        {"model": {"width": 32}},
        {"diffusion": {"train_times": 8}},
    ],
)
def test_whatever_decides_the_weights_is_identity(tiny_recipe, change):
    assert name(tiny_recipe(**change)) != name(tiny_recipe())


@pytest.mark.parametrize(
    "change",
    [{"manifest_sha256": "x"}, {"tokenizer_sha256": "x"}, {"eot_id": 1}, {"code_digest": "x"}],
)
def test_data_and_code_are_identity(tiny_recipe, change):
    assert name(tiny_recipe(), **change) != name(tiny_recipe())


def test_only_what_reaches_the_twin_is_in_its_identity(tiny_recipe):
    """Another cut into canvases, noise or guess leaves the twin the run that it was."""
    other_cut = Layout(canvas_tokens=8, canvases_per_window=2, vocab_size=37)
    same = tiny_recipe(
        "autoregressive",
        layout=other_cut,
        diffusion={"train_times": 16, "context": "noisy"},
        model={"self_conditioning": "input", "time_width": 16, "clean_mask": "block"},
    )
    twin = tiny_recipe("autoregressive")
    assert name(same) == name(twin)
    longer = Layout(canvas_tokens=4, canvases_per_window=5, vocab_size=37)
    assert name(tiny_recipe("autoregressive", layout=longer)) != name(twin)


def test_the_two_objectives_are_two_runs(tiny_recipe):
    assert name(tiny_recipe("autoregressive")) != name(tiny_recipe("diffusion"))


def test_an_identity_survives_strict_json(tiny_recipe):
    identity = run_identity(
        tiny_recipe(),
        manifest_sha256="m",
        tokenizer_sha256="t",
        eot_id=0,
        shards={},
        code_digest="c",
        parent=None,
    )
    again = json.loads(json.dumps(identity, allow_nan=False))
    assert again == identity
    assert identity_name(again) == identity_name(identity)
