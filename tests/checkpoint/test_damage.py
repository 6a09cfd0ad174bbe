"""Is a checkpoint that is not whole, or not this run's, refused and passed over?"""

import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import canvaslm.checkpoint as room
from canvaslm.checkpoint import (
    export_checkpoint,
    load_model,
    restore,
)
from canvaslm.checkpoint_state import read_state
from canvaslm.errors import InputError
from checkpoints import FILES, IDENTITY, flip_a_byte, latest_complete, make_pair, save, tensors_of

DAMAGES = {
    "a flipped bit in a weight": lambda d: flip_a_byte(d / "model.safetensors"),
    "a flipped bit in a moment": lambda d: flip_a_byte(d / "optimizer.safetensors"),
    "a missing model": lambda d: (d / "model.safetensors").unlink(),
    "a missing optimiser": lambda d: (d / "optimizer.safetensors").unlink(),
    "a missing state": lambda d: (d / "state.json").unlink(),
    "a cut model": lambda d: os.truncate(d / "model.safetensors", 100),
    "an empty state": lambda d: (d / "state.json").write_text(""),
    "a state that is a list": lambda d: (d / "state.json").write_text("[]"),
    "another format": lambda d: vouch_for(d, format=99),
    "a flipped bit in the state": lambda d: replace_in_state(d, '"step": 8', '"step": 9'),
    "a flipped bit in the identity": lambda d: replace_in_state(d, '"code": "c"', '"code": "b"'),
    "another number": lambda d: shutil.copytree(
        d.with_name("step_00000004"), d, dirs_exist_ok=True
    ),
    "steps that are not its windows": lambda d: vouch_for(d, progress=progress_of(8, windows=28)),
    "windows that are not its tokens": lambda d: vouch_for(d, progress=progress_of(8, tokens=1)),
    "windows without end": lambda d: vouch_for(d, progress=progress_of(8, windows=10**12)),
    "a number of too many digits": lambda d: replace_in_state(d, '"format": 3', f'"a": {10**4200}'),
    "an identity that nests without end": lambda d: vouch_for(
        d, code=json.loads("[" * 300 + "]" * 300)
    ),
}


def progress_of(step, *, windows=None, tokens=None):
    windows = 4 * step if windows is None else windows
    tokens = 16 * windows if tokens is None else tokens
    facts = {
        "windows_consumed": windows,
        "tokens": tokens,
        "flops": 0.5,
        "skipped": [],
        "rollbacks": [],
        "log_sha256": "",
    }
    return {"step": step} | facts


def replace_in_state(directory, old, new):
    text = (directory / "state.json").read_text()
    assert old in text
    (directory / "state.json").write_text(text.replace(old, new))


def vouch_for(directory, **changes):
    """Change the state and hash it again, as a careless tool would."""
    state = json.loads((directory / "state.json").read_text()) | changes
    del state["sha256"]
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (directory / "state.json").write_text(json.dumps(state | {"sha256": digest}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_refused_and_passed_over(tmp_path, pair, damage):
    """BR-41: the latest whole one is found with no manual step."""
    good, _ = save(tmp_path, pair, step=4)
    broken, _ = save(tmp_path, pair, step=8)
    DAMAGES[damage](broken)
    with pytest.raises(InputError, match="step_00000008"):
        load_model(broken)
    model, optimizer = make_pair(seed=2)
    before = {name: tensor.clone() for name, tensor in tensors_of(model, optimizer).items()}
    with pytest.raises(InputError, match="step_00000008"):
        restore(broken, model=model, optimizer=optimizer)
    for name, tensor in tensors_of(model, optimizer).items():
        assert torch.equal(before[name], tensor), name
    with pytest.raises(InputError, match="step_00000008"):
        export_checkpoint(broken, tmp_path / "out")
    assert latest_complete(tmp_path) == good
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["absent", "empty"])
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"expected a checkpoint with state\.json, got none"):
        load_model(tmp_path / place)


