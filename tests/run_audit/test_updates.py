"""Is every way in which a gradient can fail to become its update told by its own name?"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from canvaslm.checkpoint_state import Identity
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.objective.targets import LossSum
from canvaslm.run_audit import drill as drill_module
from canvaslm.run_audit.applied import applied_rate
from canvaslm.run_audit.drill import drill, drill_numbers, drill_steps, highest_step
from canvaslm.run_audit.outcome import check_loss
from canvaslm.run_audit.own_loss import has_guess
from canvaslm.run_audit.rates import due_rate
from canvaslm.run_audit.updates import check_updates
from canvaslm.training import learner, muon, optimizer
from canvaslm.training.learner import Learner
from canvaslm.training.plan import learning_rate
from canvaslm.training.weight_average import begin_average, follow_weights

KINDS = ("diffusion", "prefix", "autoregressive", "muon")
OPTIONS = ("default", "phased", "biased", "previous", "bound")
OBJECTIVES = ("diffusion", "autoregressive")
FROZEN = "blocks.1.feed_forward.up.weight"


def named(checks, name):
    return next(check for check in checks if check.name == name)


def with_knobs(subject, **knobs):
    """The same run by other knobs; what it wrote stays as it is."""
    pretrain = subject.recipe.pretrain.model_copy(update=knobs)
    return replace(subject, recipe=replace(subject.recipe, pretrain=pretrain))


@pytest.mark.parametrize("kind", KINDS + OPTIONS)
def test_a_clean_run_passes_and_is_left_as_it_was(open_run, failures, kind):
    subject = open_run(kind)
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    checks = check_updates(subject)
    assert failures(checks) == [], checks
    assert {check.verdict for check in checks} == {"pass"}
    for name, value in subject.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_frozen_parameter_is_named_first(open_run, failures, kind, monkeypatch):
    plain = Learner.__init__

    def frozen(self, *arguments):
        plain(self, *arguments)
        self.model.get_parameter(FROZEN).requires_grad_(False)

    monkeypatch.setattr(Learner, "__init__", frozen)
    checks = check_updates(open_run(kind))
    assert failures(checks)[0] == "gradients_reach_every_parameter"
    assert f"{FROZEN} asks for no gradient" in checks[0].measured


def test_a_parameter_that_the_optimiser_does_not_list_is_named(open_run, monkeypatch):
    def without_one(model, params):
        made = optimizer.make_optimizer(model, params)
        for group in made.param_groups:
            kept = [p for p in group["params"] if p is not model.get_parameter(FROZEN)]
            group["params"] = kept
        return made

    monkeypatch.setattr(learner, "make_optimizer", without_one)
    first = check_updates(open_run("autoregressive"))[0]
    assert (first.name, first.verdict) == ("gradients_reach_every_parameter", "fail")
    assert f"{FROZEN} is listed 0 times by the optimiser" in first.measured


def test_a_part_that_is_cut_off_from_the_loss_is_named(open_run, monkeypatch):
    """The parameter asks for a gradient, and gets one of 0."""
    plain = nn.Linear.forward

    def cut(self, x):
        return plain(self, x).detach() if self.out_features == 8 else plain(self, x)

    monkeypatch.setattr(nn.Linear, "forward", cut)  # keys and values: 2 heads of 4
    first = check_updates(open_run("autoregressive"))[0]
    assert first.verdict == "fail"
    assert "blocks.0.attention.key.weight has a gradient of exactly 0" in first.measured


def test_the_guess_s_projection_is_excused_only_where_no_window_has_a_guess(
    open_run, failures, monkeypatch
):
    subject = open_run("diffusion")
    share = subject.recipe.diffusion.model_copy(update={"self_conditioning_share": 0.0})
    recipe = replace(subject.recipe, diffusion=share)
    objective = replace(subject.job.objective, diffusion=share)
    unguessed = replace(subject, recipe=recipe, job=replace(subject.job, objective=objective))
    first = check_updates(unguessed)[0]
    assert first.verdict == "pass"
    assert "no window has a guess" in first.expected
    monkeypatch.setattr(
        type(objective), "_draw_guess_rows", lambda self, params, numbers: torch.zeros(0).bool()
    )
    first = check_updates(subject)[0]
    assert first.verdict == "fail"
    assert "self_conditioning.projection.weight has a gradient of exactly 0" in first.measured


def test_a_gradient_that_is_not_finite_is_named(open_run, failures):
    subject = open_run("autoregressive")

    class Poisoned:
        def loss(self, model, windows, numbers):
            loss = subject.job.objective.loss(model, windows, numbers)
            endless = (model.final_norm.weight[0] - model.final_norm.weight[0].detach()).sqrt()
            return LossSum(nats=loss.nats + endless, n_targets=loss.n_targets)

        def flops_of_first(self, params, n_windows):
            return 1.0

    poisoned = replace(subject, job=replace(subject.job, objective=Poisoned()))
    checks = check_updates(poisoned)
    assert failures(checks)[0] == "gradients_are_finite"
    assert "not finite: final_norm.weight; a step was refused" in checks[1].measured


def test_a_mean_of_means_is_named(open_run, failures, monkeypatch):
    plain = Learner._sum_gradients

    def means(self, windows, numbers):
        """The gradients of the parts' means, scaled so that dividing once gives their mean."""
        size = self._params.micro_batch_windows
        starts, totals, sums = range(0, len(windows), size), [0.0, 0], []
        for start in starts:
            part = slice(start, start + size)
            nats, n_targets = plain(self, windows[part], numbers[part])
            sums.append([p.grad / n_targets for p in self.model.parameters()])
            totals = [totals[0] + nats, totals[1] + n_targets]
        for parameter, *gradients in zip(self.model.parameters(), *sums, strict=True):
            parameter.grad.copy_(sum(gradients) * totals[1] / len(starts))
        return tuple(totals)

    monkeypatch.setattr(Learner, "_sum_gradients", means)
    assert failures(check_updates(open_run("autoregressive"))) == ["accumulation_is_only_a_cut"]


