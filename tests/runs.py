"""Runs that tests stop, poison and finish."""

import csv
import itertools
import math

import numpy as np

from canvaslm.objective.targets import LossSum
from canvaslm.reporting.progress import untracked
from canvaslm.training.identity import identity_name
from canvaslm.training.job import Job, make_job
from canvaslm.training.run import pretrain

OUTS = (
    "out/model.safetensors",
    "out/optimizer.safetensors",
    "out/state.json",
    "reports/loss.csv",
    "reports/metrics.json",
)


class StoppedError(Exception):
    """Stands for whatever ends a process between two steps."""


def stop_after(n_steps):
    """A track that ends the loop after so many steps."""

    def track(items, *, total, label):
        del total, label
        yield from itertools.islice(items, n_steps)
        raise StoppedError

    return track


class Poisoned:
    """An objective whose loss is NaN on some window numbers."""

    def __init__(self, inner, numbers):
        self.inner = inner
        self.numbers = numbers

    def loss(self, model, windows, numbers):
        loss = self.inner.loss(model, windows, numbers)
        bad = bool(np.isin(numbers, self.numbers).any())
        return LossSum(nats=loss.nats * (math.nan if bad else 1.0), n_targets=loss.n_targets)

    def flops_of_first(self, params, n_windows):
        return self.inner.flops_of_first(params, n_windows)


def job_of(recipe, shards, *, poison=(), code="c"):
    job = make_job(recipe, shards=shards, code_digest=code)
    objective = Poisoned(job.objective, list(poison)) if poison else job.objective
    return Job(recipe=job.recipe, objective=objective, windows=job.windows, identity=job.identity)


def finish(job, place, track=untracked):
    pretrain(job, work=place / "work", out=place / "out", reports=place / "reports", track=track)
    return {name: (place / name).read_bytes() for name in OUTS}


def folder(job, place):
    return place / "work" / identity_name(job.identity)


def loss_rows(place):
    with (place / "reports" / "loss.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))
