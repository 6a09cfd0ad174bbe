"""What does the bound become when there are infinitely many times, and what does a moment cost?

The limit is an integral over time in (0, 1), of Schiff et al. 2024 (arXiv 2412.10193) and von Rütte
et al. 2025 (arXiv 2503.04482), here with the cosine schedule. Like a step of finitely many it needs
two sums over the vocabulary: since all tokens but x_0 have one weight under q_t(· | x_0), the
divergence is written by S = Σ_k log1p(ρ·x̂_k) and two corrections. Derived in ``docs/bound.md``.
"""

import math

import torch
from torch import Tensor

from canvaslm.diffusion.bound import cavity_logits
from canvaslm.diffusion.cavity_head import CavityHead, CavityReading, StepNats
from canvaslm.diffusion.schedule import clean_share
from canvaslm.errors import InputError


def continuous_nats(
    logits: Tensor, noisy: Tensor, clean: Tensor, *, time: Tensor | float
) -> Tensor:
    """The integrand at one time: what ``x_t`` costs at a position, per unit of time.

    β/(V·q_t(i|j)) · [KL(q_t(·|j) ‖ q_t(·|x̂)) + r − 1 − log r], where x̂ is the cavity,
    r = q_t(i|j)/q_t(i|x̂) and β = −ᾱ'/ᾱ = π·tan(π·time/2).

    Args:
        logits: (..., V) posterior logits.
        noisy: (...) int64 ids of x_t.
        clean: (...) int64 ids of x_0.
        time: the time of each position, 0 < time < 1, broadcasts to (...).

    Returns:
        (...) float64 nats per unit of time.
    """
    vocab_size = logits.shape[-1]
    time = _times_like(noisy, time)
    share = clean_share(time, 1)
    log_x = cavity_logits(logits, noisy, t=time, n_times=1).log_softmax(-1)
    floor = ((1 - share) / vocab_size)[..., None]
    predicted = share[..., None] * log_x.exp() + floor  # q_t(·|x̂), (..., V)
    actual = floor.expand_as(predicted).scatter_add(-1, clean[..., None], share[..., None])
    divergence = (actual * (actual.log() - predicted.log())).sum(-1)
    at_noisy = (values.gather(-1, noisy[..., None]).squeeze(-1) for values in (actual, predicted))
    seen, expected = at_noisy
    ratio = seen / expected
    rate = math.pi * torch.tan(time * (math.pi / 2)) / (vocab_size * seen)
    return rate * (divergence + ratio - 1 - ratio.log())


@torch.no_grad()
def chunked_continuous_nats(
    hidden: Tensor,
    weight: Tensor,
    noisy: Tensor,
    clean: Tensor,
    *,
    time: Tensor | float,
    vocab_chunk: int,
    evidence: Tensor | None = None,
    is_cavity: bool = False,
) -> StepNats:
    """:func:`continuous_nats` of ``hidden @ weight.T`` without a (..., V) tensor or a gradient.

    Args:
        hidden: (..., D) final hidden states.
        weight: (V, D) the head, real tokens only.
        noisy: (...) int64 ids of x_t.
        clean: (...) int64 ids of x_0.
        time: the time of each position, 0 < time <= 1, broadcasts to (...); at 1 the cost is 0.
        vocab_chunk: vocabulary entries in one product; changes no value.
        evidence: (...) float64, what the noisy token adds to its own logit where the network was
            told another time; None: what it adds at ``time``.
        is_cavity: whether the logits lack that evidence, so that there is none to take out.

    Raises:
        InputError: a time lies outside, or an id outside 0..V-1.
    """
    V = weight.shape[0]
    times = _times_like(noisy, time).reshape(-1)
    if not bool((times > 0).all()):
        raise InputError(
            "time", expected="more than 0 and at most 1", got=f"{float(times.min()):g}", fix="check"
        )
    share = clean_share(times, 1)
    gone = torch.sin(times * (math.pi / 2)).square()  # 1 - ᾱ, which would be 0 in float for t -> 0
    rho = V * share / gone
    added = torch.log1p(rho) if evidence is None else evidence.reshape(-1)
    head = CavityHead(
        rows=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        noisy=noisy.reshape(-1),
        evidence=torch.zeros_like(added) if is_cavity else added,
        vocab_chunk=vocab_chunk,
    )
    seen = head.read(clean.reshape(-1), rho)
    bound = _integrand(seen, times, share=share, floor=gone / V, rho=rho, vocab_size=V)
    plain = -seen.log_posterior(torch.log1p(rho)) if is_cavity else seen.plain
    return StepNats(bound=bound.reshape(noisy.shape), plain=plain.reshape(noisy.shape))


def _integrand(
    seen: CavityReading,
    times: Tensor,
    *,
    share: Tensor,
    floor: Tensor,
    rho: Tensor,
    vocab_size: int,
) -> Tensor:
    """(M,) nats per unit of time from what was read; q_t(k|x̂) = floor·(1 + ρ·x̂_k)."""
    most = torch.log1p(rho)  # of a token that is certain
    divergence = (
        (share + floor) * most
        - share * torch.log1p(rho * seen.log_x_clean.exp())
        - floor * seen.log_mix
    )
    log_ratio = most * seen.is_kept - torch.log1p(rho * seen.log_x_noisy.exp())
    odds = floor + share * seen.is_kept  # q_t(i|j)
    rate = math.pi * torch.tan(times * (math.pi / 2)) / (vocab_size * odds)
    return rate * (divergence + torch.expm1(log_ratio) - log_ratio)


def _times_like(noisy: Tensor, time: Tensor | float) -> Tensor:
    """Times in float64 with the shape and device of the positions."""
    return torch.as_tensor(time, dtype=torch.float64, device=noisy.device).expand(noisy.shape)