def test_a_run_of_one_window_a_step_cannot_be_cut(open_run):
    check = named(
        check_updates(with_knobs(open_run("autoregressive"), windows_per_step=1)),
        "accumulation_is_only_a_cut",
    )
    assert check.verdict == "not_measured"


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_rate_of_0_is_named_first(open_run, failures, kind, monkeypatch):
    def lost(made, *, learning_rate, norm, max_norm):
        optimizer.update(made, learning_rate=0.0, norm=norm, max_norm=max_norm)

    monkeypatch.setattr(learner, "update", lost)
    assert failures(check_updates(open_run(kind)))[0] == "learning_rate_is_applied"


def test_finished_weights_that_are_the_initial_ones_are_named(open_run, failures):
    """The rate was 0 when the run was trained, and no longer is."""
    subject = open_run("autoregressive")
    initialise(subject.model, 3)
    checks = check_updates(subject)
    assert failures(checks) == ["learning_rate_is_applied", "every_trainable_parameter_moved"]
    assert "0.0% of the finished weights" in named(checks, "learning_rate_is_applied").measured


def test_clipping_after_the_step_is_named(open_run, failures, monkeypatch):
    def late(made, *, learning_rate, norm, max_norm):
        optimizer.update(made, learning_rate=learning_rate, norm=norm, max_norm=1e30)
        parameters = [p for group in made.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    monkeypatch.setattr(learner, "update", late)
    assert failures(check_updates(open_run("autoregressive")))[0] == "clipping_precedes_the_update"


def test_a_norm_that_is_logged_after_clipping_is_named(open_run, failures, monkeypatch):
    """The gradient is clipped where it is averaged, and what is logged is what is left."""
    limits, plain = [], Learner.__init__

    def init(self, recipe, *arguments):
        plain(self, recipe, *arguments)
        limits.append(recipe.pretrain.max_gradient_norm)

    def clipped(model, n_targets):
        norm = optimizer.average(model, n_targets)
        nn.utils.clip_grads_with_norm_(model.parameters(), limits[-1], norm)
        return norm.clamp(max=limits[-1])

    monkeypatch.setattr(Learner, "__init__", init)
    monkeypatch.setattr(learner, "average", clipped)
    assert failures(check_updates(open_run("autoregressive")))[0] == "clipping_precedes_the_update"


@pytest.mark.parametrize("decays", [True, False])
def test_decay_of_the_wrong_parameters_is_named(open_run, failures, monkeypatch, decays):
    monkeypatch.setattr(optimizer, "_decays", lambda name, parameter: decays)
    checks = check_updates(open_run("diffusion"))
    assert failures(checks) == ["update_is_adamw"]
    wrong = "final_norm.weight 0.1" if decays else "embedding.weight"
    told = named(checks, "update_is_adamw")
    assert "another decay: " in told.measured
    assert "test_matrices_decay" in told.first_test
    assert wrong in told.measured or decays


def test_another_memory_of_the_gradient_is_named(open_run, failures, monkeypatch):
    def forgetful(model, params):
        return optimizer.make_optimizer(model, params.model_copy(update={"beta1": 0.5}))

    monkeypatch.setattr(learner, "make_optimizer", forgetful)
    found = failures(check_updates(open_run("autoregressive")))
    assert "update_is_adamw" in found
    assert "learning_rate_is_applied" not in found


def _names(checks):
    return [check.name for check in checks]


def test_a_run_under_muon_is_asked_of_both_rules_and_of_its_average(open_run):
    checks = check_updates(open_run("muon"))
    asked = {"update_is_adamw", "update_is_muon", "average_follows_the_weights"}
    assert asked <= set(_names(checks))
    assert not (asked - {"update_is_adamw"}) & set(_names(check_updates(open_run("diffusion"))))
    told = named(checks, "update_is_muon").measured
    assert "the decay can be told of 14 of 14 parameters" in told
    assert " of Muon" in named(checks, "learning_rate_is_applied").measured


def without_nesterov(self, matrix, gradient, group):
    """The mean itself is made orthogonal."""
    mean = self.state[matrix]["momentum_buffer"]
    mean.lerp_(gradient, 1 - group["momentum"])
    size = 0.2 * max(matrix.shape) ** 0.5
    matrix.mul_(1 - group["lr"] * group["weight_decay"])
    matrix.add_(muon.orthogonalise(mean), alpha=-group["lr"] * size)


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (muon.Muon, "_move", without_nesterov),
        (muon, "_ITERATIONS", 4),
        (muon, "_QUINTIC", (1.5, -0.5, 0.0)),
    ],
)
def test_another_direction_under_muon_is_named(open_run, failures, monkeypatch, place, name, wrong):
    monkeypatch.setattr(place, name, wrong)
    checks = check_updates(open_run("muon"))
    found = failures(checks)
    assert "update_is_muon" in found, checks
    assert "update_is_adamw" not in found
    assert "average_follows_the_weights" not in found


