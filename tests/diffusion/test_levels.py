import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.diffusion.bound import cavity_logits, own_evidence, step_nats, token_evidence
from canvaslm.diffusion.continuous_bound import continuous_nats
from canvaslm.diffusion.corruption import Noisy
from canvaslm.diffusion.levels import ContinuousLevels, GridLevels
from canvaslm.layout import Layout

V = 37


def drawn(levels: GridLevels | ContinuousLevels, layout: Layout) -> tuple[Tensor, Noisy, Tensor]:
    """Windows, the noise of a pass, and posterior logits that a network might have."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(V, (6, layout.window_tokens), generator=generator)
    noisy = levels.draw(clean, np.arange(6), pass_number=0, layout=layout, seed=1)
    logits = 2 * torch.randn(*clean.shape, V, generator=generator, dtype=torch.float64)
    return clean, noisy, logits + 3 * functional.one_hot(noisy.ids, V)


def nats_of(
    levels: GridLevels | ContinuousLevels, logits: Tensor, noisy: Noisy, clean: Tensor
) -> Tensor:
    eye = torch.eye(V, dtype=torch.float64)
    return levels.nats(logits, eye, noisy, clean, vocab_chunk=10, is_cavity=False).bound


@pytest.mark.parametrize(("n_times", "told"), [(4, 16), (16, 4), (6, 4), (3, 1), (1, 3)])
def test_what_a_network_says_of_a_told_time_is_a_cavity_at_the_time_itself(
    tiny_layout: Layout, n_times: int, told: int
) -> None:
    levels = GridLevels(n_times=n_times, told=told)
    clean, noisy, logits = drawn(levels, tiny_layout)
    t = noisy.times.repeat_interleave(4, 1)
    k = torch.ceil(t * told / n_times - 1e-9).long()
    shown = levels.shown_times(noisy).repeat_interleave(4, 1)
    torch.testing.assert_close(shown, k / told)
    cavity = cavity_logits(logits, noisy.ids, t=k, n_times=told)
    evidence = token_evidence(t, n_times=n_times, vocab_size=V)
    posterior = cavity + evidence[..., None] * functional.one_hot(noisy.ids, V)
    expected = step_nats(posterior, noisy.ids, clean, t=t, n_times=n_times)
    found = nats_of(levels, logits, noisy, clean)
    assert n_times == 1 or int(t.min()) == 1  # the reconstruction is among them
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("told", [1, 4, 16])
def test_the_same_holds_in_continuous_time(tiny_layout: Layout, told: int) -> None:
    levels = ContinuousLevels(n_passes=4, told=told)
    clean, noisy, logits = drawn(levels, tiny_layout)
    time = noisy.times.repeat_interleave(4, 1)
    k = torch.ceil(time * told).long()
    torch.testing.assert_close(levels.shown_times(noisy).repeat_interleave(4, 1), k / told)
    cavity = cavity_logits(logits, noisy.ids, t=k, n_times=told)
    evidence = token_evidence(time, n_times=1, vocab_size=V)
    posterior = cavity + evidence[..., None] * functional.one_hot(noisy.ids, V)
    expected = continuous_nats(posterior, noisy.ids, clean, time=time) / 4
    found = nats_of(levels, logits, noisy, clean)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_told_of_the_grid_itself_is_told_the_time(tiny_layout: Layout) -> None:
    plain, told = GridLevels(n_times=4), GridLevels(n_times=4, told=4)
    clean, noisy, logits = drawn(plain, tiny_layout)
    assert torch.equal(plain.shown_times(noisy), told.shown_times(noisy))
    assert torch.equal(nats_of(plain, logits, noisy, clean), nats_of(told, logits, noisy, clean))


def test_a_time_on_the_told_grid_is_told_as_it_is() -> None:
    times = torch.tensor([[1 / 4, 1 / 2, 3 / 4, 1.0]], dtype=torch.float64)
    noisy = Noisy(ids=torch.zeros(1, 4, dtype=torch.int64), times=times)
    assert torch.equal(ContinuousLevels(n_passes=1, told=4).shown_times(noisy).double(), times)


def test_a_sweep_says_what_the_network_is_told() -> None:
    told = {GridLevels(n_times=4, told=n).noise_levels for n in (None, 4, 16)}
    told |= {ContinuousLevels(n_passes=4, told=n).noise_levels for n in (None, 4, 16)}
    assert len(told) == 6


def test_evidence_of_many_times_is_that_of_each() -> None:
    found = token_evidence(torch.arange(1, 9), n_times=8, vocab_size=V)
    expected = [own_evidence(t, n_times=8, vocab_size=V) for t in range(1, 9)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("levels", [GridLevels(n_times=4), ContinuousLevels(n_passes=4)])
def test_logits_of_the_cavity_cost_what_the_posterior_of_the_same_cavity_costs(
    tiny_layout: Layout, levels: GridLevels | ContinuousLevels
) -> None:
    """Bound and diagnostic, reconstruction included."""
    clean, noisy, logits = drawn(levels, tiny_layout)
    times = noisy.times.repeat_interleave(4, 1)
    n_times = levels.n_passes if isinstance(levels, GridLevels) else 1
    evidence = token_evidence(times, n_times=n_times, vocab_size=V)
    cavity = logits - evidence[..., None] * functional.one_hot(noisy.ids, V)
    eye = torch.eye(V, dtype=torch.float64)
    posterior, bare = (
        levels.nats(given, eye, noisy, clean, vocab_chunk=10, is_cavity=is_cavity)
        for given, is_cavity in ((logits, False), (cavity, True))
    )
    torch.testing.assert_close(bare.bound, posterior.bound, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(bare.plain, posterior.plain, rtol=1e-10, atol=1e-10)
