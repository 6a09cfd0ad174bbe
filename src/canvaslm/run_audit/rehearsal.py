"""How does the audit train a little, as the run did and without touching it?

With a learner of the run's shape at its start, on windows of the run. It is not compiled, which
would take longer than its few steps, keeps no samples for a trace, and reads no more than
``n_windows`` windows in a step.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.run_audit.subject import Subject
from canvaslm.training.learner import Learner
from canvaslm.training.loader import open_reader
from canvaslm.training.plan import PretrainParams

_LONGEST = 3  # steps that a rehearsal may take, also of a run that had fewer
_CONSTANT = {"warmup_steps": 0, "final_learning_rate_share": 1.0, "schedule": "cosine"}


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What learning one window by heart came to, in nats per target.

    Attributes:
        first_nats: before the first step.
        last_nats: before the last one.
        n_steps: how many steps were taken.
    """

    first_nats: float
    last_nats: float
    n_steps: int


def fresh_learner(subject: Subject) -> Learner:
    """A learner where the run began."""
    return _learner(subject, _rehearsed(subject))


def take_steps(subject: Subject, learner: Learner, *, first: int, n_steps: int) -> bool:
    """Take steps of the run from number ``first`` on; tell whether all of them were applied."""
    assert first + n_steps <= _LONGEST
    limit, causes = subject.params.n_windows, []
    with open_reader(subject.train, _rehearsed(subject)) as reader:
        for step in range(first, first + n_steps):
            windows, numbers = reader.read(step)
            causes.append(learner.take_step(step, windows[:limit], numbers[:limit]).cause)
    return not any(causes)


def sample_windows(subject: Subject) -> Tensor:
    """Held-out windows spread over the split, (n, T) int64, where the audit computes."""
    n_held_out = len(subject.held_out)
    spread = np.linspace(0, n_held_out - 1, min(subject.params.n_windows, n_held_out))
    windows = subject.held_out.gather(np.unique(spread.astype(np.int64)))
    return torch.from_numpy(windows).to(subject.device)


def learn_one_window(subject: Subject) -> Learned:
    """Train fresh weights on the run's first window until it is known by heart.

    It keeps its number over all steps, so that its draws of noise and of a guess are the same on
    each of them.
    """
    params, pretrain = subject.params, subject.recipe.pretrain
    share = pretrain.muon_learning_rate / pretrain.learning_rate
    changes = _CONSTANT | {
        "steps": params.overfit_steps,
        "learning_rate": params.overfit_learning_rate,
        "muon_learning_rate": params.overfit_learning_rate * share,
        "weight_decay": 0.0,
    }
    knobs = _rehearsed(subject).model_copy(update=changes)
    learner = _learner(subject, knobs)
    with open_reader(subject.train, _rehearsed(subject)) as reader:
        windows, numbers = (part[:1] for part in reader.read(0))
    first = last = float("inf")
    for step in range(params.overfit_steps):
        record = learner.take_step(step, windows, numbers)
        if record.nats is None:
            return Learned(first_nats=first, last_nats=last, n_steps=step)
        last = record.nats / record.targets
        first = last if step == 0 else first
        if last < params.overfit_nats:
            return Learned(first_nats=first, last_nats=last, n_steps=step)
    return Learned(first_nats=first, last_nats=last, n_steps=params.overfit_steps)


def _rehearsed(subject: Subject) -> PretrainParams:
    knobs = subject.recipe.pretrain
    steps = max(knobs.steps, _LONGEST)
    changes = {"steps": steps, "compile": False, "loader_workers": 0, "trace_steps": 0}
    return knobs.model_copy(update=changes)


def _learner(subject: Subject, knobs: PretrainParams) -> Learner:
    recipe = dataclasses.replace(subject.recipe, pretrain=knobs)
    return Learner(recipe, subject.job.objective, subject.device)