def test_another_decay_under_muon_is_named(open_run, failures, monkeypatch):
    def without_decay(model, params):
        made = optimizer.make_optimizer(model, params)
        made.param_groups[2]["weight_decay"] = 0.0
        return made

    monkeypatch.setattr(learner, "make_optimizer", without_decay)
    checks = check_updates(open_run("muon"))
    assert failures(checks) == ["update_is_muon"]
    assert "test_matrices_decay" in named(checks, "update_is_muon").first_test


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_rate_of_muon_that_is_not_its_own_is_named(open_run, failures, monkeypatch, share):
    def at_another_rate(model, params):
        made = optimizer.make_optimizer(model, params)
        made.param_groups[2]["rate_share"] = share
        return made

    monkeypatch.setattr(learner, "make_optimizer", at_another_rate)
    checks = check_updates(open_run("muon"))
    due = "learning_rate_follows_schedule" if share else "learning_rate_is_applied"
    assert failures(checks)[0] == due
    assert " of Muon" in named(checks, due).measured


def test_a_mean_that_sees_more_than_clipping_left_is_named(open_run, failures, monkeypatch):
    def late(made, *, learning_rate, norm, max_norm):
        optimizer.update(made, learning_rate=learning_rate, norm=norm, max_norm=1e30)
        parameters = [p for group in made.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    monkeypatch.setattr(learner, "update", late)
    assert failures(check_updates(open_run("muon")))[0] == "clipping_precedes_the_update"


def test_adamw_in_muon_s_place_is_named(open_run, failures, monkeypatch):
    """The finished state cannot be restored into it; fresh weights are drilled all the same."""
    monkeypatch.setattr(optimizer, "moves_by_muon", lambda name, parameter, params: False)
    monkeypatch.setattr(drill_module, "restore", lambda directory, *, model, optimizer: None)
    checks = check_updates(open_run("muon"))
    assert "update_is_muon" in failures(checks)
    told = named(checks, "update_is_muon")
    assert told.measured.startswith("14 parameters are moved otherwise: blocks.0.")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda optimizer, decay: None,  # it stays where it was
        lambda optimizer, decay: follow_weights(optimizer, decay / 2),
        lambda optimizer, decay: begin_average(optimizer),  # it is the weights
    ],
)
@pytest.mark.parametrize("decay", [0.6, 0.999])
def test_an_average_that_goes_another_way_is_named(open_run, failures, monkeypatch, wrong, decay):
    monkeypatch.setattr(learner, "follow_weights", wrong)
    subject = with_knobs(open_run("muon"), ema_decay=decay)
    assert failures(check_updates(subject)) == ["average_follows_the_weights"]


