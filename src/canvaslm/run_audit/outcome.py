"""What did the training of the run come to, from its first weights to its last?

A finished run may have learned little: a short one on hard text hardly moves, and no fall of its
loss is a contract. But every parameter has moved, and no run ends worse than a guess that knows
nothing: a loss above ln V is what diverging leaves behind, also where it began before the first row
of the log was written.
"""

import math

import numpy as np
import torch

from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.held_out import standard_error
from canvaslm.run_audit.own_loss import has_guess, own_loss
from canvaslm.run_audit.reading import fresh_model, windows_of
from canvaslm.run_audit.subject import Subject

_ABOVE = 0.01  # of ln V, by which a last loss may lie above it
_RISE = 0.1  # of what fresh weights lose on the same windows, by which it may lie above that
_ERRORS = 3.0  # standard errors that are left to chance in a row of few targets
_SPREAD = 1.0  # nats by which the loss of a token differs from the next one's
_SHOWN = 4
_FORKED = "the run began from another run's weights, which are not at hand"
_MOVED = (
    "see gradients_reach_every_parameter: a parameter that has a gradient there and never moved "
    "is missing from the optimiser of the run, or was put back"
)
_DIVERGED = (
    "lower `pretrain.learning_rate` and `pretrain.muon_learning_rate` tenfold, or raise "
    "`pretrain.warmup_steps`, and train again: a loss that now falls had diverged; one that does "
    "not is for python -m pytest -q "
    "tests/training/test_learner.py::test_a_few_steps_on_the_same_windows_learn_them"
)


def check_moved(subject: Subject, name: str) -> Check:
    """The finished weights against those that the seed draws, parameter by parameter."""
    expected = "every one differs from the initial draw of the seed"
    progress = subject.state.progress
    if subject.state.identity.parent is not None:
        return _not_measured(name, _FORKED, expected, _MOVED)
    if progress.step == len(progress.skipped):
        return _not_measured(name, "no step of the run changed anything", expected, _MOVED)
    finished = dict(subject.model.named_parameters())
    fresh = dict(fresh_model(subject).named_parameters())
    still = [key for key, value in fresh.items() if bool((finished[key].cpu() == value).all())]
    excused = _never_used(subject, still)
    stuck = [key for key in still if key not in excused]
    measured = f"{len(fresh) - len(still)} of {len(fresh)} parameters"
    if stuck:
        measured += f"; not {', '.join(stuck[:_SHOWN])}"
    if excused:
        measured += "; the guess's projection did not, since no window had a guess"
    return decide(
        "updates",
        name,
        holds=not stuck,
        measured=measured,
        expected=expected,
        first_test=_MOVED,
    )


def check_loss(subject: Subject, name: str) -> Check:
    """The last row of the loss log against a uniform guess, and against fresh weights."""
    rows = [row for row in subject.loss_rows if row["loss_nats"]]
    uniform = math.log(subject.recipe.layout.vocab_size)
    expected = (
        f"at most {_ABOVE:.0%} above ln V = {uniform:.4f} and {_RISE:.0%} above what fresh weights "
        "lose on windows of that row, and what chance adds in a row of few targets"
    )
    if not rows:
        return _not_measured(name, "loss.csv has no loss", expected, _DIVERGED)
    fresh, limit = _limit(subject, rows[-1], uniform)
    first, last = float(rows[0]["loss_nats"]), float(rows[-1]["loss_nats"])
    return decide(
        "updates",
        name,
        holds=last <= limit,
        measured=f"{last:.4f} nats per target in the last row of loss.csv, {first:.4f} in the "
        f"first; fresh weights lose {fresh:.4f}",
        expected=f"at most {limit:.4f}: {expected}",
        first_test=_DIVERGED,
    )


def _limit(subject: Subject, row: dict[str, str], uniform: float) -> tuple[float, float]:
    """What fresh weights lose on windows of a row, and what the row may state at most.

    Fresh weights themselves may lie above ln V, by as much as `initial_loss_is_uniform` allows.
    """
    knobs, step = subject.recipe.pretrain, int(row["step"])
    n_windows = ((step - 1) % knobs.log_every + 1) * knobs.windows_per_step
    end = step * knobs.windows_per_step
    n = min(n_windows, subject.params.n_windows)
    losses, n_targets = [], 0
    model = fresh_model(subject)
    for number in (end - 1 - i * n_windows // n for i in range(n)):
        window = torch.from_numpy(windows_of(subject, np.array([number])))
        own = own_loss(subject, model, window, number)
        n_targets += own.n_targets
        losses += [own.nats / own.n_targets] if own.n_targets else []
    fresh = sum(losses) / max(len(losses), 1)
    chance = _ERRORS * _SPREAD / math.sqrt(max(n_targets * n_windows / n, 1))
    sampled = standard_error(np.array(losses)) if len(losses) > 1 else fresh
    highest = max(uniform, fresh) * (1 + _ABOVE)
    if subject.state.identity.parent is None:
        highest = min(highest, fresh * (1 + _RISE) + _ERRORS * sampled)
    return fresh, highest + chance


def _never_used(subject: Subject, names: list[str]) -> list[str]:
    """Of these parameters, those of the guess, in a run none of whose windows had one."""
    guess = [name for name in names if name.startswith("self_conditioning.")]
    consumed = range(subject.state.progress.windows_consumed)
    return [] if not guess or any(has_guess(subject, n) for n in consumed) else guess


def _not_measured(name: str, why: str, expected: str, first_test: str) -> Check:
    return Check(
        group="updates",
        name=name,
        measured=why,
        expected=expected,
        verdict="not_measured",
        first_test=first_test,
    )
