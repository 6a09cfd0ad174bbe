"""Does a trace name the place where a step stopped being finite, and leave no trace of itself?"""

import csv
import functools
import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from canvaslm.errors import InputError
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.objective.targets import LossSum
from canvaslm.randomness import stream
from canvaslm.training import trace_ring
from canvaslm.training.learner import Learner
from canvaslm.training.trace_values import sample, summarise

SVG = "{http://www.w3.org/2000/svg}"
CPU = torch.device("cpu")
NUMBERS = np.arange(12, 16)  # of step 3; micro-batches of two: 12 and 13, 14 and 15


class Scaled:
    """An objective whose nats are multiplied by a factor on some window numbers."""

    def __init__(self, inner, factors):
        self.inner = inner
        self.factors = factors

    def loss(self, model, windows, numbers):
        loss = self.inner.loss(model, windows, numbers)
        factor = math.prod(self.factors.get(int(number), 1.0) for number in numbers)
        return LossSum(nats=loss.nats * factor, n_targets=loss.n_targets)

    def flops_of_first(self, params, n_windows):
        return self.inner.flops_of_first(params, n_windows)


class Spoilt(Scaled):
    """An objective that reads a token of a bad window, so that only this window's rows are NaN."""

    def loss(self, model, windows, numbers):
        rows = np.isin(numbers, list(self.factors))

        def spoil(module, inputs, output):
            if len(output) == len(rows) and output.ndim == 3:
                return output.masked_fill(torch.from_numpy(rows)[:, None, None], math.nan)
            return None

        handle = model.blocks[0].feed_forward.register_forward_hook(spoil)
        try:
            return self.inner.loss(model, windows, numbers)
        finally:
            handle.remove()


class Emptied(Scaled):
    """An objective whose bad windows have NaN nats and no target."""

    def loss(self, model, windows, numbers):
        loss = self.inner.loss(model, windows, numbers)
        if not np.isin(numbers, list(self.factors)).any():
            return loss
        return LossSum(nats=loss.nats * math.nan, n_targets=0)


def make_learner(recipe, wrap=lambda objective: objective):
    if recipe.diffusion is None:
        objective = NextToken(layout=recipe.layout, eot_id=0, vocab_chunk=16)
    else:
        objective = Denoising(
            layout=recipe.layout, diffusion=recipe.diffusion, seed=3, vocab_chunk=16
        )
    return Learner(recipe, wrap(objective), CPU)


def train(learner, windows, steps):
    for step in steps:
        numbers = np.arange(4 * step, 4 * step + 4)
        assert learner.take_step(step, windows[:4], numbers).cause == ""


def explain(recipe, windows, plant=lambda learner: None, wrap=lambda objective: objective):
    """Three good steps, then a fault, a bad step 3, and what is said of it."""
    learner = make_learner(recipe, wrap)
    train(learner, windows, range(3))
    plant(learner)
    record = learner.take_step(3, windows[4:8], NUMBERS)
    trace = learner.explain(3, windows[4:8], NUMBERS)
    assert record.cause == trace.cause != ""
    assert (trace.step, trace.first_window, trace.last_window) == (3, 12, 15)
    return trace


def spoil_weight(learner):
    with torch.no_grad():
        learner.model.blocks[0].attention.query.weight[0, 0] = math.nan


def spoil_activation(learner):
    learner.model.blocks[0].feed_forward.gate.register_forward_hook(
        lambda module, inputs, output: output * math.inf
    )


def spoil_gradient_of_output(learner):
    def spoil(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.nan)

    learner.model.blocks[1].feed_forward.register_forward_hook(spoil)


def spoil_gradient_of_parameter(learner):
    learner.model.blocks[1].attention.key.weight.register_hook(lambda gradient: gradient * math.inf)


def overflow(learner):
    """1e21 · 1e21 between two layers of finite output: out of range in bfloat16 and in float32."""
    with torch.no_grad():
        learner.model.blocks[0].feed_forward.gate.weight.mul_(1e21)
        learner.model.blocks[0].feed_forward.up.weight.mul_(1e21)