def test_a_parameter_without_an_average_is_named(open_run, failures, monkeypatch):
    def without_one(model, params):
        made = optimizer.make_optimizer(model, params)
        for state in made.state.values():
            state.pop("ema")
        return made

    monkeypatch.setattr(learner, "make_optimizer", without_one)
    monkeypatch.setattr(learner, "follow_weights", lambda optimizer, decay: None)
    monkeypatch.setattr(drill_module, "restore", lambda directory, *, model, optimizer: None)
    found = failures(check_updates(open_run("muon")))
    assert found == ["average_follows_the_weights"]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_schedule_that_counts_micro_batches_is_named_first(open_run, failures, kind, monkeypatch):
    """Even where the run's own steps had a single pass, so that its log is right."""
    plain, passes = Learner.take_step, [1]

    def count(self, step, windows, numbers):
        passes[0] = -(-len(windows) // self._params.micro_batch_windows)
        return plain(self, step, windows, numbers)

    monkeypatch.setattr(Learner, "take_step", count)
    monkeypatch.setattr(
        learner,
        "learning_rate",
        lambda step, params: learning_rate(min(step * passes[0], params.steps - 1), params),
    )
    checks = check_updates(open_run(kind))
    assert failures(checks) == ["learning_rate_follows_schedule"]
    measured = named(checks, "learning_rate_follows_schedule").measured
    assert "6 of 6 rows of loss.csv" in measured


def test_a_schedule_that_begins_anew_after_each_step_is_named(open_run, failures, monkeypatch):
    monkeypatch.setattr(learner, "learning_rate", lambda step, params: learning_rate(0, params))
    assert failures(check_updates(open_run("autoregressive"))) == ["learning_rate_follows_schedule"]


def test_a_logged_rate_that_is_not_the_plan_s_is_named(open_run, failures):
    subject = open_run("autoregressive")
    subject.loss_rows[2]["learning_rate"] = "0.00123"
    checks = check_updates(subject)
    assert failures(checks) == ["learning_rate_follows_schedule"]
    measured = named(checks, "learning_rate_follows_schedule").measured
    assert "5 of 6 rows of loss.csv (step 5: 0.00123, not 0.00" in measured


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("schedule", "decay"), [("cosine", 0), ("warmup_stable_decay", 9)])
def test_the_plan_stated_twice_is_one_plan(open_run, warmup, share, schedule, decay):
    params = open_run("autoregressive").recipe.pretrain.model_copy(
        update={
            "steps": 30,
            "warmup_steps": warmup,
            "schedule": schedule,
            "decay_steps": decay,
            "final_learning_rate_share": share,
        }
    )
    for step in range(30):
        due = learning_rate(step, params)
        assert due_rate(step, params) == pytest.approx(due, abs=1e-12)
        share = params.muon_learning_rate / params.learning_rate
        assert due_rate(step, params, rule="muon") == pytest.approx(due * share, abs=1e-12)


def test_a_parameter_that_never_moved_is_named(open_run, failures):
    subject = open_run("autoregressive")
    fresh = {name: value.clone() for name, value in subject.model.state_dict().items()}
    initialise(subject.model, 3)
    for name, parameter in subject.model.named_parameters():
        if name != FROZEN:
            parameter.data.copy_(fresh[name])
    checks = check_updates(subject)
    assert failures(checks) == ["every_trainable_parameter_moved"]
    assert FROZEN in named(checks, "every_trainable_parameter_moved").measured


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_run_that_ends_above_a_uniform_guess_is_named_whatever_its_first_row(open_run, kind):
    """A run that diverged before its first row was written ends lower than that row."""
    subject, uniform = open_run(kind), math.log(37)
    subject.loss_rows[0]["loss_nats"] = str(9 * uniform)
    for factor, verdict in ((0.9, "pass"), (1.0, "pass"), (1.15, "fail"), (8.0, "fail")):
        subject.loss_rows[-1]["loss_nats"] = str(uniform * factor)
        check = check_loss(subject, "training_loss_is_below_uniform")
        assert check.verdict == verdict, check
        assert "pretrain.learning_rate" in check.first_test
        assert "pretrain.muon_learning_rate" in check.first_test
        assert "pretrain.warmup_steps" in check.first_test


def test_a_row_of_many_targets_leaves_little_to_chance(open_run):
    """What a finite run that diverged came down to again: 3 % above ln V."""
    subject = open_run("diffusion")
    wide = with_knobs(subject, windows_per_step=512)
    wide.loss_rows[-1]["loss_nats"] = str(1.03 * math.log(37))
    assert check_loss(wide, "training_loss_is_below_uniform").verdict == "fail"


