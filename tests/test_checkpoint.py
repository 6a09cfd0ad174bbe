"""Does a checkpoint come back as exactly what it was, or not at all?"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import canvaslm.checkpoint as room
from canvaslm.checkpoint import (
    export_checkpoint,
    is_finite,
    load_model,
    load_trained_model,
    refuse_to_replace,
    restore,
    save_checkpoint,
)
from canvaslm.checkpoint_state import Progress, SkippedStep, read_state
from canvaslm.errors import GateClosedError, InputError
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.params import load_section
from canvaslm.training.optimizer import make_optimizer
from canvaslm.training.plan import PretrainParams
from shapes import tiny_diffusion, tiny_shape

LAYOUT = Layout(canvas_tokens=4, canvases_per_window=4, vocab_size=37)
MODEL = tiny_shape()
IDENTITY = {
    "objective": "diffusion",
    "model": MODEL.model_dump(),
    "layout": LAYOUT.model_dump(),
    "diffusion": tiny_diffusion().model_dump(),
    "pretrain": {
        "steps": 10**9,
        "windows_per_step": 4,
        "learning_rate": 0.01,
        "ema_decay": 0.0,
    },
    "data": {"manifest_sha256": "m", "tokenizer_sha256": "t", "eot_id": 0, "shards": {}},
    "code": "c",
    "parent": None,
}
SKIPPED = SkippedStep(step=2, first_window=8, last_window=11, cause="loss is nan")
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def make_pair(seed: int = 1):
    """A model and its AdamW after two steps on made-up gradients."""
    model = Backbone(MODEL, LAYOUT)
    initialise(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def latest_complete(root):
    return room.latest_complete(root, identity=IDENTITY)


def save(root, pair, step=4, keep_last=None, identity=IDENTITY, **options):
    progress = Progress(
        step=step,
        windows_consumed=4 * step,
        tokens=64 * step,
        flops=0.1 * step,
        skipped=(SKIPPED,) if step > SKIPPED.step else (),
        rollbacks=(),
        log_sha256="",
    )
    model, optimizer = pair
    directory = save_checkpoint(
        root,
        model=model,
        optimizer=optimizer,
        progress=progress,
        identity=identity,
        keep_last=keep_last,
        **options,
    )
    return directory, progress


def tensors_of(model, optimizer) -> dict[str, Tensor]:
    named = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        named |= {f"{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    return named


def contents(directory):
    return {name: (directory / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture
def pretrain_params():
    """The committed knobs, with AdamW for all parameters."""
    params = load_section(Path(__file__).parents[1] / "params.yaml", "pretrain", PretrainParams)
    return params.model_copy(update={"optimizer": "adamw"})


@pytest.fixture
def saved(tmp_path, pair):
    return save(tmp_path / "run", pair)[0]


def test_everything_comes_back_bit_for_bit(tmp_path, pair):
    """BR-38: value, type and device of every tensor, and the progress with its skip list."""
    directory, progress = save(tmp_path, pair)
    model, optimizer = make_pair(seed=2)
    assert restore(directory, model=model, optimizer=optimizer) == progress
    expected, got = tensors_of(*pair), tensors_of(model, optimizer)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
        assert (got[name].dtype, got[name].device) == (tensor.dtype, tensor.device), name


def test_next_update_after_restoring_is_the_same(saved, pair):
    """BR-38: of the one kind of AdamW that there is, the fused one."""
    model, optimizer = make_pair(seed=2)
    restore(saved, model=model, optimizer=optimizer)
    twin = make_pair()
    for either, adamw in ((model, optimizer), twin):
        for parameter in either.parameters():
            parameter.grad = torch.ones_like(parameter)
        adamw.step()
    for name, tensor in tensors_of(*twin).items():
        assert torch.equal(tensors_of(model, optimizer)[name], tensor), name


def test_state_is_matched_by_name_and_not_by_position(saved, pair):
    """BR-39: an optimiser that lists its parameters backwards gets each its own moments."""
    model, _ = make_pair(seed=2)
    backwards = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.01, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    backwards.step()
    restore(saved, model=model, optimizer=backwards)
    for name, tensor in tensors_of(*pair).items():
        assert torch.equal(tensors_of(model, backwards)[name], tensor), name


def test_state_stays_with_its_parameter_where_another_rule_groups_them(tmp_path, pretrain_params):
    """BR-39: saved when matrices decay, loaded where everything but matrices does."""
    model = Backbone(MODEL, LAYOUT)
    initialise(model, 1)
    optimizer = make_optimizer(model, pretrain_params)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    directory, _ = save(tmp_path, (model, optimizer))
    other, _ = make_pair(seed=2)
    matrices = [parameter for parameter in other.parameters() if parameter.ndim >= 2]
    rest = [parameter for parameter in other.parameters() if parameter.ndim < 2]
    groups = [{"params": rest[::-1], "weight_decay": 0.3}, {"params": matrices, "weight_decay": 0}]
    regrouped = torch.optim.AdamW(groups, lr=0.01, fused=True)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    regrouped.step()
    restore(directory, model=other, optimizer=regrouped)
    for name, tensor in tensors_of(model, optimizer).items():
        assert torch.equal(tensors_of(other, regrouped)[name], tensor), name
    assert [group["weight_decay"] for group in regrouped.param_groups] == [0.3, 0]


def test_a_checkpoint_is_of_its_moment_and_not_of_the_present(tmp_path):
    """BR-49: three more updates leave it as it was, and going back undoes them."""
    model, optimizer = make_pair()
    directory, progress = save(tmp_path, (model, optimizer))
    then = {name: tensor.clone() for name, tensor in tensors_of(model, optimizer).items()}
    before = contents(directory)
    for _ in range(3):
        optimizer.step()
    assert contents(directory) == before
    assert not torch.equal(model.embedding.weight, then["embedding.weight"])
    assert restore(directory, model=model, optimizer=optimizer) == progress
    for name, tensor in tensors_of(model, optimizer).items():
        assert torch.equal(then[name], tensor), name


def with_average(pair):
    """The pair with an average beside each weight, which is another number."""
    model, optimizer = pair
    for parameter in model.parameters():
        optimizer.state[parameter]["ema"] = parameter.detach() * 0.5 + 1
    return model, optimizer


AVERAGED = IDENTITY | {"pretrain": IDENTITY["pretrain"] | {"ema_decay": 0.9}}


def test_what_is_judged_is_the_average_where_the_run_kept_one(tmp_path):
    model, optimizer = with_average(make_pair())
    saved, _ = save(tmp_path, (model, optimizer), identity=AVERAGED)
    judged, trained = load_model(saved), load_trained_model(saved)
    for name, weight in model.named_parameters():
        assert torch.equal(judged.get_parameter(name), weight * 0.5 + 1), name
        assert torch.equal(trained.get_parameter(name), weight), name
    assert judged.head_weight.data_ptr() == judged.embedding.weight.data_ptr()
    assert not judged.training
    assert all(parameter.requires_grad for parameter in judged.parameters())


def test_without_an_average_the_trained_weights_are_judged(saved, pair):
    for name, weight in pair[0].named_parameters():
        assert torch.equal(load_model(saved).get_parameter(name), weight), name


def test_an_average_that_is_missing_is_refused_and_not_replaced(tmp_path):
    saved, _ = save(tmp_path, make_pair(), identity=AVERAGED)
    with pytest.raises(InputError, match=r"missing .*ema/embedding\.weight"):
        load_model(saved)
    load_trained_model(saved)


def test_an_optimiser_without_a_place_for_the_average_is_refused(tmp_path):
    saved, _ = save(tmp_path, with_average(make_pair()), identity=AVERAGED)
    model, optimizer = make_pair()
    with pytest.raises(InputError, match=r"unexpected .*ema/embedding\.weight"):
        restore(saved, model=model, optimizer=optimizer)


def test_a_parameter_without_state_is_never_saved(tmp_path):
    model, optimizer = make_pair()
    del optimizer.state[model.embedding.weight]
    with pytest.raises(AssertionError, match=r"embedding\.weight has no state yet"):
        save(tmp_path, (model, optimizer))


def test_equal_state_gives_equal_bytes(tmp_path):
    first, _ = save(tmp_path / "first", make_pair())
    second, _ = save(tmp_path / "second", make_pair())
    assert contents(first) == contents(second)


def test_the_model_loads_ready_for_use_with_its_head_tied(saved, pair):
    """BR-44: the table is stored once, and head and table share storage after loading."""
    model = load_model(saved)
    assert not model.training
    assert (model.params, model.layout) == (MODEL, LAYOUT)
    assert model.head_weight.data_ptr() == model.embedding.weight.data_ptr()
    assert not any("head" in name for name in load_file(saved / "model.safetensors"))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = pair[0].logits(pair[0].encode(ids).hidden)
        assert torch.equal(model.logits(model.encode(ids).hidden), expected)


def test_the_model_loads_in_a_new_process_that_forbids_pickle(tmp_path, saved, pair):
    """BR-44, BR-45: nothing unpickles; logits are equal, the head is tied, also after a step."""
    code = """
