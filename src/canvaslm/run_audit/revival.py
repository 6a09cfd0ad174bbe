"""Does the checkpoint come back as what it was, and does training go on as if nothing was?"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canvaslm.checkpoint import load_trained_model, restore, save_checkpoint
from canvaslm.checkpoint_state import STATE, TENSOR_FILES
from canvaslm.model.backbone import Backbone
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.rehearsal import (
    fresh_learner,
    learn_one_window,
    sample_windows,
    take_steps,
)
from canvaslm.run_audit.subject import Subject
from canvaslm.training.learner import Learner

_MODEL, _ = TENSOR_FILES
_STEPS_BEFORE_SAVE = 2  # so that no moment is what a fresh optimiser, or its first step, has
_SHOWN = 4


def check_head(subject: Subject) -> Check:
    """The head is the token table after a load, and is so still after a step from there."""
    loaded = load_trained_model(subject.checkpoint).to(subject.device)
    learner = fresh_learner(subject)
    restore(subject.checkpoint, model=learner.model, optimizer=learner.optimizer)
    found = {"after load": _is_tied(loaded), "after restore": _is_tied(learner.model)}
    take_steps(subject, learner, first=0, n_steps=1)
    found["a step after restore"] = _is_tied(learner.model)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
    loaded.logits(loaded.encode(sample_windows(subject)[:1]).hidden).logsumexp(-1).sum().backward()
    optimizer.step()
    found["a step after load"] = _is_tied(loaded)
    due = subject.recipe.model.tied
    apart = [place for place, is_tied in found.items() if not is_tied]
    return decide(
        "state",
        "head_is_tied",
        holds=not apart if due else len(apart) == len(found),
        measured=f"two tensors {', '.join(apart)}" if apart else f"one tensor {', '.join(found)}",
        expected="the head is the token table: one storage, the same values"
        if due
        else "the head is a matrix of its own, whatever happens",
        first_test="compare the head's storage with the table's before and after the weights are "
        "copied in: a copy that replaces tensors cuts the tie",
    )


def check_reload(subject: Subject) -> Check:
    """Load, save, load: the same bytes of weights and the same logits."""
    learner = fresh_learner(subject)
    progress = restore(subject.checkpoint, model=learner.model, optimizer=learner.optimizer)
    with tempfile.TemporaryDirectory() as place:
        again = save_checkpoint(
            Path(place),
            model=learner.model,
            optimizer=learner.optimizer,
            progress=progress,
            identity=stored_identity(subject),
            keep_last=None,
        )
        old, new = ((folder / _MODEL).read_bytes() for folder in (subject.checkpoint, again))
        reloaded = load_trained_model(again).to(subject.device)
    windows = sample_windows(subject)
    before, after = (_logits(model, windows) for model in (subject.model, reloaded))
    same = torch.equal(before, after)
    return decide(
        "state",
        "reload_is_bit_equal",
        holds=same and old == new,
        measured=f"logits of {len(windows)} windows are {'bit-equal' if same else 'not equal'}; "
        f"{_MODEL} has {'the same' if old == new else 'other'} bytes",
        expected="the same logits and the same bytes after load, save and load",
        first_test="compare the two model.safetensors tensor by tensor: a tensor that differs was "
        "changed by loading, equal files mean that the model computes otherwise",
    )


def check_optimizer(subject: Subject) -> Check:
    """The step after a save and a restore is the step that would have come without them."""
    lived, revived = fresh_learner(subject), fresh_learner(subject)
    ran = take_steps(subject, lived, first=0, n_steps=_STEPS_BEFORE_SAVE)
    with tempfile.TemporaryDirectory() as place:
        saved = save_checkpoint(
            Path(place),
            model=lived.model,
            optimizer=lived.optimizer,
            progress=subject.state.progress,
            identity=stored_identity(subject),
            keep_last=None,
        )
        restore(saved, model=revived.model, optimizer=revived.optimizer)
    lost = _differing(lived, revived)
    ran &= take_steps(subject, lived, first=_STEPS_BEFORE_SAVE, n_steps=1)
    ran &= take_steps(subject, revived, first=_STEPS_BEFORE_SAVE, n_steps=1)
    differing = _differing(lived, revived)
    told = f"{len(lost)} tensors differ after the restore, {len(differing)} after the next step"
    if lost or differing:
        told += f": {', '.join((lost or differing)[:_SHOWN])}"
    return decide(
        "state",
        "optimizer_state_survives",
        holds=ran and not lost and not differing,
        measured=told if ran else "a step of the rehearsal was refused as not finite",
        expected="no weight, moment or counter differs from those of a learner that went on",
        first_test="compare the moments right after the restore: zeros were never read, other "
        "values were read for another parameter",
    )


def check_overfit(subject: Subject) -> Check:
    """Fresh weights of this shape can learn one window by heart."""
    params = subject.params
    learned = learn_one_window(subject)
    return decide(
        "state",
        "one_window_is_learned",
        holds=learned.last_nats < params.overfit_nats,
        measured=f"from {learned.first_nats:.3g} to {learned.last_nats:.3g} nats per target in "
        f"{learned.n_steps} steps",
        expected=f"under {params.overfit_nats:g} nats within {params.overfit_steps} steps, from "
        "fresh weights on one window with its noise held still",
        first_test="look at the loss over those steps: flat means that gradients do not arrive, "
        "falling too slowly means rate or depth",
    )


def stored_identity(subject: Subject) -> dict[str, Any]:
    """The identity in ``state.json`` as it is written there."""
    text = (subject.checkpoint / STATE).read_text(encoding="utf-8")
    return json.loads(text)["identity"]


def _is_tied(model: Backbone) -> bool:
    head, table = model.head_weight, model.embedding.weight
    is_one = head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    return is_one and torch.equal(head, table[: len(head)])


@torch.no_grad()
def _logits(model: Backbone, windows: Tensor) -> Tensor:
    """Logits of the clean stream, which every model has."""
    return model.logits(model.encode(windows).hidden)


def _differing(one: Learner, other: Learner) -> list[str]:
    """The names of weights, moments and counters that are not bit-equal."""
    pairs = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
    found = []
    for (name, mine), theirs in pairs:
        if not torch.equal(mine, theirs):
            found.append(name)
        moments, their_moments = one.optimizer.state[mine], other.optimizer.state[theirs]
        found += [
            f"{moment}/{name}"
            for moment, value in moments.items()
            if not torch.equal(value, their_moments[moment])
        ]
    return found
