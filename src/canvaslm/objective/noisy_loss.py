"""What does a denoised canvas cost in training?

Cross-entropy against the clean tokens, at all of the noisy positions or at those alone whose token
was drawn anew; or the step of the likelihood bound. Under the likelihood bias the network's logits
are the cavity, what the context says without the noisy token itself, and the known evidence of that
token is added before the softmax (``docs/objective.md``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from canvaslm.device import wide
from canvaslm.diffusion.bound import step_nats, token_evidence
from canvaslm.diffusion.schedule import DiffusionParams, position_times
from canvaslm.loss import IGNORED, chunked_cross_entropy
from canvaslm.objective.targets import LossSum
from canvaslm.scores import exact_types, product_dtype

_ROWS = 512  # positions whose logits are in memory at once where no chunked form exists


@dataclass(frozen=True, kw_only=True)
class Denoised:
    """What the noisy passes over some windows left.

    Attributes:
        hidden: (B, T, D) final hidden states.
        noisy: (B, T) int64, what the network read.
        clean: (B, T) int64, what stood there.
        times: (B, C), the time of each canvas in 0..N.
        tilt: of the model, which gives each position a time of its own (``position_times``); a
            position at time 0 carries no loss.
        is_cavity: whether the logits lack the evidence of the noisy token (``likelihood_bias``).
    """

    hidden: Tensor
    noisy: Tensor
    clean: Tensor
    times: Tensor
    tilt: float
    is_cavity: bool


def noisy_loss(
    denoised: Denoised, weight: Tensor, *, diffusion: DiffusionParams, vocab_chunk: int
) -> LossSum:
    """Sum what the noisy positions cost.

    Args:
        denoised: the passes.
        weight: (V, D) the head.
        diffusion: which loss.
        vocab_chunk: vocabulary entries whose logits exist at one time; changes no value.
    """
    times = _position_times(denoised, denoised.times, diffusion)
    carries = times > 0
    if diffusion.loss == "changed":
        carries = carries & (denoised.noisy != denoised.clean)
    n_targets = int(carries.sum())
    if diffusion.loss == "bound":
        nats = _bound_nats(denoised, times, weight, diffusion)
        n_targets = int((denoised.times > 0).sum()) * (times.shape[1] // denoised.times.shape[1])
    elif denoised.is_cavity:
        nats = _biased_nats(denoised, times, carries, weight, diffusion, vocab_chunk)
    else:
        nats = chunked_cross_entropy(
            denoised.hidden,
            weight,
            denoised.clean.masked_fill(~carries, IGNORED),
            vocab_chunk=vocab_chunk,
            reduction="sum",
        )
    return LossSum(nats=nats, n_targets=n_targets)


def _position_times(denoised: Denoised, times: Tensor, diffusion: DiffusionParams) -> Tensor:
    """(B, T) the time of each position where canvases stand at times (B, C)."""
    return position_times(
        times,
        canvas_tokens=denoised.noisy.shape[1] // times.shape[1],
        n_times=diffusion.n_times,
        tilt=denoised.tilt,
    )


def _biased_nats(
    denoised: Denoised,
    times: Tensor,
    carries: Tensor,
    weight: Tensor,
    diffusion: DiffusionParams,
    vocab_chunk: int,
) -> Tensor:
    """Cross-entropy with the evidence e of the noisy token i added to its logit, summed.

    The normaliser Z of the other logits is known from their own cross-entropy, and with the
    evidence it is Z + (exp(e) − 1)·exp(l_i): both terms are positive, so nothing cancels.
    """
    hidden, noisy, clean = (x[carries] for x in (denoised.hidden, denoised.noisy, denoised.clean))
    evidence = token_evidence(times[carries], diffusion.n_times, len(weight))
    plain = chunked_cross_entropy(hidden, weight, clean, vocab_chunk=vocab_chunk, reduction="none")
    at_noisy, at_clean = (_logits_at(hidden, weight, ids) for ids in (noisy, clean))
    more = at_noisy + torch.log(torch.expm1(evidence)).to(at_noisy.dtype)
    is_kept = evidence * (noisy == clean)
    return (torch.logaddexp(plain + at_clean, more) - at_clean - is_kept.to(plain.dtype)).sum()


def _logits_at(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """(M,) the logits of one token for each position, in float32 or wider."""
    dtype = wide(torch.promote_types(hidden.dtype, weight.dtype))
    return (hidden.to(dtype) * functional.embedding(ids, weight).to(dtype)).sum(-1)


def _bound_nats(
    denoised: Denoised, times: Tensor, weight: Tensor, diffusion: DiffusionParams
) -> Tensor:
    """N times the step of the bound, summed: its mean over uniform times is the bound itself."""
    assert diffusion.train_times is not None, "the steps of the bound have a number"
    before = _position_times(denoised, (denoised.times - 1).clamp(min=0), diffusion)
    moves = before < times
    columns = (x[moves] for x in (denoised.hidden, denoised.noisy, denoised.clean, times, before))
    nats = denoised.hidden.new_zeros((), dtype=torch.float64)
    for rows in zip(*(x.split(_ROWS) for x in columns), strict=True):
        part = checkpoint(
            _step_nats, *rows, weight, diffusion, denoised.is_cavity, use_reentrant=False
        )
        assert isinstance(part, Tensor)
        nats = nats + part
    return nats * diffusion.train_times


def _step_nats(
    hidden: Tensor,
    noisy: Tensor,
    clean: Tensor,
    times: Tensor,
    before: Tensor,
    weight: Tensor,
    diffusion: DiffusionParams,
    is_cavity: bool,
) -> Tensor:
    """The steps of the bound of some positions (M, D), summed, with all logits in memory."""
    dtype = product_dtype(hidden, weight)
    with exact_types(hidden, dtype):  # a logit of 20 nats in bfloat16 would be off by up to 0.06
        logits = functional.linear(hidden.to(wide(dtype)), weight.to(wide(dtype)))
    if is_cavity:
        evidence = token_evidence(times, diffusion.n_times, len(weight))
        logits = logits.double().scatter_add(-1, noisy[:, None], evidence[:, None])
    return step_nats(logits, noisy, clean, t=times, n_times=diffusion.n_times, before=before).sum()