import pickle, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from canvaslm.checkpoint import load_model
def refuse(*args, **options): raise AssertionError("pickle")
known = pickle.load, pickle.loads, pickle.Unpickler
pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse
model = load_model(Path(sys.argv[1]))
pickle.load, pickle.loads, pickle.Unpickler = known
logits = lambda: model.logits(model.encode(torch.arange(8)[None]).hidden)
with torch.no_grad():
    found = {"loaded": logits()}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
logits().square().sum().backward()
optimizer.step()
assert model.head_weight.data_ptr() == model.embedding.weight.data_ptr()
assert "head" not in " ".join(model.state_dict())
found |= {"head": model.head_weight.detach().clone(), "table": model.embedding.weight.detach()}
save_file(found, sys.argv[2])
"""
    found = tmp_path / "found.safetensors"
    subprocess.run([sys.executable, "-c", code, str(saved), str(found)], check=True)
    tensors = load_file(found)
    model, _ = pair
    with torch.no_grad():
        expected = model.logits(model.encode(torch.arange(8)[None]).hidden)
    assert torch.equal(tensors["loaded"], expected)
    assert torch.equal(tensors["head"], tensors["table"][: len(tensors["head"])])
    assert not torch.equal(tensors["table"], model.embedding.weight)


def test_nothing_in_a_checkpoint_is_pickled(saved):
    """BR-45: three files, of which two are safetensors by their first bytes and one is JSON."""
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    for name in FILES[:2]:
        content = (saved / name).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert "__metadata__" not in header
        ends = [entry["data_offsets"][1] for entry in header.values()]
        assert 8 + int.from_bytes(content[:8], "little") + max(ends) == len(content)
    json.loads((saved / "state.json").read_text())


def test_checkpoints_are_ordered_by_number(tmp_path, pair):
    """BR-42: 10000 is newer than 9000, also where names are of different lengths."""
    for step in (10_000, 900, 9_000, 100_000_000, 99_999_999, 1_000):
        save(tmp_path, pair, step=step)
    assert latest_complete(tmp_path) == tmp_path / "step_100000000"
    for name in ("step_100000000", "step_99999999"):
        shutil.rmtree(tmp_path / name)
    assert latest_complete(tmp_path) == tmp_path / "step_00010000"


@pytest.mark.parametrize(("keep", "left"), [(2, [9_000, 10_000]), (1, [10_000]), (None, None)])
def test_only_the_last_ones_stay(tmp_path, pair, keep, left):
    """BR-42: 900, 1000, 9000, 10000; null keeps all four."""
    steps = [900, 1_000, 9_000, 10_000]
    for step in steps:
        save(tmp_path, pair, step=step, keep_last=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_{step:08d}" for step in left or steps
    ]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_no_choice(tmp_path, pair, keep):
    """BR-42: the knob refuses it, and so does what it turns; nothing is written or removed."""
    good, _ = save(tmp_path, pair)
    with pytest.raises(AssertionError, match="the newest one always stays"):
        save(tmp_path, pair, step=8, keep_last=keep)
    assert list(tmp_path.iterdir()) == [good]


def test_the_best_ones_stay_besides_the_last(tmp_path, pair):
    """BR-42: never deleted while they are the best, and none of a later step is looked at."""
    save(tmp_path, pair, step=20_000)
    asked = []
    for step, best in ((900, [900]), (1_000, [900]), (9_000, [900, 1_000]), (10_000, [1_000])):

        def best_of(saved, best=best):
            asked.append(list(saved))
            return best

        save(tmp_path, pair, step=step, keep_last=1, best_of=best_of)
    left = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.iterdir())
    assert left == [1_000, 10_000, 20_000]
    assert asked == [[900], [900, 1_000], [900, 1_000, 9_000], [900, 1_000, 9_000, 10_000]]


def test_the_room_that_is_asked_for_is_that_of_the_files(tmp_path, pair, monkeypatch):
    """Never less than they take, and a little more for what is not known before."""
    asked = []

    @contextmanager
    def note(place, sizes, *, what):
        del place, what
        asked.append(sizes)
        yield

    monkeypatch.setattr(room, "room_for", note)
    directory, _ = save(tmp_path, pair)
    export_checkpoint(directory, tmp_path / "out")
    taken = [(directory / name).stat().st_size for name in FILES]
    assert asked[1] == taken
    slack = [due - size for due, size in zip(asked[0], taken, strict=True)]
    assert all(0 <= more <= 128 * len(tensors_of(*pair)) for more in slack)
    assert slack[2] == 0, "the state is known to the byte"


def test_no_checkpoint_yet_is_none(tmp_path):
    assert latest_complete(tmp_path) is None
    assert latest_complete(tmp_path / "absent") is None


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


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


@pytest.mark.parametrize("where", ["weight", "exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_state_that_is_not_finite_is_never_saved(tmp_path, where, value):
    """BR-52: the save is refused and the earlier checkpoint is kept, whichever tensor it is."""
    model, optimizer = make_pair()
    good, _ = save(tmp_path, (model, optimizer), keep_last=1)
    bias = model.get_parameter("blocks.0.attention.key.bias")
    target = bias if where == "weight" else optimizer.state[bias][where]
    with torch.no_grad():
        target.view(-1)[0] = value
    name = "blocks.0.attention.key.bias"
    name = name if where == "weight" else f"{where}/{name}"
    with pytest.raises(GateClosedError, match=rf"pretrain: {re.escape(name)} is not finite"):
        save(tmp_path, (model, optimizer), step=8, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def fill_the_disk(monkeypatch, at):
    """Let the n-th flush to the disk fail, as on a full one."""
    calls = []
    real = os.fsync

    def fsync(handle):
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(room.os, "fsync", fsync)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_checkpoint_alone(tmp_path, pair, monkeypatch, at):
    """BR-41: whichever file the disk has no room for."""
    good, _ = save(tmp_path, pair, keep_last=1)
    before = contents(good)
    fill_the_disk(monkeypatch, at)
    with pytest.raises(InputError, match=r"expected \d+ bytes free for the checkpoint of step 8"):
        save(tmp_path, pair, step=8, keep_last=1)
    assert latest_complete(tmp_path) == good
    assert contents(good) == before
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_what_safetensors_cannot_write_is_an_os_error(tmp_path, pair):
    """A limit on file size stands for a full disk: the system refuses inside safetensors."""
    code = """
