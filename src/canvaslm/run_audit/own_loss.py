"""What should the objective's loss on a window be, by the definition and not by its code?

The passes are run here, the guess is embedded here with all logits in memory, and the nats are a
log-softmax in float64 over the logits of those passes, or a step of the bound by its definition. Of
the code under audit only the corruption and the passes of the model are used, which have checks of
their own.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.corruption import draw_corruption
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Encoded
from canvaslm.randomness import stream
from canvaslm.run_audit.subject import Subject
from canvaslm.run_audit.tilted import position_shares
from canvaslm.training.plan import Recipe

_ROWS = 256  # positions whose logits are in memory in float64 at once


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """Nats of one window summed over its targets.

    Attributes:
        nats: the sum, in float64.
        n_targets: positions that carry loss.
        largest_logit: the largest absolute logit on the way.
    """

    nats: float
    n_targets: int
    largest_logit: float


def own_loss(subject: Subject, model: Backbone, window: Tensor, number: int) -> OwnLoss:
    """The training loss of window (1, T) under its run number.

    Args:
        subject: the run.
        model: any model of its shape, on the device of the window.
        window: (1, T) int64.
        number: keys its noise and its coin for self-conditioning, and says in which phase it is.
    """
    with torch.no_grad():
        read = _read(subject, model, window, number)
        return _own_nats(read, model.head_weight, subject.recipe)


def uniform_loss(subject: Subject, model: Backbone, window: Tensor, number: int) -> OwnLoss:
    """The same where every logit of the network is 0: what is paid for knowing nothing."""
    with torch.no_grad():
        read = _read(subject, model, window, number)
        nothing = dataclasses.replace(read, hidden=torch.zeros_like(read.hidden))
        return _own_nats(nothing, model.head_weight, subject.recipe)


def own_companion(subject: Subject, model: Backbone, window: Tensor, number: int) -> float:
    """The weighed next-token nats beside the loss of window (1, T); 0 where there are none."""
    diffusion = subject.recipe.diffusion
    if diffusion is None or number < subject.recipe.first_phase_windows:
        return 0.0
    with torch.no_grad():
        hidden = model.encode(window).hidden[0, :-1]
        nats = _nats(hidden, model.head_weight, window[0, 1:]).nats
    return diffusion.next_token_weight * nats


def has_guess(subject: Subject, number: int) -> bool:
    """Whether a window's second pass sees a guess: its own coin, or never for other networks."""
    diffusion = subject.recipe.diffusion
    if diffusion is None or subject.recipe.model.self_conditioning == "off":
        return False
    if _is_next_token(subject, number):
        return False
    coin = stream(subject.recipe.pretrain.seed, "self_conditioning", number).random()
    return coin < diffusion.self_conditioning_share


def _is_next_token(subject: Subject, number: int) -> bool:
    """Whether a denoiser's window belongs to a phase that learns the next token alone."""
    diffusion = subject.recipe.diffusion
    in_first = number < subject.recipe.first_phase_windows
    return diffusion is not None and in_first and diffusion.first_phase == "next_token"


