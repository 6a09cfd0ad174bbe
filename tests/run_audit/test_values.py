"""Is every way in which a number can be wrong told by its own name?"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from canvaslm.model import backbone
from canvaslm.model.attention import causal_attention
from canvaslm.model.backbone import initialise
from canvaslm.objective import next_token, noisy_loss
from canvaslm.objective.denoising import Denoising
from canvaslm.run_audit import reading
from canvaslm.run_audit.activations import Watch, largest_score
from canvaslm.run_audit.held_out import HeldOutLoss, measure_held_out
from canvaslm.run_audit.own_loss import has_guess, own_loss
from canvaslm.run_audit.reading import read_window, windows_of
from canvaslm.run_audit.values import check_values

KINDS = ("diffusion", "prefix", "autoregressive")
OPTIONS = ("default", "phased", "biased", "previous", "bound")
FLOOR = "held_out_loss_is_above_the_floor"


def of_probabilities(hidden, weight, targets, *, vocab_chunk, reduction):
    """Cross-entropy of softmax(logits) taken for logits."""
    shares = functional.linear(hidden, weight).softmax(-1)
    return functional.cross_entropy(
        shares.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def named(checks, name):
    return next(check for check in checks if check.name == name)


@pytest.mark.parametrize("kind", KINDS + OPTIONS)
def test_a_clean_run_passes_and_is_left_as_it_was(open_run, failures, kind):
    subject = open_run(kind)
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    checks = check_values(subject)
    assert failures(checks) == [], checks
    assert named(checks, FLOOR).verdict == "not_measured"
    for name, value in subject.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(module._forward_hooks for module in subject.model.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e7])
def test_the_first_extreme_output_is_named_by_its_module(open_run, value):
    subject = open_run("diffusion")
    with torch.no_grad():
        subject.model.blocks[1].feed_forward.gate.bias[3] = value
    first = check_values(subject)[0]
    assert (first.name, first.verdict) == ("no_activation_is_extreme", "fail")
    assert "blocks.1.feed_forward.gate, output " in first.measured
    assert "pretrain.learning_rate" in first.first_test
    assert "nan" not in first.measured
    assert "inf" not in first.measured.replace("information", "")


def test_every_module_is_looked_at_in_order(open_run):
    subject = open_run("autoregressive")
    with Watch(subject.model) as watch:
        subject.model.encode(torch.zeros(1, 16, dtype=torch.int64))
    seen = watch.result()
    runs = [m for m in subject.model.modules() if type(m).forward is not nn.Module.forward]
    assert seen.n_outputs == len(runs)
    assert "blocks.feed_forward.up" in seen.largest


def test_a_score_that_runs_away_is_told(open_run):
    """Projections of a few thousand are no extreme, their product is."""
    subject = open_run("autoregressive")
    with torch.no_grad():
        for layer in ("query", "key"):
            getattr(subject.model.blocks[0].attention, layer).weight.mul_(3000)
    first = check_values(subject)[0]
    assert (first.name, first.verdict) == ("no_activation_is_extreme", "fail")
    assert "none of them is extreme; " in first.measured


@pytest.mark.parametrize("changes", [1.0, 50.0])
def test_the_largest_score_is_that_of_the_attention(open_run, monkeypatch, changes):
    subject, seen = open_run("autoregressive"), []
    with torch.no_grad():
        subject.model.blocks[1].attention.query.weight.mul_(changes)

    def look(q, k, v):
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        seen.append(float((q @ keys.mT).abs().max()) / math.sqrt(q.shape[-1]))
        return causal_attention(q, k, v)

    monkeypatch.setattr(backbone, "causal_attention", look)
    assert largest_score(subject.model, read_window(subject)) == pytest.approx(max(seen), rel=1e-5)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_probabilities_is_named(open_run, failures, kind, monkeypatch):
    for module in (noisy_loss, next_token):
        monkeypatch.setattr(module, "chunked_cross_entropy", of_probabilities)
    subject = open_run(kind)
    checks = check_values(subject)[:3]  # what follows measures with the same loss
    assert failures(checks) == ["loss_is_cross_entropy"]


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_loss_of_probabilities_is_named_even_of_a_fresh_model(
    open_run, failures, kind, monkeypatch
):
    """Flat logits and flat probabilities cost nearly the same."""
    for module in (noisy_loss, next_token):
        monkeypatch.setattr(module, "chunked_cross_entropy", of_probabilities)
    subject = open_run(kind)
    initialise(subject.model, 3)
    assert failures(check_values(subject)[:3]) == ["loss_is_cross_entropy"]


def test_a_companion_of_another_weight_is_named(open_run, failures, monkeypatch):
    right = Denoising._clean_stream

    def heavier(self, model, windows):
        context, nats = right(self, model, windows)
        return context, None if nats is None else 1.01 * nats

    monkeypatch.setattr(Denoising, "_clean_stream", heavier)
    assert failures(check_values(open_run("phased"))[:3]) == ["loss_is_cross_entropy"]


@pytest.mark.parametrize("kind", ["biased", "bound"])
def test_evidence_that_is_off_by_a_little_is_named(open_run, failures, kind, monkeypatch):
    if kind == "biased":
        right = noisy_loss.token_evidence
        monkeypatch.setattr(noisy_loss, "token_evidence", lambda *given: 1.01 * right(*given))
    else:
        step = noisy_loss.step_nats
        monkeypatch.setattr(
            noisy_loss, "step_nats", lambda *given, **named: 1.001 * step(*given, **named)
        )
    assert failures(check_values(open_run(kind))[:3]) == ["loss_is_cross_entropy"]


@pytest.mark.parametrize("kind", ["diffusion", "prefix"])
def test_a_guess_that_the_objective_forgets_is_named(open_run, failures, kind, monkeypatch):
    monkeypatch.setattr(
        Denoising,
        "_draw_guess_rows",
        lambda self, params, numbers: torch.zeros(len(numbers), dtype=torch.bool),
    )
    assert failures(check_values(open_run(kind))) == ["loss_is_cross_entropy"]


def test_a_twin_that_reads_its_own_target_is_named(open_run, failures, monkeypatch):
    """The input is the window itself, without the shift."""

    def nats(self, model, windows, *, reduction):
        hidden = model.encode(windows).hidden
        return next_token.chunked_cross_entropy(
            hidden, model.head_weight, windows, vocab_chunk=16, reduction=reduction
        )

    monkeypatch.setattr(next_token.NextToken, "_nats", nats)
    assert "loss_is_cross_entropy" in failures(check_values(open_run("autoregressive")))


def test_windows_with_and_without_a_guess_are_both_asked(open_run):
    subject = open_run("diffusion")
    measured = named(check_values(subject), "loss_is_cross_entropy").measured
    kinds = [has_guess(subject, number) for number in range(4)]
    expected = (2 * max(1, kinds.count(False)), 2 * max(1, kinds.count(True)))
    assert "on {} windows without a guess and {} with one".format(*expected) in measured


def test_own_loss_is_the_mean_of_a_dense_softmax(open_run):
    """For the twin it can be written in a line."""
    subject = open_run("autoregressive")
    window = torch.from_numpy(windows_of(subject, np.array([2])))
    own = own_loss(subject, subject.model, window, 2)
    shifted = functional.pad(window[:, :-1], (1, 0))
    with torch.no_grad():
        logits = subject.model.logits(subject.model.encode(shifted).hidden)[0].double()
    due = functional.cross_entropy(logits, window[0], reduction="sum")
    assert own.nats == pytest.approx(float(due), rel=1e-6)
    assert own.n_targets == 16


def test_weights_that_begin_too_wide_are_named(open_run, failures, monkeypatch):
    def wide(model, seed):
        initialise(model, seed)
        with torch.no_grad():
            model.embedding.weight.mul_(100)

    monkeypatch.setattr(reading, "initialise", wide)
    assert failures(check_values(open_run("autoregressive"))) == ["initial_loss_is_uniform"]


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_loss_below_the_entropy_rate_is_a_leak(open_run, failures, kind):
    """Every token here stands for two bytes."""
    subject = open_run(kind)
    loss = measure_held_out(subject)
    for share, verdict in ((0.5, "pass"), (2.0, "fail")):
        rate = share * loss.mean / 2
        known = replace(subject, corpus={"entropy_rate_nats_per_byte": rate})
        check = named(check_values(known), FLOOR)
        assert check.verdict == verdict
        assert f"{2 * rate:.4f}" in check.expected


def test_three_standard_errors_below_the_rate_are_chance():
    loss = HeldOutLoss(nats=np.array([3.0, 3.2, 3.4]), bytes_per_token=np.full(3, 2.0))
    assert loss.mean == pytest.approx(3.2)
    assert loss.standard_error == pytest.approx(0.2 / math.sqrt(3))
    assert math.isnan(HeldOutLoss(nats=np.ones(1), bytes_per_token=np.ones(1)).standard_error)


def test_the_held_out_loss_does_not_depend_on_the_batch(open_run):
    subject = open_run("diffusion")
    knobs = subject.recipe.pretrain.model_copy(update={"micro_batch_windows": 3})
    other = replace(subject, recipe=replace(subject.recipe, pretrain=knobs))
    first, second = measure_held_out(subject), measure_held_out(other)
    assert len(first.nats) == 8
    np.testing.assert_allclose(first.nats, second.nats, rtol=1e-6)


def test_a_loss_that_is_no_number_is_impossible(open_run):
    subject = open_run("autoregressive")
    with torch.no_grad():
        subject.model.final_norm.weight[0] = math.nan
    known = replace(subject, corpus={"entropy_rate_nats_per_byte": 0.1})
    checks = check_values(known)
    for name in ("held_out_loss_is_possible", FLOOR, "loss_is_cross_entropy"):
        assert named(checks, name).verdict == "fail"
    told = " ".join(check.measured for check in checks)
    assert "nan" not in told.split()


def test_a_likelihood_far_above_a_uniform_guess_is_named_and_a_bound_is_not(open_run):
    """Rows of the table a hundred times as long: confident, and wrong."""
    for kind, verdict in (("autoregressive", "fail"), ("diffusion", "pass")):
        subject = open_run(kind)
        initialise(subject.model, 3)
        with torch.no_grad():
            subject.model.final_norm.weight.mul_(1000)
        check = named(check_values(subject), "held_out_loss_is_possible")
        assert check.verdict == verdict, check
        if verdict == "fail":
            assert "pretrain.learning_rate" in check.first_test
        else:
            assert "a bound may lie above ln V" in check.expected


def test_ln_v_and_the_unigram_entropy_are_shown_and_close_no_gate(open_run, failures):
    """A fresh denoiser's bound lies far above ln V."""
    subject = open_run("diffusion")
    initialise(subject.model, 3)
    check = named(check_values(subject), "held_out_loss_is_possible")
    assert check.verdict == "pass"
    assert f"not below ln V = {math.log(37):.4f}, not below the unigram entropy" in check.measured