import resource, signal, sys
from pathlib import Path
from safetensors.torch import save_file
import torch
from canvaslm.checkpoint import _write_files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    _write_files(Path(sys.argv[1]), {"model.safetensors": {"w": torch.zeros(9999)}}, None, {})
except OSError as error:
    print(error.errno, error.filename)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == [str(errno.EFBIG), str(tmp_path / "model.safetensors")]


def test_a_broken_directory_of_the_same_step_gives_way(tmp_path, pair):
    broken, _ = save(tmp_path, pair)
    flip_a_byte(broken / "model.safetensors")
    save(tmp_path, pair)
    assert latest_complete(tmp_path) == broken


def test_an_export_is_the_checkpoint_and_replaces_what_stood_there(tmp_path, pair, saved):
    out = tmp_path / "checkpoints" / "diffusion"
    old, _ = save(tmp_path / "old", make_pair(seed=2))
    export_checkpoint(old, out)
    export_checkpoint(saved, out)
    assert contents(out) == contents(saved)
    assert [path.name for path in out.parent.iterdir()] == ["diffusion"]
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    load_model(out)


def test_the_state_tells_progress_identity_and_hashes(saved):
    state = read_state(saved)
    assert state.identity.model_dump(mode="json") == IDENTITY
    assert state.progress.skipped == (SKIPPED,)
    assert set(state.files) == {"model.safetensors", "optimizer.safetensors"}


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


