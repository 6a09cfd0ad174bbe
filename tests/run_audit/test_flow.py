"""Is every way in which a prediction can see too much, or too little, told by its own name?"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from canvaslm.model import backbone, layers
from canvaslm.model.attention import canvas_attention, causal_attention
from canvaslm.model.backbone import Backbone
from canvaslm.model.packed import PackedBackbone
from canvaslm.model.self_conditioning import SelfConditioning
from canvaslm.run_audit import interventions
from canvaslm.run_audit.flow import check_flow
from canvaslm.run_audit.interventions import Window
from canvaslm.run_audit.reading import Reading, denoised_logits, on_cpu, read_window

DENOISERS = ("diffusion", "prefix")


@pytest.mark.parametrize(
    "kind",
    ["diffusion", "prefix", "autoregressive", "default", "phased", "biased", "previous", "single"],
)
def test_a_clean_run_passes_and_is_left_as_it_was(open_run, failures, kind):
    subject = open_run(kind)
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    checks = check_flow(subject)
    assert failures(checks) == [], checks
    assert {check.verdict for check in checks} == {"pass"}
    assert not subject.model.training
    for name, value in subject.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_ledger_stands_in_the_report(open_run):
    told = {check.name: check for check in check_flow(open_run("diffusion"))}
    measured = told["parameters_add_up"].measured
    assert "embedding 640, " in measured  # 40 rows, 3 of them padding
    assert "2 blocks of " in measured
    assert told["padded_rows_are_unseen"].measured.startswith("40 rows in the table, 3 of them")


@pytest.mark.parametrize("kind", DENOISERS)
def test_a_canvas_that_sees_its_own_clean_copy_is_named_so(open_run, failures, kind, monkeypatch):
    """``>=`` for ``>``: nothing later leaks, so no other check of a mask fails before it."""

    def leaky(q, k, v, clean_k, clean_v, *, canvas_tokens, start):
        return canvas_attention(
            q, k, v, clean_k, clean_v, canvas_tokens=canvas_tokens, start=start + canvas_tokens
        )

    monkeypatch.setattr(backbone, "canvas_attention", leaky)
    found = failures(check_flow(open_run(kind)))
    assert found[0] == "own_clean_copy_is_unseen"
    assert "later_canvases_are_unseen" not in found


def see_everything(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("diffusion", "later_canvases_are_unseen"), ("autoregressive", "later_tokens_are_unseen")],
)
def test_a_clean_stream_without_a_mask_is_named(open_run, failures, kind, name, monkeypatch):
    monkeypatch.setattr(backbone, "causal_attention", see_everything)
    assert failures(check_flow(open_run(kind)))[0] == name


def test_a_clean_stream_that_sees_its_own_canvas_both_ways_is_named(
    open_run, failures, monkeypatch
):
    """No later canvas leaks, but a prompt that ends inside a canvas would be read otherwise."""

    def block(q, k, v):
        return backbone.block_causal_attention(q, k, v, canvas_tokens=4)

    monkeypatch.setattr(backbone, "causal_attention", block)
    assert failures(check_flow(open_run("diffusion")))[0] == "later_tokens_are_unseen"


def test_a_later_noisy_canvas_in_one_stream_is_named(open_run, failures, monkeypatch):
    def leaky(q, k, v, *, canvas_tokens):
        return see_everything(q, k, v)

    monkeypatch.setattr(backbone, "block_causal_attention", leaky)
    assert failures(check_flow(open_run("prefix")))[0] == "later_canvases_are_unseen"


def test_a_noisy_canvas_that_reads_another_is_named(open_run, failures, monkeypatch):
    def leaky(q, k, v, clean_k, clean_v, *, canvas_tokens, start):
        return causal_attention(q, k, v)  # noisy context in place of clean

    monkeypatch.setattr(backbone, "canvas_attention", leaky)
    assert failures(check_flow(open_run("diffusion")))[0] == "other_noisy_canvases_are_unseen"


def test_context_that_is_ignored_is_named(open_run, failures, monkeypatch):
    def blind(q, k, v, clean_k, clean_v, *, canvas_tokens, start):
        return canvas_attention(
            q, k, v, clean_k * 0, clean_v * 0, canvas_tokens=canvas_tokens, start=start
        )

    monkeypatch.setattr(backbone, "canvas_attention", blind)
    assert failures(check_flow(open_run("diffusion")))[0] == "earlier_canvases_are_seen"


def test_a_twin_that_ignores_earlier_tokens_is_named(open_run, failures, monkeypatch):
    monkeypatch.setattr(backbone, "causal_attention", lambda q, k, v: torch.zeros_like(q))
    assert failures(check_flow(open_run("autoregressive")))[0] == "earlier_tokens_are_seen"


def test_a_canvas_that_sees_one_way_only_is_named(open_run, failures, monkeypatch):
    def one_way(q, k, v, clean_k, clean_v, *, canvas_tokens, start):
        parts = []
        for b, own in enumerate(q.split(canvas_tokens, dim=2)):
            end = start + b * canvas_tokens
            here = slice(b * canvas_tokens, (b + 1) * canvas_tokens)
            keys = torch.cat((clean_k[:, :, :end], k[:, :, here]), dim=2)
            values = torch.cat((clean_v[:, :, :end], v[:, :, here]), dim=2)
            parts.append(causal_attention(own, keys, values))
        return torch.cat(parts, dim=2)

    monkeypatch.setattr(backbone, "canvas_attention", one_way)
    assert failures(check_flow(open_run("diffusion")))[0] == "own_noisy_tokens_are_seen"


def test_times_that_are_ignored_are_named(open_run, failures, monkeypatch):
    monkeypatch.setattr(
        layers.TimeEmbedding,
        "forward",
        lambda self, times: torch.zeros(*times.shape, self.outer.out_features),
    )
    assert failures(check_flow(open_run("diffusion"))) == ["times_are_seen"]


@pytest.mark.parametrize("kind", DENOISERS)
def test_a_guess_that_is_lost_is_named(open_run, failures, kind, monkeypatch):
    monkeypatch.setattr(
        SelfConditioning, "forward", lambda self, guess, has_guess: torch.zeros_like(guess)
    )
    assert failures(check_flow(open_run(kind))) == ["guess_is_seen"]


def test_a_projection_of_0_adds_nothing_and_is_told(open_run, failures):
    """As in a run whose learning rate was 0, which is for another group to name."""
    subject = open_run("diffusion")
    with torch.no_grad():
        for parameter in subject.model.self_conditioning.parameters():
            parameter.zero_()
    checks = {check.name: check for check in check_flow(subject)}
    assert failures(list(checks.values())) == []
    assert "exactly 0" in checks["guess_is_seen"].measured


def test_a_guess_that_enters_past_its_projection_is_named(open_run, failures, monkeypatch):
    subject = open_run("diffusion")
    with torch.no_grad():
        for parameter in subject.model.self_conditioning.parameters():
            parameter.zero_()
    monkeypatch.setattr(SelfConditioning, "forward", lambda self, guess, has_guess: guess)
    assert failures(check_flow(subject)) == ["guess_is_seen"]


def test_padded_rows_that_reach_the_logits_are_named(open_run, failures, monkeypatch):
    monkeypatch.setattr(Backbone, "head_weight", property(lambda self: self.embedding.weight))
    assert failures(check_flow(open_run("autoregressive"))) == ["padded_rows_are_unseen"]


def test_a_network_with_two_modes_is_named(open_run, failures, monkeypatch):
    plain = layers.FeedForward.forward

    def dropped(self, x):
        y = plain(self, x)
        return y * 0.9 if self.training else y

    monkeypatch.setattr(layers.FeedForward, "forward", dropped)
    subject = open_run("diffusion")
    assert failures(check_flow(subject)) == ["train_and_eval_agree"]
    assert not subject.model.training


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_a_cache_that_counts_positions_from_0_is_named(open_run, failures, kind, monkeypatch):
    plain = PackedBackbone._turns
    monkeypatch.setattr(
        PackedBackbone,
        "_turns",
        lambda self, places: plain(self, [range(x.stop - x.start) for x in places]),
    )
    assert failures(check_flow(open_run(kind))) == ["cached_decoding_agrees"]


def test_a_parameter_too_many_is_named_with_the_sums(open_run):
    subject = open_run("diffusion")
    subject.model.spare = nn.Parameter(torch.zeros(5))
    first = check_flow(subject)[0]
    assert (first.name, first.verdict) == ("parameters_add_up", "fail")
    due = sum(p.numel() for p in subject.model.parameters()) - 5
    assert f"the modules: {due + 5}" in first.measured
    assert f"the file: {due}" in first.measured


def test_a_layer_that_stands_twice_is_named(open_run, failures):
    subject = open_run("diffusion")
    subject.model.blocks[1].feed_forward.up = subject.model.blocks[0].feed_forward.up
    assert "every_layer_is_registered_once" in failures(check_flow(subject))


def test_a_head_of_its_own_is_no_entry_of_the_ledger(open_run, failures):
    """It equals the table, so the sums say nothing of it; head_is_tied does."""
    subject = open_run("diffusion")
    subject.model.spare = nn.Parameter(subject.model.embedding.weight.detach().clone())
    assert failures(check_flow(subject)) == []


def test_a_change_leaves_no_token_as_it_was_and_everything_else(open_run):
    reading = read_window(open_run("diffusion"))
    for seed in range(50):
        changed = reading.changed("noisy", slice(3, 9), seed=seed)
        differs = (changed.noisy != reading.noisy)[0].tolist()
        assert differs == [3 <= place < 9 for place in range(16)]
        assert changed.noisy.min() >= 0
        assert changed.noisy.max() < 37
        assert torch.equal(changed.clean, reading.clean)
        assert torch.equal(changed.times, reading.times)
    slower = reading.changed("times", slice(1, 2), seed=0)
    assert (slower.times != reading.times)[0].tolist() == [False, True, False, False]


def test_the_only_other_token_of_two_is_taken():
    ones = torch.ones(1, 4, dtype=torch.int64)
    reading = Reading(clean=ones, noisy=ones, times=torch.ones(1, 1), vocab_size=2)
    assert reading.changed("clean", slice(None), seed=0).clean.tolist() == [[0, 0, 0, 0]]


def test_many_places_are_sampled_with_both_ends(open_run):
    subject = open_run("diffusion")
    model = on_cpu(subject.model)
    window = Window(model, model, read_window(subject), seed=1)
    assert window.some(1, 4) == [1, 2, 3]
    places = window.some(1, 4096)
    assert (places[0], places[-1], len(places)) == (1, 4095, 16)
    assert places == sorted(set(places))
    assert places == window.some(1, 4096)


def test_the_window_has_the_noise_of_its_training(open_run, monkeypatch):
    """The denoiser's first window, as the objective corrupts it; the twin's is shifted."""
    subject, given = open_run("diffusion"), {}
    model, reading = subject.model, read_window(subject)
    encode, denoise = model.encode_context, model.denoise

    def look_at_clean(ids):
        given["clean"] = ids
        return encode(ids)

    def look_at_noisy(ids, times, **rest):
        given.update(noisy=ids, times=times)
        return denoise(ids, times, **rest)

    monkeypatch.setattr(model, "encode_context", look_at_clean)
    monkeypatch.setattr(model, "denoise", look_at_noisy)
    subject.job.objective.loss(model, reading.clean, np.array([0]))
    assert all(torch.equal(given[part], getattr(reading, part)) for part in given)
    assert len(given) == 3
    twin = read_window(open_run("autoregressive"))
    assert twin.clean[0, 0] == 0
    assert torch.equal(twin.clean[:, 1:], reading.clean[:, :-1])


def test_what_a_model_has_learned_to_ignore_is_no_fault_but_ignoring_all_is(open_run, failures):
    """At its last time a canvas is all noise, which a good model looks through."""
    subject = open_run("diffusion")
    with torch.no_grad():
        for block in subject.model.blocks:
            block.attention.output.weight.zero_()
    found = failures(check_flow(subject))
    assert {"earlier_canvases_are_seen", "own_noisy_tokens_are_seen"} <= set(found)
    late = read_window(open_run("diffusion"))
    blind = open_run("diffusion")
    assert float(late.times.max()) == 1.0, "some canvas must be at its last time"
    plain = denoised_logits

    def looks_through_noise(model, reading):
        """The trained model sees the first window's noise wherever a canvas is all noise."""
        if model is not blind.model:
            return plain(model, reading)
        is_late = (late.times == 1.0).repeat_interleave(4, dim=1)
        return plain(model, replace(reading, noisy=torch.where(is_late, late.noisy, reading.noisy)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(interventions._PATHS, "noisy canvases", looks_through_noise)
        checks = {check.name: check for check in check_flow(blind)}
    assert failures(list(checks.values())) == []
    assert not checks["own_noisy_tokens_are_seen"].measured.startswith("4 of 4")