PLANTED = {
    "weight": (
        spoil_weight,
        "before the step, parameter blocks.0.attention.query.weight was not finite (1 of 256 ",
        "the first to show it is the output of blocks.0.attention.query in the clean stream, "
        "micro-batch 0 (windows 12, 13)",
    ),
    "activation": (
        spoil_activation,
        "the output of blocks.0.feed_forward.gate in the clean stream, micro-batch 0 ",
        "its input was finite, absolute maximum ",
    ),
    "overflow": (
        overflow,
        "the input of blocks.0.feed_forward.down in the clean stream, micro-batch 0 ",
        "it was computed there, as the output of blocks.0.feed_forward.up in the clean stream was "
        "finite (absolute maximum ",
    ),
    "gradient of a parameter": (
        spoil_gradient_of_parameter,
        "the gradient of parameter blocks.1.attention.key.weight, micro-batch 0 (windows 12, 13)",
        " was finite (absolute maximum ",
    ),
}


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
@pytest.mark.parametrize("name", list(PLANTED))
def test_the_first_place_is_where_the_fault_was_planted(tiny_recipe, windows, kind, name):
    plant, *expected = PLANTED[name]
    trace = explain(tiny_recipe(kind), windows, plant)
    for words in expected:
        assert words in trace.first_place
    assert trace.micro_batch == 0


@pytest.mark.parametrize(("kind", "stream"), [("diffusion", "noisy"), ("autoregressive", "clean")])
def test_a_gradient_is_named_by_the_first_module_on_the_way_back(
    tiny_recipe, windows, kind, stream
):
    """Of two streams, the backward pass comes through the noisy one first."""
    trace = explain(tiny_recipe(kind), windows, spoil_gradient_of_output)
    assert trace.first_place.startswith(
        f"the gradient of the output of blocks.1.feed_forward in the {stream} stream, micro-batch 0"
    )
    assert "all outputs and the loss were finite" in trace.first_place
    assert trace.cause == "gradient norm is nan"


def test_an_overflow_is_found_in_bfloat16_too(tiny_recipe, windows):
    trace = explain(tiny_recipe(precision="bfloat16"), windows, overflow)
    assert trace.first_place.startswith("the input of blocks.0.feed_forward.down in the clean ")


@pytest.mark.parametrize(
    ("optimizer", "moment", "n_spoilt"),
    [("adamw", "exp_avg", 1), ("muon", "momentum_buffer", 384)],  # one value spoils a whole matrix
)
def test_a_moment_that_is_not_finite_is_found_behind_the_weight_that_it_spoilt(
    tiny_recipe, windows, optimizer, moment, n_spoilt
):
    """The step with the moment still runs; the next has NaN in a weight, and in its average."""
    learner = make_learner(tiny_recipe(optimizer=optimizer, ema_decay=0.9))
    train(learner, windows, range(2))
    up = learner.model.get_parameter("blocks.0.feed_forward.up.weight")
    learner.optimizer.state[up][moment][1, 1] = math.nan
    train(learner, windows, [2])
    learner.take_step(3, windows[4:8], NUMBERS)
    words = learner.explain(3, windows[4:8], NUMBERS).first_place
    name = "parameter blocks.0.feed_forward.up.weight was not finite"
    assert f"before the step, {name} ({n_spoilt} of 384 " in words
    assert f"{moment} of {name} (1 of 384" in words
    assert f"ema of {name} ({n_spoilt} of 384 " in words


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_loss_alone_is_named_with_its_micro_batch_and_window(tiny_recipe, windows, kind):
    trace = explain(
        tiny_recipe(kind), windows, wrap=functools.partial(Scaled, factors={14: math.nan})
    )
    assert trace.first_place.startswith("the loss of micro-batch 1 (windows 14, 15), though every")
    assert trace.micro_batch == 1
    assert trace.alone == ((14, "loss is nan"),)
    assert trace.alone_in_words == (
        "loss is nan with window 14 alone, of 2 windows of micro-batch 1"
    )


