"""Does a checkpoint come back as exactly what it was?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from canvaslm.checkpoint import (
    load_model,
    load_trained_model,
    restore,
)
from canvaslm.checkpoint_state import read_state
from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.params import load_section
from canvaslm.training.optimizer import make_optimizer
from canvaslm.training.plan import PretrainParams
from checkpoints import (
    FILES,
    IDENTITY,
    LAYOUT,
    MODEL,
    SKIPPED,
    contents,
    make_pair,
    save,
    tensors_of,
)


@pytest.fixture
def pretrain_params():
    """The committed knobs, with AdamW for all parameters."""
    params = load_section(Path(__file__).parents[2] / "params.yaml", "pretrain", PretrainParams)
    return params.model_copy(update={"optimizer": "adamw"})


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


def test_the_state_tells_progress_identity_and_hashes(saved):
    state = read_state(saved)
    assert state.identity.model_dump(mode="json") == IDENTITY
    assert state.progress.skipped == (SKIPPED,)
    assert set(state.files) == {"model.safetensors", "optimizer.safetensors"}
