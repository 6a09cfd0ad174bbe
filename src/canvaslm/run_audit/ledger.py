"""Where are the parameters, and do they add up?

Each is counted once, under the module that holds it, and the sum is held against the closed form of
the shape, against the model's own list and against the checkpoint's file. A second copy of the
token table is no entry of its own here: whether head and table are one storage is another check.
"""

import torch
from safetensors import safe_open
from torch import Tensor, nn

from canvaslm.checkpoint_state import TENSOR_FILES
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams, count_parameters, guess_layers
from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.subject import Subject

_COUNT = (
    "python -m pytest -q tests/model/test_shape.py::test_closed_form_counts_what_the_network_holds"
)


def check_ledger(subject: Subject, model: Backbone) -> list[Check]:
    """Count the parameters by module, and the layers that hold them.

    Args:
        subject: the run.
        model: its model, on the CPU.
    """
    ledger, layers = "parameters_add_up", "every_layer_is_registered_once"
    return [
        attempt("flow", ledger, lambda: _check_sum(subject, model, ledger)),
        attempt("flow", layers, lambda: _check_layers(model, layers)),
    ]


def _check_sum(subject: Subject, model: Backbone, name: str) -> Check:
    entries = _entries(model)
    due = count_parameters(subject.recipe.model, subject.recipe.layout)
    sums = {
        "the modules": sum(entries.values()),
        "the model's own list": sum(p.numel() for p in _without_copies(model)),
        "the file": _stored(subject),
    }
    told = ", ".join(f"{place} {count}" for place, count in _grouped(entries, model).items())
    return decide(
        "flow",
        name,
        holds=all(found == due for found in sums.values()),
        measured=f"{told}; sum of " + ", of ".join(f"{key}: {n}" for key, n in sums.items()),
        expected=f"{due} in each, the closed form of the shape with the tied table counted once",
        first_test=_COUNT,
    )


def _check_layers(model: Backbone, name: str) -> Check:
    """Each linear layer and table stands at one place, with weights of its own."""
    layers = [
        layer
        for _, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, (nn.Linear, nn.Embedding))
    ]
    n_places, n_layers = len(layers), len({id(layer) for layer in layers})
    n_storages = len({layer.weight.data_ptr() for layer in layers})
    due = _due_layers(model.params)
    return decide(
        "flow",
        name,
        holds=n_places == n_layers == n_storages == due,
        measured=f"{n_places} places, {n_layers} layers, {n_storages} weights",
        expected=f"{due} of each: a table and {due - 1} linear layers",
        first_test="print named_modules(remove_duplicate=False) and look for a layer that stands "
        "under two names, or for a list of modules that is a plain Python list",
    )


def _due_layers(params: ModelParams) -> int:
    """A table; a head of its own; seven in each block; a shift; two for the time; a guess's."""
    once = 1 + (not params.tied) + params.token_shift + 2 * bool(params.time_width)
    return once + 7 * params.n_layers + guess_layers(params)


def _entries(model: Backbone) -> dict[str, int]:
    """Elements that each module holds itself, each storage under the first that holds it."""
    entries: dict[str, int] = {}
    counted: set[int] = set()
    for place, module in model.named_modules():
        for parameter in module._parameters.values():  # its own, not its children's
            if parameter is None or parameter.data_ptr() in counted:
                continue
            counted.add(parameter.data_ptr())
            if not _is_copy_of_table(parameter, model):
                entries[place] = entries.get(place, 0) + parameter.numel()
    return entries


def _grouped(entries: dict[str, int], model: Backbone) -> dict[str, int]:
    """Entries by the parts of the network, equal blocks in one line."""
    parts: dict[str, int] = {}
    blocks = [0] * len(model.blocks)
    for place, count in entries.items():
        if place.startswith("blocks."):
            blocks[int(place.split(".")[1])] += count
        else:
            part = place.split(".")[0]
            parts[part] = parts.get(part, 0) + count
    if len(set(blocks)) == 1:
        return parts | {f"{len(blocks)} blocks of {blocks[0]}": sum(blocks)}
    return parts | {f"block {number}": count for number, count in enumerate(blocks)}


def _without_copies(model: Backbone) -> list[Tensor]:
    return [p for p in model.parameters() if not _is_copy_of_table(p, model)]


def _is_copy_of_table(parameter: Tensor, model: Backbone) -> bool:
    """Whether this is a head of its own that equals the table, or its real rows."""
    table = model.embedding.weight
    return parameter is not table and any(
        parameter.shape == rows.shape and torch.equal(parameter, rows)
        for rows in (table, model.embedding.weight[: model.layout.vocab_size])
    )


def _stored(subject: Subject) -> int:
    """Elements in the checkpoint's file of weights."""
    path = subject.checkpoint / TENSOR_FILES[0]
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 - no mapping
