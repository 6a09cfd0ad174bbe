"""Does the library compute, at the run's own shape and on its own weights, what it promises?"""

import numpy as np
import torch
from torch import Tensor

from canvaslm.device import autocast
from canvaslm.doctor.patient import Patient
from canvaslm.doctor.probe import A_RUN, Probe, Seen
from canvaslm.loss import chunked_cross_entropy, dense_cross_entropy
from canvaslm.model.backbone import Backbone, initialise
from canvaslm.run_audit.check import Check
from canvaslm.run_audit.rehearsal import fresh_learner, take_steps
from canvaslm.run_audit.revival import check_optimizer, check_reload

_ROWS = 256  # positions whose logits are in memory in float64
_SLACK = 1e-5  # of the largest value: what sums in another order may round, besides the plain way
_SHOWN = 3


def _look_at_repeat(patient: Patient) -> Seen:
    """Two learners from one seed take one step on the same windows."""
    learners = [fresh_learner(patient.subject) for _ in range(2)]
    ran = all(take_steps(patient.subject, x, first=0, n_steps=1) for x in learners)
    one, other = ({**dict(x.model.named_parameters())} for x in learners)
    unlike = [name for name in one if not torch.equal(one[name], other[name])]
    return Seen(
        looked_at="two fresh models, one step each",
        measured=_told(unlike, len(one)) if ran else "a step was refused as not finite",
        holds=ran and not unlike,
        next_step="something draws from a generator that is not a named stream of the seed",
    )


def _look_at_resume(patient: Patient) -> Seen:
    """The checkpoint comes back bit for bit, and so does a rehearsed run in its middle."""
    checks = [check_reload(patient.subject), check_optimizer(patient.subject)]
    return _as_seen(checks, "load, save, load; two steps, save, restore, one more")