def test_an_overflow_of_the_norm_alone_names_the_largest_gradient(tiny_recipe, windows):
    """Every value is finite, as after a factor of 1e30, and their squares are not."""
    trace = explain(tiny_recipe(), windows, wrap=functools.partial(Scaled, factors={14: 1e30}))
    assert trace.cause == "gradient norm is inf"
    assert trace.first_place.startswith("the norm of the gradient: every value is finite and ")
    assert (trace.micro_batch, trace.alone) == (1, ((14, "gradient norm is inf"),))
    assert all(each.values.n_nonfinite == 0 for each in trace.tensors)


@pytest.mark.parametrize("number", [12, 13, 14, 15])
def test_rows_are_told_as_windows_also_in_the_first_pass(tiny_recipe, windows, number):
    """The first pass of self-conditioning has only some rows: its NaN is still that window's."""
    trace = explain(tiny_recipe(), windows, wrap=functools.partial(Spoilt, factors={number: 1}))
    assert trace.first_place.startswith(
        "the output of blocks.0 in the clean stream, "
        f"micro-batch {(number - 12) // 2} (window {number}): "
    )
    assert trace.alone == ((number, "loss is nan"),)
    bad = [each for each in trace.tensors if each.values.n_nonfinite and each.stream == "first"]
    assert {each.windows for each in bad} <= {(number,)}


def test_a_first_pass_of_some_rows_maps_them_to_their_windows(tiny_recipe, windows):
    """Some micro-batch of twenty has a row with a guess and one without."""
    recipe = tiny_recipe(windows_per_step=4, micro_batch_windows=4)
    learner = make_learner(recipe, functools.partial(Spoilt, factors=dict.fromkeys(range(20), 1)))
    seen = set()
    for step in range(5):
        numbers = np.arange(4 * step, 4 * step + 4)
        trace = learner.explain(step, windows[:4], numbers)
        first = [each for each in trace.tensors if each.stream == "first"]
        rows = {each.windows for each in first if each.module == "(denoise)"}
        noisy = {each.windows for each in trace.tensors if each.module == "(denoise)"}
        assert tuple(numbers.tolist()) in noisy
        seen |= rows
    drawn = [number for group in seen for number in group]
    due = [n for n in range(20) if stream(3, "self_conditioning", n).random() < 0.5]
    assert sorted(drawn) == due
    assert 0 < len(drawn) < 20


def test_a_micro_batch_without_targets_is_blamed_for_nothing(tiny_recipe, windows):
    """BR-22c: a whole step without targets is no NaN event, and has no place to name."""
    learner = make_learner(
        tiny_recipe(), functools.partial(Emptied, factors=dict.fromkeys(range(12, 16), 1))
    )
    assert learner.take_step(3, windows[4:8], NUMBERS).cause == "no targets"
    trace = learner.explain(3, windows[4:8], NUMBERS)
    assert (trace.cause, trace.micro_batch, trace.alone) == ("no targets", None, ())
    assert trace.first_place == "no tensor of the passes: no targets"


def test_a_fault_that_does_not_come_back_is_told_as_such(tiny_recipe, windows):
    learner = make_learner(tiny_recipe())
    train(learner, windows, range(3))
    trace = learner.explain(3, windows[4:8], NUMBERS)
    assert (trace.cause, trace.micro_batch, trace.alone) == ("", None, ())
    assert trace.first_place.startswith("run again, the step is finite")


def everything(learner):
    """All that a later step could depend on, to the bit."""
    model, optimizer = learner.model, learner.optimizer
    state = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state[f"gradient {name}"] = parameter.grad.clone()
        for key, value in optimizer.state[parameter].items():
            state[f"{key} {name}"] = value.clone()
    state["global generator"] = torch.get_rng_state()
    return state


