"""What do the cavity logits of many positions sum to, when no (M, V) tensor may exist?

Positions go through in blocks whose logits stay in the cache of a processor core (or fill a GPU),
are made once and are worked on in place: a logit is touched while it is near, and freshly mapped
memory is asked for once a call and not once an operation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from canvaslm.errors import InputError

_LEAST_ROWS = 256  # below that a product is bound by reading the head (measured, V = 50,257)
_BLOCK_VALUES = {"cpu": 2**19, "cuda": 2**26}  # in float32: 2 MiB, one core's cache; and 256 MiB


@dataclass(frozen=True, kw_only=True)
class StepNats:
    """What the positions of one noisy pass cost, (...) float64.

    Attributes:
        bound: nats of the reverse step, a term of the bound.
        plain: cross-entropy of the posterior, a diagnostic.
    """

    bound: Tensor
    plain: Tensor

    def put(self, where: Tensor) -> "StepNats":
        """Both where ``where`` (B, T) bool holds, in its order, and 0 at the other places."""
        zeros = self.bound.new_zeros(where.shape)
        return StepNats(
            bound=zeros.masked_scatter(where, self.bound),
            plain=zeros.masked_scatter(where, self.plain),
        )


@dataclass(frozen=True, kw_only=True)
class CavityReading:
    """All that the bound takes from the head, at M positions.

    Attributes:
        log_x_noisy: (M,) float64 log x̂ of the noisy token.
        log_x_clean: (M,) float64 log x̂ of the clean token.
        log_mix: (M,) float64 S = Σ_k log(1 + ρ·x̂_k).
        is_kept: (M,) bool, whether the noisy token is the clean one.
        plain: (M,) float64 cross-entropy of the posterior.
    """

    log_x_noisy: Tensor
    log_x_clean: Tensor
    log_mix: Tensor
    is_kept: Tensor
    plain: Tensor

    def log_posterior(self, evidence: Tensor) -> Tensor:
        """(M,) log-posterior of the clean token, with (M,) evidence of the noisy one put back."""
        total = torch.log1p(self.log_x_noisy.exp() * torch.expm1(evidence))
        return self.log_x_clean + evidence * self.is_kept - total


@dataclass(frozen=True, kw_only=True)
class CavityHead:
    """The head over M positions, with the evidence of each noisy token taken out of its logit.

    Attributes:
        rows: (M, D) final hidden states.
        weight: (V, D) the head.
        noisy: (M,) int64 ids of x_t.
        evidence: (M,) float64, what the noisy token adds to its own logit.
        vocab_chunk: columns of one product.
    """

    rows: Tensor
    weight: Tensor
    noisy: Tensor
    evidence: Tensor
    vocab_chunk: int

    def read(self, clean: Tensor, rho: Tensor) -> CavityReading:
        """Take what the bound needs, at any kind of time, from logits that are made once.

        Args:
            clean: (M,) int64 ids of x_0.
            rho: (M,) float64, the weight of a token in the mixture.

        Raises:
            InputError: an id lies outside 0..V-1.
        """
        for name, ids in (("noisy", self.noisy), ("clean", clean)):
            _refuse_other_ids(name, ids, self.weight.shape[0])
        normaliser, log_mix = self.sums(rho)
        at_noisy, at_clean = self.logits_at(self.noisy), self.logits_at(clean)
        is_kept = self.noisy == clean
        # With the evidence put back: its logit weighs e^evidence times as much, and all of them sum
        # to that much more. Both terms are positive, so nothing cancels.
        more = at_noisy + self.evidence + torch.log(-torch.expm1(-self.evidence))
        return CavityReading(
            log_x_noisy=at_noisy - normaliser,
            log_x_clean=at_clean - normaliser,
            log_mix=log_mix,
            is_kept=is_kept,
            plain=torch.logaddexp(normaliser, more) - at_clean - self.evidence * is_kept,
        )

    def sums(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Both sums over the vocabulary that the bound needs, each (M,) float64.

        Args:
            rho: (M,) float64, the weight of a token in the mixture.

        Returns:
            The log-sum-exp of the cavity logits, and S = Σ_k log(1 + ρ·x̂_k).
        """
        normaliser, log_mix = torch.empty_like(rho), torch.empty_like(rho)
        with torch.autocast(self.rows.device.type, enabled=False):
            for block, parts in self._blocks():
                tops, totals = zip(*map(_exponentiate_, parts), strict=True)
                shifts = torch.cat(tops, dim=1).double()  # (R, chunks), the same for the totals
                lse = (shifts + torch.cat(totals, dim=1).double().log()).logsumexp(1)
                scales = torch.exp(shifts + (rho[block].log() - lse)[:, None])
                normaliser[block] = lse
                log_mix[block] = sum(map(_sum_of_log1p_, parts, scales.split(1, dim=1)))
        return normaliser, log_mix

    def logits_at(self, ids: Tensor) -> Tensor:
        """(M,) float64 cavity logits of one token for each position."""
        parts = zip(self.rows.split(_LEAST_ROWS), ids.split(_LEAST_ROWS), strict=True)
        logits = [(rows.double() * self.weight[own].double()).sum(-1) for rows, own in parts]
        return torch.cat(logits) - self.evidence * (ids == self.noisy)

    def _blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Blocks of positions with their cavity logits (R, chunk), in memory that is used again."""
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        V, device = self.weight.shape[0], self.rows.device
        most = max(_LEAST_ROWS, _BLOCK_VALUES.get(device.type, _BLOCK_VALUES["cpu"]) // V)
        columns = [part.to(wide).T for part in self.weight.split(self.vocab_chunk)]
        room = torch.empty(min(most, len(self.rows)) * V, dtype=wide, device=device)
        for first in range(0, len(self.rows), most):
            block = slice(first, min(first + most, len(self.rows)))
            rows, parts, start = self.rows[block].to(wide), [], 0
            for part in columns:
                width = part.shape[1]
                out = room[len(rows) * start : len(rows) * (start + width)].view(len(rows), width)
                parts.append(self._take_evidence_(torch.mm(rows, part, out=out), block, start))
                start += width
            yield block, parts

    def _take_evidence_(self, logits: Tensor, block: slice, start: int) -> Tensor:
        """Subtract the evidence from the noisy tokens that stand among these columns."""
        local = self.noisy[block] - start
        is_here = (local >= 0) & (local < logits.shape[1])
        evidence = (self.evidence[block] * is_here).to(logits.dtype)
        column = local.clamp(0, logits.shape[1] - 1)
        return logits.scatter_add_(1, column[:, None], -evidence[:, None])


def _refuse_other_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise on an id that is no token; a negative one would quietly read a row from the end."""
    wrong = (ids < 0) | (ids >= vocab_size)
    if bool(wrong.any()):
        raise InputError(
            f"{name} ids",
            expected=f"ids in 0..{vocab_size - 1}",
            got=str(int(ids[wrong][0])),
            fix="check the shards with stages/audit_windows.py",
        )


def _exponentiate_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits (R, n) into e^(logit - top), in place; return tops and totals, each (R, 1)."""
    top = logits.amax(1, keepdim=True)
    return top, logits.sub_(top).exp_().sum(1, keepdim=True)


def _sum_of_log1p_(weights: Tensor, scale: Tensor) -> Tensor:
    """(R,) float64: Σ_k log(1 + scale · weight_k); the weights (R, n) are used up."""
    return weights.mul_(scale.to(weights.dtype)).log1p_().sum(1).double()