def _look_at_loss(patient: Patient) -> Seen:
    """Chunked and dense against float64, values and gradients, on hidden states of the run."""
    hidden, targets = _scored(patient)
    head, knobs = patient.subject.model.head_weight.detach(), patient.recipe.pretrain
    truth = _nats_and_gradients(hidden.double(), head.double(), targets, None)
    chunk = min(knobs.vocab_chunk, max(len(head) // 2 - 1, 1))  # at least two, and a remainder
    with autocast(patient.device, knobs.precision):
        plain = _nats_and_gradients(hidden, head, targets, None)
        chunked = _nats_and_gradients(hidden, head, targets, chunk)
    errors = [_errors(found, truth) for found in (plain, chunked)]
    names = ("nats", "gradient of hidden states", "gradient of the head")
    wrong = [
        f"{name} off by {ours:.2g} of the largest, the plain loss by {theirs:.2g}"
        for name, theirs, ours in zip(names, *errors, strict=True)
        if not ours <= 2 * theirs + _SLACK
    ]
    return Seen(
        looked_at=f"{len(hidden)} hidden states of {patient.checkpoint}, chunks of {chunk}",
        measured="; ".join(wrong)
        or f"off by at most {max(errors[1]):.2g} of the largest value from float64",
        holds=not wrong,
        next_step="see whether it is the remainder of the vocabulary or the gradient alone",
    )


def _look_at_guess(patient: Patient) -> Seen:
    """A model at its birth, with a guess and without."""
    recipe, layout = patient.recipe, patient.recipe.layout
    model = Backbone(recipe.model, layout).eval()
    initialise(model, recipe.pretrain.seed)
    window = torch.from_numpy(patient.held_out.gather(np.array([0])))
    times = torch.full((1, layout.canvases_per_window), 0.5)
    with torch.no_grad():
        if model.self_conditioning is None:
            same, told = True, "this network takes no guess"
        else:
            context = model.encode(window)
            hidden = model.denoise(window, times, context=context, guess=None, has_guess=None)
            guess = model.soft_embedding(hidden, vocab_chunk=recipe.pretrain.vocab_chunk)
            guessed = model.denoise(window, times, context=context, guess=guess, has_guess=None)
            same = torch.equal(hidden, guessed)
            told = f"{int((hidden != guessed).sum())} of {hidden.numel()} values differ"
    return Seen(
        looked_at="a fresh model of this shape, one window",
        measured=told,
        holds=same,
        next_step="the projection is not born as zero, or the guess enters at a second place",
    )


def _look_at_cache(patient: Patient) -> Seen:
    """Canvas by canvas, or token by token, against the whole window."""
    checks = [patient.flow["cached_decoding_agrees"]]
    return _as_seen(checks, f"{patient.checkpoint}: one window, over a cache and whole")


def _look_at_leak(patient: Patient) -> Seen:
    """Nothing that a prediction may not see moves a bit of it."""
    checks = [check for name, check in patient.flow.items() if name.endswith("_unseen")]
    return _as_seen(checks, f"{patient.checkpoint}: one window, changed place by place")


def _as_seen(checks: list[Check], looked_at: str) -> Seen:
    """What checks of the audit say: each that failed, or what the only one measured."""
    failed = [check for check in checks if check.verdict == "fail"]
    told = f"{len(checks)} checks pass: {', '.join(check.name for check in checks)}"
    if failed or len(checks) == 1:
        told = "; ".join(f"{check.name}: {check.measured}" for check in failed or checks)
    return Seen(
        looked_at=looked_at,
        measured=told,
        holds=not failed,
        next_step="; ".join(dict.fromkeys(check.first_test for check in failed)),
    )


@torch.no_grad()
def _scored(patient: Patient) -> tuple[Tensor, Tensor]:
    """Hidden states (n, D) that the run's model makes of a held-out window, and targets (n,)."""
    subject = patient.subject
    window = torch.from_numpy(subject.held_out.gather(np.array([0]))).to(subject.device)
    hidden = subject.model.encode(window).hidden[0]
    return hidden[:_ROWS].clone(), window[0].roll(-1)[:_ROWS]


def _nats_and_gradients(
    hidden: Tensor, head: Tensor, targets: Tensor, chunk: int | None
) -> tuple[Tensor, ...]:
    """Nats (n,), and the gradients of their sum: by the definition for float64 without a chunk."""
    hidden, head = (x.detach().clone().requires_grad_() for x in (hidden, head))
    if hidden.dtype == torch.float64:
        nats = -(hidden @ head.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    elif chunk is None:
        nats = dense_cross_entropy(hidden, head, targets, reduction="none")
    else:
        nats = chunked_cross_entropy(hidden, head, targets, vocab_chunk=chunk, reduction="none")
    return (nats.detach(), *torch.autograd.grad(nats.sum(), (hidden, head)))


def _errors(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    """The largest error of each, as a share of the largest true value."""
    pairs = zip(found, truth, strict=True)
    return [float((mine.double() - due).abs().max() / due.abs().max()) for mine, due in pairs]


def _told(unlike: list[str], n_all: int) -> str:
    shown = f": {', '.join(unlike[:_SHOWN])}" if unlike else ""
    return f"{len(unlike)} of {n_all} parameters differ{shown}"


ARITHMETIC = (
    Probe(
        name="equal_runs_agree",
        section="Two equal runs differ",
        look=_look_at_repeat,
        rests_on=A_RUN,
    ),
    Probe(
        name="resume_changes_no_bit",
        section="A resumed run differs from a straight one",
        look=_look_at_resume,
        rests_on=(*A_RUN, "equal_runs_agree"),
    ),
    Probe(
        name="chunked_loss_is_the_loss",
        section="The chunked loss disagrees with the plain one",
        look=_look_at_loss,
        rests_on=A_RUN,
    ),
    Probe(
        name="fresh_guess_adds_nothing",
        section="A fresh model gives other numbers with a guess than without",
        look=_look_at_guess,
        rests_on=("windows_fit",),
        twin=False,
    ),
    Probe(
        name="answers_are_unseen",
        section="The diffusion loss is suspiciously low",
        look=_look_at_leak,
        rests_on=A_RUN,
    ),
    Probe(
        name="cache_agrees_with_window",
        section="The sampler disagrees with a single forward",
        look=_look_at_cache,
        rests_on=A_RUN,
    ),
)
