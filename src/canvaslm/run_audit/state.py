"""Is what the run left behind whole, its own, and enough to go on from?"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from canvaslm.checkpoint_state import STATE, TENSOR_FILES
from canvaslm.run_audit.average import check_judged
from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.definitions import due_rule
from canvaslm.run_audit.revival import (
    check_head,
    check_optimizer,
    check_overfit,
    check_reload,
    stored_identity,
)
from canvaslm.run_audit.subject import Subject
from canvaslm.training.identity import identity_name
from canvaslm.training.machine import MACHINE
from canvaslm.training.plan import PretrainParams

_MODEL, _OPTIMIZER = TENSOR_FILES
_SHOWN = 4


def check_state(subject: Subject) -> list[Check]:
    """Hold the checkpoint of a run against its files, its params, and what training makes of it."""
    makes = {
        "checkpoint_is_whole": _check_files,
        "identity_is_that_of_the_inputs": _check_identity,
        "configuration_is_recorded": _check_configuration,
        "machine_is_recorded": _check_machine,
        "head_is_tied": check_head,
        "reload_is_bit_equal": check_reload,
        "optimizer_state_survives": check_optimizer,
        "moments_counted_every_update": _check_moments,
        "one_window_is_learned": check_overfit,
    }
    if subject.recipe.pretrain.ema_decay:
        makes["average_is_what_is_judged"] = check_judged
    return [attempt("state", name, lambda make=make: make(subject)) for name, make in makes.items()]


def _check_files(subject: Subject) -> Check:
    """Read the files anew, past the checks of the loader."""
    recorded = json.loads((subject.checkpoint / STATE).read_text(encoding="utf-8"))["files"]
    wrong = []
    for name in TENSOR_FILES:
        content = (subject.checkpoint / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != recorded[name]:
            wrong.append(name)
    moments = load_file(subject.checkpoint / _OPTIMIZER)
    weights = load_file(subject.checkpoint / _MODEL)
    kinds = sorted({name.partition("/")[0] for name in moments})
    owed = {f"{kind}/{name}" for name in weights for kind in _kinds(subject, name, weights[name])}
    return decide(
        "state",
        "checkpoint_is_whole",
        holds=not wrong and owed == set(moments),
        measured=f"{len(TENSOR_FILES) - len(wrong)} of {len(TENSOR_FILES)} hashes agree; "
        f"{len(weights)} weights, {len(moments)} tensors of {', '.join(kinds)}",
        expected="both hashes as in state.json; for each weight "
        + _told_kinds(subject.recipe.pretrain),
        first_test="hash the files of the run's own checkpoint under .work/pretrain: if those "
        "agree, the copy is damaged",
    )


def _kinds(subject: Subject, name: str, weight: Tensor) -> list[str]:
    """What the optimiser owes a weight."""
    params = subject.recipe.pretrain
    by_muon = due_rule(name, weight, params) == "muon"
    kinds = ["momentum_buffer"] if by_muon else ["exp_avg", "exp_avg_sq", "step"]
    return kinds + ["ema"] * bool(params.ema_decay)


def _told_kinds(params: PretrainParams) -> str:
    told = "two moments and a step counter"
    if params.optimizer == "muon":
        told += ", or for the matrices of the blocks a momentum"
    return told + (", and an average" if params.ema_decay else "")


def _check_identity(subject: Subject) -> Check:
    stored, due = stored_identity(subject), json.loads(json.dumps(subject.job.identity))
    parent = stored.pop("parent", None)
    due.pop("parent", None)
    old, new = dict(_flat(stored)), dict(_flat(due))
    differing = sorted(key for key in old.keys() | new if old.get(key) != new.get(key))
    told = f"{len(differing)} of {len(old.keys() | new)} entries differ"
    if differing:
        told += f": {', '.join(differing[:_SHOWN])}"
    if parent is not None:
        told += f"; forked from {parent['identity']} at step {parent['step']}"
    return decide(
        "state",
        "identity_is_that_of_the_inputs",
        holds=not differing,
        measured=told,
        expected="the identity that these params, this data and this code make; a parent is shown",
        first_test="if only `code` differs, an edit came after the training: run `dvc repro`; else "
        "the checkpoint is of another run",
    )


def _check_configuration(subject: Subject) -> Check:
    """All that decides the weights is written down, in full."""
    stored, recipe = stored_identity(subject), subject.recipe
    owed = {
        "layout": set(type(recipe.layout).model_fields),
        "model": set(type(recipe.model).model_fields),
        "pretrain": set(subject.job.identity["pretrain"]),
        "data": {"manifest_sha256", "tokenizer_sha256", "eot_id", "shards"},
    }
    if recipe.diffusion is not None:
        owed["diffusion"] = set(type(recipe.diffusion).model_fields)
    missing = [f"{part}.{key}" for part in owed for key in owed[part] - set(stored[part])]
    unknown = sorted(set(stored["pretrain"]) - set(PretrainParams.model_fields))
    shards, code = stored["data"]["shards"], stored["code"]
    return decide(
        "state",
        "configuration_is_recorded",
        holds=not missing and not unknown and bool(shards) and bool(code),
        measured=f"{sum(map(len, owed.values())) - len(missing)} entries, {len(missing)} missing, "
        f"{len(unknown)} unknown; {len(shards)} training shards by hash, code by a digest",
        expected="every knob that decides a weight, every training shard, and the code with the "
        "versions of its packages",
        first_test="compare the keys of state.json's identity with the params file",
    )


def _check_machine(subject: Subject) -> Check:
    """Whether the run wrote down where it ran; what stands there is of one machine, so not here."""
    path, name = subject.reports / MACHINE, "machine_is_recorded"
    expected = f"{MACHINE} beside the loss log, with processor, versions and threads"
    first_test = "run `pretrain` again on the machine that has the run's state"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    why = _of_no_machine(subject, content)
    if why:
        return Check(
            group="state",
            name=name,
            measured=why,
            expected=expected,
            verdict="not_measured",
            first_test=first_test,
        )
    text = json.dumps(content)
    missing = [key for key in ("processor", "python", "torch") if f'"{key}"' not in text]
    return decide(
        "state",
        name,
        holds=not missing,
        measured=f"recorded, without {', '.join(missing)}" if missing else "recorded",
        expected=expected,
        first_test=first_test,
    )


def _of_no_machine(subject: Subject, content: Any) -> str:
    """Why the note of a machine says nothing of this run, or nothing where it does."""
    if content is None:
        return f"no {MACHINE}: it is of one machine and no out, so a checkout lacks it"
    due = identity_name(stored_identity(subject))
    noted = content.get("run") if isinstance(content, dict) else None
    if noted is None:
        return f"{MACHINE} does not say of which run it is"
    if noted != due:
        return (
            f"{MACHINE} is of run {noted} and the checkpoint of run {due}: DVC restored a training "
            "from its cache, and the note is no out"
        )
    return ""


def _check_moments(subject: Subject) -> Check:
    """The counters of the optimiser agree with the number of steps that changed something.

    Muon does not count: of its momenta it is only asked whether they hold anything.
    """
    moments = load_file(subject.checkpoint / _OPTIMIZER)
    counters = sorted({int(v) for name, v in moments.items() if name.startswith("step/")})
    gathered = [
        v for name, v in moments.items() if name.startswith(("exp_avg_sq/", "momentum_buffer/"))
    ]
    moved = sum(bool(v.any()) for v in gathered)
    n_uncounted = sum(name.startswith("momentum_buffer/") for name in moments)
    progress = subject.state.progress
    updates = progress.step - len(progress.skipped)
    return decide(
        "state",
        "moments_counted_every_update",
        holds=counters == [updates] and moved > 0,
        measured=f"counters at {', '.join(map(str, counters))}; {moved} of "
        + (
            f"{len(gathered)} second moments and momenta are not zero; {n_uncounted} momenta have "
            "no counter"
            if n_uncounted
            else f"{len(gathered)} second moments are not zero"
        ),
        expected=f"every counter at {updates}: {progress.step} steps, "
        f"{len(progress.skipped)} of them skipped",
        first_test="compare the counter with the step of each resume: the difference is where the "
        "optimiser began anew",
    )


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested dictionaries under dotted names."""
    if not isinstance(value, dict) or not value:
        yield place, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{place}.{key}" if place else key)
