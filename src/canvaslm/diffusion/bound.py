"""How many nats does a prediction cost at one time, so that the sum over times bounds −log p(x)?

The negative evidence lower bound of uniform-state diffusion (Austin et al. 2021, arXiv 2107.03006,
eq. 1), per position. The network's softmax is the posterior p(x_0 | x_t, context), which has seen
the noisy token itself; the reverse process mixes over the *cavity*, what the context alone says.
The two differ by one scalar on one logit, and the divergence then needs two sums over the
vocabulary. Derived in ``docs/bound.md``; ``continuous_bound.py`` has the limit of many times.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.diffusion.cavity_head import CavityHead, StepNats
from canvaslm.diffusion.schedule import clean_share

_ROUNDED = 2**-53  # what the largest share below 1 lacks


def cavity_logits(logits: Tensor, noisy: Tensor, *, t: Tensor | int, n_times: int) -> Tensor:
    """Take the evidence of the noisy token itself out of posterior logits.

    Args:
        logits: (..., V) posterior logits, exact for any additive constant.
        noisy: (...) int64, the noisy token of each position.
        t: the time of each position in 1..N, a number or a tensor that broadcasts to (...).
        n_times: the number of diffusion times, N.

    Returns:
        (..., V) float64 logits of the cavity.
    """
    share = clean_share(_times_like(noisy, t), n_times)
    return _subtract_at(logits.double(), noisy, _evidence(share, logits.shape[-1]))


def token_evidence(times: Tensor, n_times: int, vocab_size: int) -> Tensor:
    """What a noisy token adds to its own logit in the posterior: log of q_t(i|i)/q_t(i|k≠i).

    Args:
        times: (...) times in 0..N, whole or not.
        n_times: the number of diffusion times, N.
        vocab_size: V.

    Returns:
        (...) float64 nats, exactly 0 at t = N. Below a time of about 1e-8·N, where the clean share
        rounds to 1, the number is that of the largest share below it.
    """
    return _evidence(_below_one(times, n_times), vocab_size)


def step_nats(
    logits: Tensor,
    noisy: Tensor,
    clean: Tensor,
    *,
    t: Tensor | int,
    n_times: int,
    before: Tensor | None = None,
) -> Tensor:
    """Nats of one reverse step t → t-1 at each position; at t = 1, of reconstruction.

    For t > 1 this is KL(q(x_{t-1} | x_t, x_0) ‖ q(x_{t-1} | x_t, x̂)) with x̂ the cavity; for
    t = 1 it is the cross-entropy of the posterior. Summed over t = 1..N, in expectation over x_t,
    it is at least −log p(x_0 | context).

    Args:
        logits: (..., V) posterior logits.
        noisy: (...) int64 ids of x_t.
        clean: (...) int64 ids of x_0.
        t: the time of each position in 1..N, a number or a tensor that broadcasts to (...); with
            ``before`` any time in 0..N.
        n_times: the number of diffusion times, N.
        before: (...) where the step of each position ends, in 0..t, if not at t-1; where it ends at
            t there is none, and it costs nothing.

    Returns:
        (...) float64 nats.

    Raises:
        InputError: a time lies outside these.
    """
    V = logits.shape[-1]
    step = _Step.at(_times_like(noisy, t), n_times=n_times, vocab_size=V, before=before)
    log_x = _subtract_at(logits.double(), noisy, step.evidence).log_softmax(-1)
    log_mix = torch.log1p(step.rho[..., None] * log_x.exp()).sum(-1)
    return step.nats(_at(log_x, noisy), _at(log_x, clean), log_mix=log_mix, is_kept=noisy == clean)


@torch.no_grad()
def chunked_step_nats(
    hidden: Tensor,
    weight: Tensor,
    noisy: Tensor,
    clean: Tensor,
    *,
    t: Tensor | int,
    n_times: int,
    vocab_chunk: int,
    before: Tensor | None = None,
    evidence: Tensor | None = None,
    is_cavity: bool = False,
) -> StepNats:
    """:func:`step_nats` of ``hidden @ weight.T`` without a (..., V) tensor and without gradient.

    The logits of a block of positions are made once, in float32 (or in the wider type of
    ``hidden``), and serve the normaliser, the mixture sum and the plain cross-entropy.

    Args:
        hidden: (..., D) final hidden states.
        weight: (V, D) the head, real tokens only.
        noisy: (...) int64 ids of x_t.
        clean: (...) int64 ids of x_0.
        t: the time of each position, as in :func:`step_nats`. Where it is 0 the token is clean:
            nothing is computed, and both figures are 0.
        n_times: the number of diffusion times, N.
        vocab_chunk: vocabulary entries in one product; changes no value.
        before: (...) where the step of each position ends, as in :func:`step_nats`.
        evidence: (...) float64, what the noisy token adds to its own logit where the network was
            told another time than ``t``; None: what it adds at ``t``.
        is_cavity: whether the logits lack that evidence, so that there is none to take out.

    Raises:
        InputError: a time lies outside these, or an id outside 0..V-1.
    """
    V, times = weight.shape[0], _times_like(noisy, t)
    is_asked = torch.ones_like(noisy, dtype=torch.bool) if before is None else times > 0
    times, given = times[is_asked], noisy[is_asked]
    until = None if before is None else before[is_asked]
    step = _Step.at(times, n_times=n_times, vocab_size=V, before=until)
    own = token_evidence(times, n_times, V)
    added = step.evidence if evidence is None else evidence[is_asked]
    if is_cavity:
        added = torch.zeros_like(added)
    head = CavityHead(
        rows=hidden[is_asked], weight=weight, noisy=given, evidence=added, vocab_chunk=vocab_chunk
    )
    seen = head.read(clean[is_asked], step.rho)
    log_x_clean, plain = seen.log_x_clean, seen.plain
    if evidence is not None or is_cavity:
        # At t = 1 the posterior is wanted, and it is not the one that was read.
        log_x_clean = torch.where(step.is_first, seen.log_posterior(own), log_x_clean)
    if is_cavity:
        plain = -seen.log_posterior(own)
    bound = step.nats(seen.log_x_noisy, log_x_clean, log_mix=seen.log_mix, is_kept=seen.is_kept)
    return StepNats(bound=bound, plain=plain).put(is_asked)


def expected_step_nats(
    log_cavity: Tensor, clean: Tensor, *, t: Tensor | int, n_times: int
) -> Tensor:
    """:func:`step_nats` in expectation over x_t, for a cavity that does not depend on x_t.

    No draw: the terms of all V noisy tokens are written down and weighed by q_t(· | x_0). They
    share their one sum over the vocabulary, so that a position costs O(V) and not O(V²). Summed
    over t = 1..N this is −log x̂(x_0), whatever N is.

    Args:
        log_cavity: (..., V) log-probabilities of what the context alone says.
        clean: (...) int64 ids of x_0.
        t: the time of each position in 1..N, a number or a tensor that broadcasts to (...).
        n_times: the number of diffusion times, N.

    Returns:
        (...) float64 nats.

    Raises:
        InputError: a time lies outside 1..N.
    """
    V = log_cavity.shape[-1]
    log_x = log_cavity.double()
    step = _Step.at(_times_like(clean, t)[..., None], n_times=n_times, vocab_size=V)  # (..., 1)
    is_kept = torch.zeros_like(log_x, dtype=torch.bool).scatter_(-1, clean[..., None], value=True)
    floor = (1 - step.share_t) / V
    odds = floor + step.share_t * is_kept  # q_t(k | x_0) of each noisy token k
    x = log_x.exp()
    log_x_clean = _at(log_x, clean)[..., None]
    # At t = 1 a step's prediction is the posterior, which differs from one noisy token to the next.
    posterior = log_x_clean + odds.log() - torch.log(step.share_t * x + floor)
    log_mix = torch.log1p(step.rho * x).sum(-1, keepdim=True)
    nats = step.nats(
        log_x,
        torch.where(step.is_first, posterior, log_x_clean),
        log_mix=log_mix,
        is_kept=is_kept,
    )
    return (odds * nats).sum(-1)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The scalars of one reverse step, each in float64 with the shape of the positions."""

    vocab_size: int
    is_still: Tensor  # s = t, no step at all; the shares are stand-ins there
    is_first: Tensor  # s = 0, reconstruction
    share_t: Tensor  # ᾱ_t
    share_s: Tensor  # ᾱ_s, s = t-1; 1/2 in place of 1 at s = 0, where it is not used
    evidence: Tensor  # what the noisy token adds to its own logit; 0 at s = 0
    rho: Tensor  # V·ᾱ_s/(1-ᾱ_s)

    @classmethod
    def at(
        cls, t: Tensor, *, n_times: int, vocab_size: int, before: Tensor | None = None
    ) -> "_Step":
        """The scalars of a step from time ``t`` of N to ``before``, or to t-1."""
        s = t - 1 if before is None else before
        is_still = s == t
        is_first = (s == 0) & ~is_still
        # Stand-ins keep infinities out of branches whose result is dropped.
        share_t = _below_one(t, n_times).masked_fill(is_still, 0.25)
        share_s = _below_one(s, n_times).masked_fill(is_first | is_still, 0.5)
        return cls(
            vocab_size=vocab_size,
            is_still=is_still,
            is_first=is_first,
            share_t=share_t,
            share_s=share_s,
            evidence=_evidence(share_t, vocab_size).masked_fill(is_first | is_still, 0.0),
            rho=vocab_size * share_s / (1 - share_s),
        )

    def nats(
        self, log_x_noisy: Tensor, log_x_clean: Tensor, *, log_mix: Tensor, is_kept: Tensor
    ) -> Tensor:
        """Nats from the prediction at two tokens and from S = Σ_k log1p(ρ·x̂_k)."""
        divergence = self._divergence(log_x_noisy.exp(), log_x_clean.exp(), log_mix, is_kept)
        nats = torch.where(self.is_first, -log_x_clean, divergence)
        return torch.where(self.is_still, 0.0, nats)

    def _divergence(
        self, x_noisy: Tensor, x_clean: Tensor, log_mix: Tensor, is_kept: Tensor
    ) -> Tensor:
        """KL of the two reverse steps: every token but i and j has the same weight w."""
        a = self.share_t / self.share_s
        b = (1 - a) / self.vocab_size
        c = (1 - self.share_s) / self.vocab_size
        d = (1 - self.share_t) / self.vocab_size
        evidence_clean = d + self.share_t * is_kept  # q_t(i|j)
        w = b * c / evidence_clean
        q_noisy = (a + b) * (c + self.share_s * is_kept) / evidence_clean
        q_clean = torch.where(is_kept, q_noisy, b * (self.share_s + c) / evidence_clean)
        mixed = (
            w * log_mix
            + (q_noisy - w) * torch.log1p(self.rho * x_noisy)
            + (q_clean - w) * torch.log1p(self.rho * x_clean) * ~is_kept
        )
        evidence_ratio = torch.log((self.share_t * x_noisy + d) / evidence_clean)
        return evidence_ratio + q_clean * torch.log1p(self.rho) - mixed


def _below_one(times: Tensor, n_times: int) -> Tensor:
    """The clean share, and where it rounds to 1 the largest number below."""
    return clean_share(times, n_times).clamp(max=1 - _ROUNDED)


def _evidence(share: Tensor, vocab_size: int) -> Tensor:
    """log of q_t(i|i)/q_t(i|k≠i): how much more likely the noisy token is if it is clean."""
    return torch.log((1 + (vocab_size - 1) * share) / (1 - share))


def _times_like(noisy: Tensor, t: Tensor | int) -> Tensor:
    """Times as a tensor with the shape and device of the positions."""
    return torch.as_tensor(t, device=noisy.device).expand(noisy.shape)


def _subtract_at(logits: Tensor, ids: Tensor, amount: Tensor) -> Tensor:
    """Subtract (...) amounts from the logits (..., V) of one token each."""
    return logits.scatter_add(-1, ids[..., None], -amount[..., None])


def _at(values: Tensor, ids: Tensor) -> Tensor:
    """(...) the values (..., V) of one token per position."""
    return values.gather(-1, ids[..., None]).squeeze(-1)