def hooks_of(model):
    return {
        name: (len(module._forward_hooks), len(module._backward_hooks), module.training)
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_an_explanation_changes_no_bit(tiny_recipe, windows, kind, checkpointing):
    """State, methods and hooks are as before, and the steps after it are those without it."""
    recipe = tiny_recipe(kind, gradient_checkpointing=checkpointing)
    told, silent = (
        make_learner(recipe, functools.partial(Scaled, factors={14: math.nan})) for _ in range(2)
    )
    for learner in (told, silent):
        train(learner, windows, range(3))
        learner.take_step(3, windows[4:8], NUMBERS)
    before = everything(told), hooks_of(told.model), set(vars(told.model))
    gradients = [id(parameter.grad) for parameter in told.model.parameters()]
    told.explain(3, windows[4:8], NUMBERS)
    assert (hooks_of(told.model), set(vars(told.model))) == before[1:]
    assert [id(parameter.grad) for parameter in told.model.parameters()] == gradients
    for name, value in everything(told).items():
        assert torch.equal(value.nan_to_num(7), before[0][name].nan_to_num(7)), name
    for learner in (told, silent):
        train(learner, windows, range(4, 6))
    after = everything(silent)
    for name, value in everything(told).items():
        assert torch.equal(value, after[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_samples_change_no_bit_of_training(tiny_recipe, windows, kind, checkpointing):
    plain, sampling = (
        make_learner(tiny_recipe(kind, trace_steps=steps, gradient_checkpointing=checkpointing))
        for steps in (0, 3)
    )
    for learner in (plain, sampling):
        train(learner, windows, range(3))
    expected = everything(plain)
    for name, value in everything(sampling).items():
        assert torch.equal(value, expected[name]), name
    assert hooks_of(sampling.model) == hooks_of(plain.model)


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_recomputed_blocks_are_recorded_once(tiny_recipe, windows, kind):
    """Gradient checkpointing runs each block twice; kept steps and the bad one have it once."""
    plain, recomputed = (
        explain(tiny_recipe(kind, gradient_checkpointing=choice), windows, spoil_weight)
        for choice in (False, True)
    )

    def seen(trace, sampled):
        rows = [each for each in trace.tensors if each.sampled is sampled]
        return sorted((e.step, e.micro_batch, e.stream, e.module, e.tensor) for e in rows)

    for sampled in (True, False):
        assert seen(recomputed, sampled) == seen(plain, sampled)
    assert any(module == "blocks.1" for *_, module, _ in seen(plain, True))
    assert recomputed.first_place == plain.first_place


def test_the_last_good_steps_are_kept_and_a_bad_one_is_not(tiny_recipe, windows):
    wrap = functools.partial(Scaled, factors={9: math.nan, 14: math.nan})
    learner = make_learner(tiny_recipe(trace_steps=2), wrap)
    assert learner.explain(0, windows[:4], NUMBERS).kept_steps == []
    train(learner, windows, (0, 1))
    assert learner.take_step(2, windows[:4], np.arange(8, 12)).cause
    trace = learner.explain(2, windows[:4], np.arange(8, 12))
    assert (trace.kept_steps, trace.not_measured) == ([0, 1], "")
    train(learner, windows, [4])
    assert learner.explain(3, windows[4:8], NUMBERS).kept_steps == [1, 4]


def test_a_sample_is_of_what_the_step_really_had(tiny_recipe, windows):
    """The kept figures of a step are those of its own tensors, at the sampled places."""
    learner = make_learner(tiny_recipe())
    made = {}

    def keep(module, inputs, output):
        made.setdefault("input", inputs[0].detach().clone())  # first micro-batch, clean stream
        made.setdefault("output", output.detach().clone())
        if "gradient" not in made and output.requires_grad:
            output.register_hook(lambda gradient: made.__setitem__("gradient", gradient.clone()))
            made["gradient"] = None

    module = learner.model.get_submodule("blocks.0.feed_forward")
    handle = module.register_forward_hook(keep)
    learner.take_step(0, windows[:4], np.arange(4))
    handle.remove()
    trace = learner.explain(1, windows[:4], np.arange(4, 8))
    kept = {
        each.tensor: each.values
        for each in trace.tensors
        if (each.sampled, each.stream, each.module) == (True, "clean", "blocks.0.feed_forward")
    }
    for name in ("input", "output", "gradient"):
        assert kept[name] == summarise(made[name][:2, ::4])
        assert kept[name].n_values == 2 * 4 * 16


def test_without_a_ring_the_bad_step_is_explained_and_the_reason_is_given(tiny_recipe, windows):
    trace = explain(tiny_recipe(trace_steps=0), windows, spoil_weight)
    assert (trace.kept_steps, trace.not_measured) == ([], "pretrain.trace_steps is 0")
    assert "blocks.0.attention.query.weight" in trace.first_place


def test_a_compiled_run_is_explained_with_the_plain_passes(tiny_recipe, windows, monkeypatch):
    """Nothing is sampled, the compiled passes are not called, and they are put back."""
    calls = []

    def compiled(run):
        @functools.wraps(run)
        def fast(*arguments, **options):
            calls.append(run.__name__)
            return run(*arguments, **options)

        return fast

    monkeypatch.setattr(torch, "compile", compiled)
    learner = make_learner(tiny_recipe(compile=True))
    train(learner, windows, range(2))
    spoil_weight(learner)
    learner.take_step(3, windows[4:8], NUMBERS)
    n_calls, methods = len(calls), dict(vars(learner.model))
    assert n_calls > 0
    trace = learner.explain(3, windows[4:8], NUMBERS)
    assert len(calls) == n_calls
    assert {name: vars(learner.model).get(name) for name in methods} == methods
    assert "compile" in trace.not_measured
    assert "blocks.0.attention.query.weight" in trace.first_place
    learner.take_step(4, windows[:4], np.arange(16, 20))
    assert len(calls) > n_calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler itself warns about parts of torch
def test_a_compiled_run_goes_on_bit_for_bit_after_an_explanation(tiny_recipe, windows, monkeypatch):
    """Traced for real, by the backend that changes no arithmetic."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    recipe = tiny_recipe("autoregressive", model={"n_layers": 1}, compile=True)
    told, silent = (
        make_learner(recipe, functools.partial(Scaled, factors={14: math.nan})) for _ in range(2)
    )
    for learner in (told, silent):
        train(learner, windows, range(2))
        assert learner.take_step(3, windows[4:8], NUMBERS).cause == "loss is nan"
    assert told.explain(3, windows[4:8], NUMBERS).alone == ((14, "loss is nan"),)
    for learner in (told, silent):
        train(learner, windows, range(4, 6))
    expected = everything(silent)
    for name, value in everything(told).items():
        assert torch.equal(value, expected[name]), name


def test_a_trace_is_written_whole_strict_and_with_the_same_bytes(tiny_recipe, windows, tmp_path):
    files = []
    for place in (tmp_path / "first", tmp_path / "second"):
        trace = explain(tiny_recipe(), windows, spoil_weight)
        trace.write(place, run="r")
        files.append({path.name: path.read_bytes() for path in place.iterdir()})
    assert files[0] == files[1]
    assert set(files[0]) == {"trace.json", "tensors.csv", "trace.svg"}
    told = json.loads(files[0]["trace.json"], parse_constant=pytest.fail)
    assert told["windows"] == {"first": 12, "last": 15}
    assert (told["step"], told["cause"], told["kept_steps"]) == (3, "loss is nan", [1, 2])
    assert told["first_place"] == trace.first_place
    assert told["alone"] == [{"window": n, "cause": "loss is nan"} for n in (12, 13)]
    with (tmp_path / "first" / "tensors.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == len(trace.tensors)
    assert {(row["step"], row["of"]) for row in rows} == {
        ("1", "sampled"),
        ("2", "sampled"),
        ("3", "all"),
    }
    first = next(row for row in rows if row["module"] == "blocks.0.attention.query.weight")
    assert (first["nonfinite_share"], first["n_values"]) == (str(1 / 256), "256")
    assert not any(word in files[0]["tensors.csv"].lower() for word in (b"nan", b"inf"))
    trace.write(tmp_path / "first", run="r")  # over an older one
    (tmp_path / "first" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match=r"mine\.txt"):
        trace.write(tmp_path / "first", run="r")


def test_every_pass_and_micro_batch_is_in_the_table(tiny_recipe, windows):
    """Input, output and gradient of a module of each; the first pass has no gradient."""
    trace = explain(tiny_recipe(diffusion={"self_conditioning_share": 1.0}), windows, spoil_weight)
    seen = {
        (each.micro_batch, each.stream, each.tensor)
        for each in trace.tensors
        if not each.sampled and each.module == "blocks.0.feed_forward.down"
    }
    tensors = {"clean": 3, "first": 2, "noisy": 3}
    expected = {
        (micro_batch, stream, tensor)
        for micro_batch in (0, 1)
        for stream, n in tensors.items()
        for tensor in ("input", "output", "gradient")[:n]
    }
    assert seen == expected
    parameters = {each.module for each in trace.tensors if each.tensor == "exp_avg_sq"}
    learner = make_learner(tiny_recipe())
    assert parameters == {name for name, _ in learner.model.named_parameters()}
    orders = [each.order for each in trace.tensors if not each.sampled]
    assert orders == list(range(len(orders)))


def test_the_drawing_has_a_line_for_each_pass_and_marks_the_bad_values(
    tiny_recipe, windows, tmp_path
):
    always = {"self_conditioning_share": 1.0}
    explain(tiny_recipe(diffusion=always), windows, spoil_weight).write(tmp_path / "trace", run="r")
    svg = (tmp_path / "trace" / "trace.svg").read_text()
    # Steps 1, 2 and 3: outputs of three passes, and gradients of the two that have any.
    assert svg.count("<polyline") == 3 * (3 + 2)
    assert "<title>blocks.1.attention.query</title>" in svg
    assert "nan" not in svg
    texts = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("step ")] == [
        "step 1, good: a sample of its values was kept",
        "step 2, good: a sample of its values was kept",
        "step 3, bad: a dot where values are not finite, at the bottom where none is",
    ]
    assert texts.count("blocks.0") == 2 * 3  # two panels, three passes
    assert "prefers-color-scheme: dark" in svg


def test_modules_are_named_where_there_is_room(tiny_recipe, windows, tmp_path):
    """One pass of two blocks has room for all names."""
    explain(tiny_recipe("autoregressive"), windows, spoil_weight).write(tmp_path / "trace", run="r")
    drawn = ElementTree.fromstring((tmp_path / "trace" / "trace.svg").read_text())
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    for name in ("embedding", "blocks.0.attention.query", "blocks.1.feed_forward", "final_norm"):
        assert texts.count(name) == 2


@pytest.mark.parametrize(
    ("values", "abs_max", "mean", "n_nonfinite"),
    [
        ([1.0, -3.0], 3.0, -1.0, 0),
        ([math.nan, -3.0, math.inf], 3.0, -3.0, 2),
        ([math.nan], None, None, 1),
        ([], None, None, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_over_the_finite_values(values, abs_max, mean, n_nonfinite, dtype):
    found = summarise(torch.tensor(values, dtype=dtype))
    assert (found.abs_max, found.mean, found.n_nonfinite) == (abs_max, mean, n_nonfinite)
    assert found.nonfinite_share == (n_nonfinite / len(values) if values else None)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((32, 128, 192), (2, 4, 192)),
        ((1, 3, 8), (1, 3, 8)),
        ((8, 3, 130, 64), (2, 3, 4, 64)),
        ((4096, 2), (1024,)),
        ((), (1,)),
    ],
)
def test_a_sample_is_a_few_positions_of_the_first_windows(shape, expected):
    assert sample(torch.randn(shape)).shape == expected


def test_samples_take_memory_once_and_use_it_again(tiny_recipe, windows):
    """Copies that outlive their step would scatter over the heap and let it grow threefold."""
    learner = make_learner(tiny_recipe(trace_steps=2))
    ring, places = learner._ring, []
    for step in range(6):
        train(learner, windows, [step])
        rooms = [*ring._kept, *ring._free]
        places.append(sorted(block.data_ptr() for room in rooms for block in room._blocks))
    assert len(places[0]) == 3
    assert all(each == places[0] for each in places)


def test_samples_that_need_more_memory_get_it(tiny_recipe, windows, monkeypatch):
    whole = explain(tiny_recipe(), windows, spoil_weight)
    monkeypatch.setattr(trace_ring, "LEAST_VALUES", 100)  # below some samples, above others
    assert explain(tiny_recipe(), windows, spoil_weight) == whole
