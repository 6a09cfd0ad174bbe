"""Does the trained model hold what it says, and does it see what it may and nothing else?"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.influence import check_influence
from canvaslm.run_audit.interventions import largest_gap, told_gap
from canvaslm.run_audit.ledger import check_ledger
from canvaslm.run_audit.reading import (
    Reading,
    cached_clean_logits,
    cached_logits,
    denoised_logits,
    encoded_logits,
    on_cpu,
    one_stream_logits,
    read_window,
)
from canvaslm.run_audit.subject import Subject

_LARGEST_GAP = 1e-4  # between two ways to the same logits, as a share of the largest
_GUESS_CHUNK = 1 << 13  # vocabulary rows at a time; changes no value

_PADDED = (
    "python -m pytest -q tests/model/test_backbone.py::test_padded_rows_of_the_table_are_never_seen"
)
_GUESS = (
    "python -m pytest -q "
    "tests/model/test_self_conditioning.py::test_rows_without_a_guess_add_exactly_nothing"
)
_CACHE = (
    "python -m pytest -q "
    "tests/model/test_kv_cache.py::test_decoding_over_a_cache_equals_the_whole_window"
)


def check_flow(subject: Subject) -> list[Check]:
    """Add up the parameters, then change one thing in a window after the other.

    Everything runs in float32 on the CPU, whatever the run was trained on and in: only there do
    equal calls give equal bits.
    """
    model, reading = on_cpu(subject.model), read_window(subject)
    checks = check_ledger(subject, model)
    checks += check_influence(subject, model, reading)
    if model.self_conditioning is not None:
        checks.append(_try("guess_is_seen", lambda name: _check_guess(model, reading, name)))
    checks += [
        _try("padded_rows_are_unseen", lambda name: _check_padding(model, reading, name)),
        _try("train_and_eval_agree", lambda name: _check_modes(model, reading, name)),
        _try("cached_decoding_agrees", lambda name: _check_cache(model, reading, name)),
    ]
    return checks


def _try(name: str, make: Callable[[str], Check]) -> Check:
    return attempt("flow", name, lambda: make(name))


def _check_guess(model: Backbone, reading: Reading, name: str) -> Check:
    """A guess moves the logits through its projection, and through nothing else."""
    assert model.self_conditioning is not None
    with torch.no_grad():
        hidden = model.denoise(
            reading.noisy,
            reading.times,
            context=model.encode(reading.clean),
            guess=None,
            has_guess=None,
        )
        guess = model.soft_embedding(hidden, vocab_chunk=_GUESS_CHUNK)
        without, with_it = model.logits(hidden)[0], denoised_logits(model, reading, guess)
    projection = model.self_conditioning.projection
    is_zero = not any(bool(p.any()) for p in projection.parameters())
    share = largest_gap(with_it, without, scale=without)
    measured = f"it moves the logits by {told_gap(share)}"
    if is_zero:
        measured += "; its projection is exactly 0, as before the first update"
    return decide(
        "flow",
        name,
        holds=torch.equal(with_it, without) if is_zero else 0 < share < math.inf,
        measured=measured,
        expected="a change through a projection that was trained, not one bit through one of 0",
        first_test=_GUESS,
    )


def _check_padding(model: Backbone, reading: Reading, name: str) -> Check:
    """Rows of the table beyond the vocabulary hold NaN for a moment; nothing may take it up."""
    V, rows = model.layout.vocab_size, model.embedding.weight.shape[0]
    paths = _paths(model, reading)
    before = [run(model, reading) for run in paths]
    padded = copy.deepcopy(model)
    with torch.no_grad():
        padded.embedding.weight[V:] = math.nan
    after = [run(padded, reading) for run in paths]
    n_equal = sum(torch.equal(*pair) for pair in zip(before, after, strict=True))
    is_narrow = all(logits.shape[-1] == V for logits in after)
    return decide(
        "flow",
        name,
        holds=n_equal == len(paths) and is_narrow,
        measured=f"{rows} rows in the table, {rows - V} of them padding; with NaN there "
        f"{n_equal} of {len(paths)} passes keep every bit of their {after[0].shape[-1]} columns",
        expected=f"{V} columns of logits, every bit in every pass",
        first_test=_PADDED,
    )


def _check_modes(model: Backbone, reading: Reading, name: str) -> Check:
    """Nothing in the network is stochastic, so its two modes are one function."""
    paths, was_training = _paths(model, reading), model.training
    try:
        in_eval = [run(model.eval(), reading) for run in paths]
        in_train = [run(model.train(), reading) for run in paths]
    finally:
        model.train(was_training)
    n_equal = sum(torch.equal(*pair) for pair in zip(in_eval, in_train, strict=True))
    return decide(
        "flow",
        name,
        holds=n_equal == len(paths),
        measured=f"{n_equal} of {len(paths)} passes give the same bits in both modes",
        expected="all of them, since nothing is stochastic",
        first_test="look for a module whose forward asks for self.training, such as a dropout",
    )


def _check_cache(model: Backbone, reading: Reading, name: str) -> Check:
    """What is decoded piece by piece over a cache is what the whole window says."""
    pairs = []
    if model.params.clean_mask == "causal":
        pairs.append((encoded_logits, cached_clean_logits))
    if reading.has_noise:
        pairs.append((denoised_logits, cached_logits))
    logits = [(cached(model, reading), whole(model, reading)) for whole, cached in pairs]
    gap = max(largest_gap(found, due, scale=due) for found, due in logits)
    return decide(
        "flow",
        name,
        holds=gap <= _LARGEST_GAP,
        measured=f"logits over a cache differ by up to {told_gap(gap)}",
        expected=f"by at most {_LARGEST_GAP:g} of it from those of the whole window",
        first_test=_CACHE,
    )


def _paths(model: Backbone, reading: Reading) -> list[Callable[[Backbone, Reading], Tensor]]:
    """The passes that this model is used in."""
    if not reading.has_noise:
        return [encoded_logits]
    if model.params.clean_mask == "block":
        return [encoded_logits, denoised_logits, one_stream_logits]
    return [encoded_logits, denoised_logits]
