"""What does the run lose on text that it has not seen, and is that possible at all?

A loss below what the text's own law costs is no success: then the answer has leaked into the input.
The law is known of a synthetic corpus alone. A likelihood clearly above ln V is no success either:
a uniform guess does better, so the run has diverged. Of the denoiser's bound that is said and not
held against the run, since a posterior that is still flat has a bound far above ln V
(docs/bound.md).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from canvaslm.corpus.entropy import entropy_nats
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.subject import Subject

_MOST_COUNTED = 4096  # training windows behind the unigram entropy, spread over the split
_ERRORS = 3.0  # standard errors that the loss may lie below the floor by accident
_TIMES = 16  # of the bound of a run whose times are continuous
_ABOVE = 0.5  # of ln V, by which a likelihood may lie above it, as that of memorised text does
_DIVERGED = (
    "see training_loss_is_below_uniform: where it fails too, the run diverged, so lower "
    "`pretrain.learning_rate` and `pretrain.muon_learning_rate` or raise `pretrain.warmup_steps`; "
    "where it passes, the training text was learned by heart, so lower `pretrain.steps` or take "
    "more text"
)
_BOUND = (
    "python -m pytest -q "
    "tests/diffusion/test_bound.py::test_no_prediction_goes_below_the_entropy_of_a_markov_source"
)


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Loss on held-out windows.

    Attributes:
        nats: (n,) nats per token of each window.
        bytes_per_token: (n,) bytes of text per token of each window.
    """

    nats: np.ndarray
    bytes_per_token: np.ndarray

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.nats.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean, over windows; NaN for a single one."""
        return standard_error(self.nats)


def standard_error(values: np.ndarray) -> float:
    """Of the mean of values that are taken to be independent; NaN for a single one."""
    if len(values) < 2:
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def measure_held_out(subject: Subject) -> HeldOutLoss:
    """Score held-out windows, spread over the split, on the audit's device.

    The twin's loss is its likelihood; the denoiser's is its bound at the times of training.
    """
    n = len(subject.held_out)
    most = subject.params.max_held_out_windows or n
    numbers = np.unique(np.arange(min(n, most)) * n // min(n, most))
    size = subject.recipe.pretrain.micro_batch_windows
    starts = range(0, len(numbers), size)
    parts = [
        _score(subject, numbers[start : start + size])
        for start in subject.track(starts, total=len(starts), label="audit_run: held-out windows")
    ]
    text = [subject.held_out.text_bytes_of(int(number)).mean() for number in numbers]
    return HeldOutLoss(nats=np.concatenate(parts), bytes_per_token=np.array(text))


def check_possible(subject: Subject, loss: HeldOutLoss, name: str) -> Check:
    """A finite number of nats that is not below 0, and as a likelihood not far above ln V."""
    uniform = math.log(subject.recipe.layout.vocab_size)
    unigram = _unigram_entropy(subject)
    is_likelihood = subject.recipe.diffusion is None
    kind = "likelihood" if is_likelihood else "bound"
    limit = (1 + _ABOVE) * uniform if is_likelihood else math.inf
    measured = (
        f"{_told(loss)} nats per token ({kind}, {len(loss.nats)} windows), "
        f"{_compared(loss.mean, uniform)} ln V = {uniform:.4f}, {_compared(loss.mean, unigram)} "
        f"the unigram entropy of the training tokens, {unigram:.4f}"
    )
    return decide(
        "values",
        name,
        holds=bool(np.isfinite(loss.nats).all()) and 0 <= loss.mean <= limit,
        measured=measured if math.isfinite(loss.mean) else "not finite",
        expected="finite and at least 0"
        + (
            f", and at most {limit:.4f}, {_ABOVE:.0%} above what a uniform guess costs"
            if is_likelihood
            else "; a bound may lie above ln V after few steps, while the posterior is flat"
        )
        + "; a run that has learned lies below both figures",
        first_test=_DIVERGED if loss.mean > limit else _BOUND,
    )


def check_floor(subject: Subject, loss: HeldOutLoss, name: str) -> Check:
    """Not below the entropy rate of the chain that wrote the text, where one did."""
    rate = subject.corpus.get("entropy_rate_nats_per_byte")
    if not isinstance(rate, (int, float)) or len(loss.nats) < 2:
        is_known = isinstance(rate, (int, float))
        why = "one window has no standard error" if is_known else "the entropy rate of this corpus"
        return Check(
            group="values",
            name=name,
            measured=why if is_known else f"{why} is not known; that of a synthetic one is",
            expected="at or above the entropy rate of the text",
            verdict="not_measured",
            first_test=_BOUND,
        )
    above = loss.nats - rate * loss.bytes_per_token  # (n,)
    error = standard_error(above)
    lowest = rate * float(loss.bytes_per_token.mean())
    return decide(
        "values",
        name,
        holds=float(above.mean()) >= -_ERRORS * error,
        measured=f"{_told(loss)} nats per token, {above.mean():+.4f} from the floor with a "
        f"standard error of {error:.4f}"
        if math.isfinite(loss.mean)
        else "not finite",
        expected=f"at least {lowest:.4f}, the chain's {rate:.4f} nats per byte, less "
        f"{_ERRORS:g} standard errors; below it the answer leaks",
        first_test="run the checks of information flow on this checkpoint: a loss below the "
        "entropy rate means that a prediction has seen its answer",
    )


@torch.no_grad()
def _score(subject: Subject, numbers: np.ndarray) -> np.ndarray:
    """(n,) nats per token of held-out windows."""
    windows = torch.from_numpy(subject.held_out.gather(numbers)).to(subject.device)
    objective = subject.job.objective
    if isinstance(objective, Denoising):
        assert subject.recipe.diffusion is not None
        n_times = subject.recipe.diffusion.train_times or _TIMES
        nats = objective.bound_nats(subject.model, windows, numbers, n_times=n_times)
    else:
        assert isinstance(objective, NextToken)
        nats = objective.nats(subject.model, windows)
    return nats.double().mean(1).cpu().numpy()


def _unigram_entropy(subject: Subject) -> float:
    """Entropy of how often each token occurs in training windows, in nats."""
    n = len(subject.train)
    numbers = np.unique(np.arange(min(n, _MOST_COUNTED)) * n // min(n, _MOST_COUNTED))
    counts = np.bincount(
        subject.train.gather(numbers).ravel(), minlength=subject.recipe.layout.vocab_size
    )
    return entropy_nats(counts)


def _told(loss: HeldOutLoss) -> str:
    error = loss.standard_error
    if not math.isfinite(error):
        return f"{loss.mean:.4f}"
    return f"{loss.mean:.4f} with a standard error of {error:.4f}"


def _compared(value: float, other: float) -> str:
    return "below" if value < other else "not below"