def test_a_broken_checkpoint_of_a_later_step_pushes_no_whole_one_out(tmp_path, pair):
    broken, _ = save(tmp_path, pair, step=12)
    flip_a_byte(broken / "model.safetensors")
    directory, _ = save(tmp_path, pair, step=8, keep_last=1)
    assert latest_complete(tmp_path) == directory


def lay_files(*names):
    def lay(out):
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("mine")

    return lay


IN_THE_WAY = {
    "the user's files": lay_files("notes.txt"),
    "a folder of checkpoints": lay_files("diffusion/state.json"),
    "a part of a checkpoint": lay_files("state.json"),
    "a checkpoint and more": lay_files(*FILES, "notes.txt"),
    "folders of a checkpoint's names": lay_files(*(f"{name}/x" for name in FILES)),
    "a file": lambda out: out.write_text("mine"),
    "a link": lambda out: out.symlink_to(out.with_name("elsewhere"), target_is_directory=True),
}


@pytest.mark.parametrize("way", IN_THE_WAY)
def test_an_export_destroys_nothing_but_a_checkpoint(tmp_path, saved, way):
    out = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    IN_THE_WAY[way](out)
    before = sorted(tmp_path.rglob("*"))
    for refused in (refuse_to_replace, lambda out: export_checkpoint(saved, out)):
        with pytest.raises(InputError, match=f"^{out}: expected"):
            refused(out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("out", ["", ".", "..", "/", "a/.."])
def test_an_out_without_a_name_is_refused(out):
    with pytest.raises(InputError, match="expected a name for a directory, got none"):
        refuse_to_replace(Path(out))


def test_an_out_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="expected a directory, got a file; remove it"):
        refuse_to_replace(tmp_path / "file" / "a" / "out")