@contextlib.contextmanager
def sharpened(model: Backbone, factor: float) -> Iterator[None]:
    """Inside, the logits are about so many times as large, and so is what tells a loss apart.

    Args:
        model: comes back bit for bit for a power of two.
        factor: by which the gain of the final norm is multiplied.
    """
    with torch.no_grad():
        model.final_norm.weight.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            model.final_norm.weight.div_(factor)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What the positions of one window that carry loss came to.

    Attributes:
        hidden: (n, D).
        targets: (n,) the ids that they should have found.
        noisy: (n,) the ids that stood there, or None where nothing was noisy.
        shares: (n,) the time of each as a share of 1, or None.
        before: (n,) the same one time of the canvas earlier, or None.
    """

    hidden: Tensor
    targets: Tensor
    noisy: Tensor | None
    shares: Tensor | None
    before: Tensor | None


def _read(subject: Subject, model: Backbone, window: Tensor, number: int) -> _Read:
    diffusion = subject.recipe.diffusion
    if diffusion is None:
        start = torch.full_like(window[:, :1], subject.eot_id)
        hidden = model.encode(torch.cat([start, window[:, :-1]], dim=1)).hidden
        return _Read(hidden=hidden[0], targets=window[0], noisy=None, shares=None, before=None)
    if _is_next_token(subject, number):
        hidden = model.encode(window).hidden[0, :-1]
        return _Read(hidden=hidden, targets=window[0, 1:], noisy=None, shares=None, before=None)
    return _read_noisy(subject, diffusion, model, window, number)


def _read_noisy(
    subject: Subject, diffusion: DiffusionParams, model: Backbone, window: Tensor, number: int
) -> _Read:
    context = diffusion.context
    if number < subject.recipe.first_phase_windows:
        context = "noisy"
    noisy = draw_corruption(
        window,
        np.array([number]),
        layout=subject.recipe.layout,
        diffusion=diffusion,
        context=context,
        tilt=model.params.tilt,
        seed=subject.recipe.pretrain.seed,
    )
    shares = noisy.times.double() / diffusion.n_times
    clean = model.encode(window) if context == "clean" else None
    hidden = _pass(model, noisy.ids, shares, clean, None)
    if has_guess(subject, number):
        guess = _embedded_posterior(hidden[0], model)
        hidden = _pass(model, noisy.ids, shares, clean, guess[None])
    each, before = (
        _of_positions(times, subject) for times in (shares[0], shares[0] - 1 / diffusion.n_times)
    )
    carries = each > 0
    if diffusion.loss == "bound":  # a token that is clean by now costs nothing, and counts
        carries = (shares[0] > 0).repeat_interleave(subject.recipe.layout.canvas_tokens)
    if diffusion.loss == "changed":
        carries &= noisy.ids[0] != window[0]
    return _Read(
        hidden=hidden[0][carries],
        targets=window[0][carries],
        noisy=noisy.ids[0][carries],
        shares=each[carries],
        before=before[carries],
    )


def _of_positions(shares: Tensor, subject: Subject) -> Tensor:
    """(T,) from the times (C,) of canvases, as shares of 1; below 0 is 0."""
    L, tilt = subject.recipe.layout.canvas_tokens, subject.recipe.model.tilt
    each = [x for share in shares.tolist() for x in position_shares(max(share, 0.0), L, tilt)]
    return torch.tensor(each, dtype=torch.float64, device=shares.device)


def _pass(
    model: Backbone, ids: Tensor, shares: Tensor, clean: Encoded | None, guess: Tensor | None
) -> Tensor:
    if clean is None:
        return model.denoise_one_stream(ids, shares, guess=guess, has_guess=None)
    return model.denoise(ids, shares, context=clean, guess=guess, has_guess=None)


def _embedded_posterior(hidden: Tensor, model: Backbone) -> Tensor:
    """softmax(logits) @ E (T, D), by its definition in float64."""
    head, rows = model.head_weight.double(), model.table.double()
    parts = [(part.double() @ head.T).softmax(-1) @ rows for part in hidden.split(_ROWS)]
    return torch.cat(parts).to(hidden.dtype)


def _own_nats(read: _Read, head: Tensor, recipe: Recipe) -> OwnLoss:
    """What the positions cost, by the loss that the run was given."""
    diffusion = recipe.diffusion
    if diffusion is None or read.noisy is None:
        return _nats(read.hidden, head, read.targets)
    assert read.shares is not None
    assert read.before is not None
    rows, nats, largest = head.double(), 0.0, 0.0
    columns = (read.hidden, read.targets, read.noisy, read.shares, read.before)
    parts = zip(*(x.split(_ROWS) for x in columns), strict=True)
    for hidden, targets, noisy, shares, before in parts:
        logits = hidden.double() @ rows.T  # (n, V)
        if recipe.model.likelihood_bias:
            logits = logits + _likelihood(noisy, shares, logits.shape[-1]).log()
        posterior = logits.softmax(-1)
        if diffusion.loss == "bound":
            N = diffusion.n_times
            nats += N * float(_own_step(posterior, noisy, targets, shares, before).sum())
        else:
            nats -= float(logits.log_softmax(-1).gather(1, targets[:, None]).sum())
        largest = max(largest, float(logits[logits.isfinite()].abs().max()))
    return OwnLoss(nats=nats, n_targets=len(read.targets), largest_logit=largest)


def _likelihood(noisy: Tensor, shares: Tensor, vocab_size: int) -> Tensor:
    """q(x_t | x_0) of the given x_t for every x_0, (n, V), from the definition of the process.

    Args:
        noisy: (n,) x_t.
        shares: (n,) times as shares of 1.
        vocab_size: V.
    """
    clean = _clean_share(shares)[:, None]
    same = torch.nn.functional.one_hot(noisy, vocab_size)
    return clean * same + (1 - clean) / vocab_size


def _own_step(
    posterior: Tensor, noisy: Tensor, targets: Tensor, shares: Tensor, before: Tensor
) -> Tensor:
    """(n,) KL of two reverse steps by their definition; down to time 0, reconstruction.

    q(x_s | x_t, x_0) is proportional to q(x_t | x_s)·q(x_s | x_0); the model mixes the last factor
    over its cavity, which is its posterior divided by the likelihood of x_t.

    Args:
        posterior: (n, V) p(x_0 | x_t, context) in float64.
        noisy: (n,) x_t.
        targets: (n,) x_0.
        shares: (n,) times as shares of 1.
        before: (n,) where the steps end; where that is no earlier, there is none.
    """
    V = posterior.shape[-1]
    at_t, at_s = _clean_share(shares)[:, None], _clean_share(before)[:, None]
    kept = at_t / at_s
    forward = kept * torch.nn.functional.one_hot(noisy, V) + (1 - kept) / V  # q(x_t | x_s)
    truth = at_s * torch.nn.functional.one_hot(targets, V) + (1 - at_s) / V
    cavity = posterior / _likelihood(noisy, shares, V)
    cavity = cavity / cavity.sum(-1, keepdim=True)
    model = at_s * cavity + (1 - at_s) / V
    steps = [forward * x for x in (truth, model)]
    due, found = (x / x.sum(-1, keepdim=True) for x in steps)
    divergence = (due * (due.log() - found.log())).sum(-1)
    first = -posterior.gather(1, targets[:, None]).squeeze(1).log()
    nats = torch.where(before == 0, first, divergence)
    return torch.where(shares > before, nats, 0.0)


def _clean_share(shares: Tensor) -> Tensor:
    """cos²(π/2 · share), exactly 0 at 1, in float64."""
    return ((shares.double() * (math.pi / 2)).cos() ** 2).masked_fill(shares == 1, 0.0)


def _nats(hidden: Tensor, head: Tensor, targets: Tensor) -> OwnLoss:
    """Cross-entropy of targets (n,) under hidden states (n, D), in float64."""
    rows, nats, largest = head.double(), 0.0, 0.0
    for part, aims in zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True):
        logits = part.double() @ rows.T  # (n, V)
        nats -= float(logits.log_softmax(-1).gather(1, aims[:, None]).sum())
        largest = max(largest, float(logits[logits.isfinite()].abs().max()))
    return OwnLoss(nats=nats, n_targets=len(targets), largest_logit=largest)
