import math

import pytest
import torch
from torch import Tensor

from canvaslm.diffusion import cavity_head
from canvaslm.diffusion.cavity_head import CavityHead

V, WIDTH, N_ROWS = 37, 6, 23


def _head(dtype: torch.dtype, *, vocab_chunk: int, scale: float = 1.0) -> CavityHead:
    generator = torch.Generator().manual_seed(0)
    return CavityHead(
        rows=scale * torch.randn(N_ROWS, WIDTH, generator=generator, dtype=dtype),
        weight=torch.randn(V, WIDTH, generator=generator, dtype=dtype),
        noisy=torch.randint(V, (N_ROWS,), generator=generator),
        evidence=torch.rand(N_ROWS, generator=generator, dtype=torch.float64) * 9,
        vocab_chunk=vocab_chunk,
    )


def _dense(head: CavityHead, rho: Tensor) -> tuple[Tensor, Tensor]:
    logits = head.rows.double() @ head.weight.double().T
    logits[torch.arange(N_ROWS), head.noisy] -= head.evidence
    mixture = torch.log1p(rho[:, None] * logits.softmax(1)).sum(1)
    return logits.logsumexp(1), mixture


@pytest.mark.parametrize("vocab_chunk", [5, V, 64])
@pytest.mark.parametrize("n_rows", [1, 7, 100])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_sums_are_the_dense_ones_for_any_block_and_chunk(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, most: float, n_rows: int, vocab_chunk: int
) -> None:
    monkeypatch.setattr(cavity_head, "_LEAST_ROWS", n_rows)
    monkeypatch.setattr(cavity_head, "_BLOCK_VALUES", {"cpu": 1})
    head = _head(dtype, vocab_chunk=vocab_chunk)
    rho = torch.logspace(-6, 6, N_ROWS, dtype=torch.float64)
    for found, due in zip(head.sums(rho), _dense(head, rho), strict=True):
        torch.testing.assert_close(found, due, rtol=most, atol=most)


def test_a_prediction_that_is_certain_has_sums_that_are_finite() -> None:
    head = _head(torch.float32, vocab_chunk=5, scale=1e4)  # logits far beyond what exp can hold
    rho = torch.full((N_ROWS,), 1e6, dtype=torch.float64)
    normaliser, log_mix = head.sums(rho)
    assert bool(normaliser.isfinite().all())
    torch.testing.assert_close(
        log_mix, torch.full_like(log_mix, math.log1p(1e6)), rtol=1e-3, atol=0
    )


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    head, rho = _head(torch.float32, vocab_chunk=5), torch.ones(N_ROWS, dtype=torch.float64)
    whole = torch.stack(head.sums(rho))
    head.rows[3] = math.nan
    broken = torch.stack(head.sums(rho))
    assert bool(broken[:, 3].isnan().all())
    others = torch.arange(N_ROWS) != 3
    assert torch.equal(broken[:, others], whole[:, others])