def test_an_out_that_is_free_or_holds_a_checkpoint_is_accepted(tmp_path, saved):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "absent" / "deep", tmp_path / "empty", saved):
        refuse_to_replace(out)


def test_a_checkpoint_that_is_replaced_under_our_eyes_is_still_one(tmp_path, saved, monkeypatch):
    out, gone = tmp_path / "out", tmp_path / "gone"
    shutil.copytree(saved, out)
    look = os.scandir

    def look_too_late(path):
        if path == out and not gone.exists():
            out.rename(gone)
            (gone / "state.json").unlink()
            shutil.copytree(saved, out)
            return look(gone)
        return look(path)

    monkeypatch.setattr(room.os, "scandir", look_too_late)
    refuse_to_replace(out)
    assert gone.exists(), "nobody looked"


def test_exports_to_one_place_at_once_leave_one_of_them_whole(tmp_path, saved):
    code = """
import sys
from pathlib import Path
from canvaslm.checkpoint import export_checkpoint
for _ in range(20):
    export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    other, _ = save(tmp_path / "other", make_pair(seed=2))
    out = tmp_path / "outs" / "diffusion"
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.Popen([*command, str(place), str(out)], stderr=subprocess.PIPE, text=True)
        for place in (saved, other)
    ]
    for run in runs:
        told = run.communicate(timeout=100)[1]
        assert run.returncode == 0, told
    assert contents(out) in (contents(saved), contents(other))
    assert [path.name for path in out.parent.iterdir()] == ["diffusion"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_value_that_is_not_finite_is_seen_wherever_it_stands(bad, dtype):
    largest = torch.finfo(dtype).max
    for place in (0, 17, 99):
        tensor = torch.full((100,), largest, dtype=dtype)
        tensor[50] = -largest
        assert is_finite(tensor.view(4, 25).T)
        tensor[place] = bad
        assert not is_finite(tensor.view(4, 25).T)
    assert not is_finite(torch.tensor(bad, dtype=dtype))