@pytest.mark.parametrize("decays", [None, True, False])
@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("rate", [1e-5, 3e-5, 1e-4, 1e-2])
def test_decay_is_told_from_rounding_at_any_rate(
    open_run, failures, monkeypatch, kind, rate, decays
):
    """Weights that are still almost 0 have none that could be told; a norm's 1 moves by ulps."""
    subject = with_knobs(open_run(kind), learning_rate=rate)
    torch.manual_seed(0)
    fresh = Backbone(subject.recipe.model, subject.recipe.layout)
    initialise(fresh, 3)
    for name, parameter in fresh.named_parameters():
        if name.startswith("self_conditioning."):
            nn.init.normal_(parameter, std=rate)
    subject.model.load_state_dict(fresh.state_dict())
    moments = _moments_of(fresh)
    if decays is not None:
        monkeypatch.setattr(optimizer, "_decays", lambda name, parameter: decays)

    def restored(directory, *, model, optimizer):
        model.load_state_dict(fresh.state_dict())
        for name, parameter in model.named_parameters():
            optimizer.state[parameter] = {key: x.clone() for key, x in moments[name].items()}

    monkeypatch.setattr(drill_module, "restore", restored)
    check = named(check_updates(subject), "update_is_adamw")
    assert check.verdict == ("pass" if decays is None else "fail"), check


def _moments_of(model):
    """AdamW's state after twenty small gradients."""
    return {
        name: {
            "exp_avg": torch.randn_like(p) * 1e-3,
            "exp_avg_sq": torch.rand_like(p) * 1e-6,
            "step": torch.tensor(20.0),
        }
        for name, p in model.named_parameters()
    }


def test_of_a_fork_nothing_is_compared_with_the_draw_of_its_seed(open_run):
    subject = open_run("autoregressive")
    parent = {"identity": "p", "step": 3, "model_sha256": "m"}
    told = subject.state.identity.model_dump() | {"parent": parent}
    identity = Identity.model_validate(told)
    fork = replace(subject, state=subject.state.model_copy(update={"identity": identity}))
    verdicts = {check.name: check.verdict for check in check_updates(fork)}
    assert verdicts.pop("every_trainable_parameter_moved") == "not_measured"
    assert set(verdicts.values()) == {"pass"}


def test_a_rate_is_read_off_an_update_of_the_finished_state(open_run):
    """Nobody is asked for it."""
    subject = open_run("diffusion")
    for step in (0, 2, 9):
        seen = next(drill(subject, steps=[step], passes=2, from_checkpoint=True))
        due = learning_rate(step, subject.recipe.pretrain)
        assert applied_rate(seen, subject.recipe.pretrain).value == pytest.approx(due, rel=1e-3)
        assert all(moments.n_updates == 12 for moments in seen.moments_before.values())


@pytest.mark.parametrize(
    ("steps", "warmup", "expected", "highest"),
    [(12, 3, [1, 2, 3], 2), (12, 0, [0], 0), (1, 1, [0], 0), (5, 5, [2, 3, 4], 4), (2, 0, [0], 0)],
)
def test_drilled_steps_are_steps_of_the_run(open_run, steps, warmup, expected, highest):
    subject = with_knobs(open_run("autoregressive"), steps=steps, warmup_steps=warmup)
    assert drill_steps(subject) == expected
    assert highest_step(subject) == highest


def test_a_window_with_a_guess_is_drilled_where_there_is_one(open_run):
    subject = open_run("diffusion")
    found = []
    for seed in range(30):
        seeded = with_knobs(subject, seed=seed, windows_per_step=2)
        numbers = drill_numbers(seeded)
        assert len(set(numbers.tolist())) == 2
        assert any(has_guess(seeded, int(number)) for number in numbers)
        found.append(numbers.tolist() == [0, 1])
    assert not all(found), "some seed must give the first two windows no guess"


def test_a_large_window_is_drilled_in_few_rows():
    recipe = SimpleNamespace(
        layout=SimpleNamespace(window_tokens=4096),
        pretrain=SimpleNamespace(windows_per_step=32, seed=1),
        diffusion=None,
        first_phase_windows=0,
    )
    progress = SimpleNamespace(windows_consumed=64)
    subject = SimpleNamespace(recipe=recipe, state=SimpleNamespace(progress=progress))
    assert drill_numbers(subject).tolist() == [0, 1]  # pyright: ignore[reportArgumentType]
