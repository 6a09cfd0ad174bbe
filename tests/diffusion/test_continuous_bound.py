import math

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.diffusion.continuous_bound import chunked_continuous_nats, continuous_nats
from canvaslm.errors import InputError
from oracles import kept_share, noise_matrix, posterior_table

LETTERS = np.array([1, 2, 2, 3, 3, 4, 7]) / 22
V, WIDTH, N_ROWS = 13, 4, 60


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, noisy and clean ids (half of them kept), and times of all sizes."""
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(N_ROWS, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(V, WIDTH, generator=generator, dtype=dtype)
    clean = torch.randint(V, (N_ROWS,), generator=generator)
    noisy = clean.where(torch.arange(N_ROWS) % 2 == 0, clean.roll(1))
    return hidden, weight, noisy, clean, torch.linspace(0.002, 0.998, N_ROWS, dtype=torch.float64)


@pytest.mark.parametrize("vocab_chunk", [1, 5, 12, V, 100])
def test_chunked_nats_are_the_dense_ones_for_every_chunk(vocab_chunk: int) -> None:
    hidden, weight, noisy, clean, times = drawn()
    expected = continuous_nats(hidden @ weight.T, noisy, clean, time=times)
    found = chunked_continuous_nats(
        hidden, weight, noisy, clean, time=times, vocab_chunk=vocab_chunk
    )
    torch.testing.assert_close(found.bound, expected, rtol=1e-10, atol=1e-10)


def test_chunked_nats_in_float32_are_the_dense_ones_at_a_full_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(48, 32, generator=generator)
    weight = torch.randn(50_257, 32, generator=generator) * (2 / 32**0.5)
    clean = torch.randint(50_257, (48,), generator=generator)
    noisy = clean.where(torch.arange(48) % 2 == 0, clean.roll(1))
    times = torch.linspace(0.01, 0.99, 48, dtype=torch.float64)
    truth = continuous_nats(hidden.double() @ weight.double().T, noisy, clean, time=times)
    for vocab_chunk in (8192, 60_000):
        found = chunked_continuous_nats(
            hidden, weight, noisy, clean, time=times, vocab_chunk=vocab_chunk
        )
        assert float(((found.bound - truth) / (1 + truth)).abs().max()) < 4e-6


def test_the_diagnostic_is_the_cross_entropy_of_the_posterior() -> None:
    hidden, weight, noisy, clean, times = drawn()
    found = chunked_continuous_nats(hidden, weight, noisy, clean, time=times, vocab_chunk=5)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, clean, reduction="none")
    torch.testing.assert_close(found.plain, expected, rtol=0, atol=1e-11)


def dense(logits: Tensor, noisy: Tensor, clean: Tensor, times: Tensor) -> Tensor:
    return continuous_nats(logits, noisy, clean, time=times)


def chunked(logits: Tensor, noisy: Tensor, clean: Tensor, times: Tensor) -> Tensor:
    eye = torch.eye(7, dtype=torch.float64)
    return chunked_continuous_nats(logits, eye, noisy, clean, time=times, vocab_chunk=3).bound


@pytest.mark.parametrize("form", [dense, chunked])
@pytest.mark.parametrize("clean", [0, 3])
def test_a_constant_cavity_costs_minus_the_logarithm_of_the_truth(clean: int, form) -> None:
    nodes, weights = np.polynomial.legendre.leggauss(400)
    times = (nodes + 1) / 2
    tables = np.array([posterior_table(LETTERS, time, 1) for time in times])
    noise = np.array([noise_matrix(kept_share(time, 1), 7)[clean] for time in times])
    nats = form(
        torch.from_numpy(np.log(tables)),  # (nodes, noisy, V)
        torch.arange(7).expand(400, -1),
        torch.full((400, 7), clean),
        torch.from_numpy(times)[:, None].expand(400, 7),
    )
    total = float(np.sum(weights / 2 * (noise * nats.numpy()).sum(1)))
    assert total == pytest.approx(-math.log(LETTERS[clean]), abs=2e-5)


def test_pure_noise_costs_nothing_and_the_smallest_time_a_finite_amount() -> None:
    hidden, weight, noisy, clean, _ = drawn()
    at = {
        time: chunked_continuous_nats(hidden, weight, noisy, clean, time=time, vocab_chunk=5).bound
        for time in (1.0, 1 - 1e-12, 1e-6, 2.0**-53 / 64)
    }
    assert bool((at[1.0] == 0).all())
    assert float(at[1 - 1e-12].abs().max()) < 1e-9  # it vanishes with the cube of what is left
    assert all(bool(nats.isfinite().all()) for nats in at.values())


@pytest.mark.parametrize("time", [0.0, -0.5, 1.5, math.nan])
def test_a_time_outside_is_refused(time: float) -> None:
    hidden, weight, noisy, clean, _ = drawn()
    with pytest.raises(InputError):
        chunked_continuous_nats(hidden, weight, noisy, clean, time=time, vocab_chunk=5)


@pytest.mark.parametrize("place", ["noisy", "clean"])
def test_an_id_that_is_no_token_is_refused(place: str) -> None:
    hidden, weight, noisy, clean, times = drawn()
    (noisy if place == "noisy" else clean)[3] = V
    with pytest.raises(InputError, match=f"{place} ids: .*got {V}"):
        chunked_continuous_nats(hidden, weight, noisy, clean, time=times, vocab_chunk=5)
