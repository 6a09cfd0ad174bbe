"""Is the walk over blocks and tiles exact, whatever the scores are?"""

import pytest
import torch
from torch import Tensor

from canvaslm import scores
from canvaslm.errors import InputError
from canvaslm.scores import soft_embedding


def tokens_and_head(*, at: float, spread: float, n_tokens: int = 30) -> tuple[Tensor, Tensor]:
    """Hidden (2, n/2, 8) and head (41, 8) in float64; scores of ``at`` ± ``spread`` nats."""
    draws = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, n_tokens // 2, 8, generator=draws, dtype=torch.float64)
    weight = torch.randn(41, 8, generator=draws, dtype=torch.float64) * spread / 3
    hidden[..., 0] = 1.0
    weight[:, 0] += at
    return hidden, weight


@pytest.mark.parametrize("vocab_chunk", [1, 7, 40, 41, 100])
@pytest.mark.parametrize(("at", "spread"), [(0, 5), (90, 5), (-90, 5), (-3000, 5), (0, 400)])
def test_soft_embedding_and_log_sum_exp_are_the_definition(
    at: float, spread: float, vocab_chunk: int
) -> None:
    hidden, weight = tokens_and_head(at=at, spread=spread)
    logits = hidden @ weight.T
    found = soft_embedding(hidden, weight, vocab_chunk=vocab_chunk)
    truth = logits.softmax(-1) @ weight
    assert (found.vectors - truth).abs().max() <= 1e-12 * truth.abs().max()
    assert (found.lse - logits.logsumexp(-1)).abs().max() <= 1e-12 * max(1, logits.abs().max())


def test_soft_embedding_of_many_blocks_in_float32_is_close() -> None:
    hidden, weight = tokens_and_head(at=0, spread=5, n_tokens=1300)
    found = soft_embedding(hidden.float(), weight.float(), vocab_chunk=16)
    logits = hidden @ weight.T
    truth = logits.softmax(-1) @ weight
    assert found.vectors.dtype == found.lse.dtype == torch.float32
    assert (found.vectors - truth).norm() < 1e-6 * truth.norm()
    assert (found.lse - logits.logsumexp(-1)).abs().max() < 1e-5


def test_soft_embedding_is_not_differentiable_and_keeps_the_type() -> None:
    hidden, weight = tokens_and_head(at=0, spread=5)
    narrow = hidden.to(torch.bfloat16).requires_grad_()
    found = soft_embedding(narrow, weight.float(), vocab_chunk=7)
    assert not found.vectors.requires_grad
    assert found.vectors.dtype == torch.bfloat16
    assert found.lse.dtype == torch.float32


def test_chunk_of_no_word_is_refused() -> None:
    with pytest.raises(InputError, match="vocab_chunk"):
        soft_embedding(*tokens_and_head(at=0, spread=5), vocab_chunk=0)


@pytest.mark.parametrize("has_amx", [True, False])
def test_bfloat16_is_rounded_by_the_products_of_a_cpu_that_gains_by_it(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: has_amx)
    settings = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue] - set late
    before = settings.fp32_precision
    with scores.exact_types(torch.zeros(1), torch.bfloat16):
        assert settings.fp32_precision == ("bf16" if has_amx else before)
    with scores.exact_types(torch.zeros(1), torch.float32):
        assert settings.fp32_precision == before
    with pytest.raises(KeyError), scores.exact_types(torch.zeros(1), torch.bfloat16):
        raise KeyError
    assert settings.fp32_precision == before


def test_bfloat16_rounded_by_products_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: True)
    hidden, weight = (x.to(torch.bfloat16) for x in tokens_and_head(at=0, spread=5))
    found = soft_embedding(hidden, weight, vocab_chunk=7)
    truth = (hidden.double() @ weight.double().T).softmax(-1) @ weight.double()
    assert (found.vectors - truth).norm() < 6e-3 * truth.norm()