def rewrite(directory, name, change):
    """Change a tensor file and vouch for it again, as a careless tool would."""
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name)
    files = {file: room._sha256(directory / file) for file in FILES[:2]}
    vouch_for(directory, files=files)


FOREIGN = {
    "a missing tensor": (lambda t, key: t.pop(key), "missing"),
    "an unexpected tensor": (lambda t, key: t.update(extra=torch.zeros(1)), "unexpected"),
    "another shape": (lambda t, key: t.update({key: torch.zeros(3)}), r"got \(3,\)"),
    "another type": (lambda t, key: t.update({key: t[key].bfloat16()}), "bfloat16"),
    "a NaN": (lambda t, key: t[key].view(-1)[0].fill_(float("nan")), "finite values"),
}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("model.safetensors", "blocks.1.attention.key.bias"),
        ("optimizer.safetensors", "exp_avg_sq/blocks.1.attention.key.bias"),
    ],
)
@pytest.mark.parametrize("kind", FOREIGN)
def test_tensors_of_another_model_are_refused_by_name(saved, file, key, kind):
    """BR-43, BR-52: no tolerant loading and no repair."""
    change, told = FOREIGN[kind]
    rewrite(saved, file, lambda tensors: change(tensors, key))
    model, optimizer = make_pair(seed=2)
    with pytest.raises(InputError, match=told):
        restore(saved, model=model, optimizer=optimizer)
    if file == "model.safetensors":
        with pytest.raises(InputError, match=told):
            load_model(saved)


@pytest.mark.parametrize("key", ["identity", "files", "progress", "format", "sha256"])
@pytest.mark.parametrize("value", [None, {}, [], "text", 7, -1, True, 10**30])
def test_a_state_of_another_shape_is_refused(saved, key, value):
    vouch_for(saved, **({key: value} if key != "sha256" else {}))
    if key == "sha256":
        state = json.loads((saved / "state.json").read_text())
        (saved / "state.json").write_text(json.dumps(state | {"sha256": value}))
    told = "sha256 text" if (key, value) == ("sha256", "text") else "the state of a checkpoint"
    with pytest.raises(InputError, match=rf"state\.json: expected {told}"):
        read_state(saved)


@pytest.mark.parametrize("key", sorted(IDENTITY))
@pytest.mark.parametrize("value", [None, {}, "text"])
def test_an_identity_of_another_shape_is_refused(saved, key, value):
    if (key, value) in (("diffusion", None), ("parent", None), ("code", "text")):
        return
    vouch_for(saved, identity=IDENTITY | {key: value})
    with pytest.raises(InputError, match=rf"state\.json: .*identity\.{key}"):
        read_state(saved)


@pytest.mark.parametrize("key", ["n_layers", "width", "ffn_width", "vocab_multiple"])
def test_a_model_that_its_file_cannot_hold_is_refused_before_it_takes_memory(saved, key):
    model = IDENTITY["model"] | {key: 10**12}
    vouch_for(saved, identity=IDENTITY | {"model": model})
    with pytest.raises(InputError, match=r"model\.safetensors: expected \d{13,} parameters, got"):
        load_model(saved)


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path, pair, caplog):
    """Also where all else holds, as when it was copied there by hand."""
    own, _ = save(tmp_path, pair, step=4)
    other = IDENTITY | {"pretrain": IDENTITY["pretrain"] | {"learning_rate": 0.02}}
    foreign, _ = save(tmp_path, pair, step=8, identity=other)
    assert latest_complete(tmp_path) == own
    assert f"passed over: {foreign}/state.json:identity: expected a checkpoint of this run" in (
        caplog.text
    )
    assert "pretrain.learning_rate: 0.02 -> 0.01" in caplog.text
    assert ["pretrain.learning_rate", "0.02", "0.01"] in [
        line.split() for line in caplog.text.splitlines()
    ]
