import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm.diffusion.bound import cavity_logits, step_nats, token_evidence
from canvaslm.diffusion.continuous_bound import continuous_nats
from canvaslm.diffusion.corruption import Noisy
from canvaslm.diffusion.levels import ContinuousLevels, GridLevels
from canvaslm.layout import Layout
from oracles import (
    enumerated_step_nats,
    kept_share,
    noise_matrix,
    own_evidence,
    tilted_time,
)

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
    levels = GridLevels(n_times=n_times, told=told, tilt=0.0)
    clean, noisy, logits = drawn(levels, tiny_layout)
    t = noisy.times.repeat_interleave(4, 1)
    k = torch.ceil(t * told / n_times - 1e-9).long()
    shown = levels.shown_times(noisy).repeat_interleave(4, 1)
    torch.testing.assert_close(shown, k.double() / told)
    cavity = cavity_logits(logits, noisy.ids, t=k, n_times=told)
    evidence = token_evidence(t, n_times=n_times, vocab_size=V)
    posterior = cavity + evidence[..., None] * functional.one_hot(noisy.ids, V)
    expected = step_nats(posterior, noisy.ids, clean, t=t, n_times=n_times)
    found = nats_of(levels, logits, noisy, clean)
    assert n_times == 1 or int(t.min()) == 1  # the reconstruction is among them
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("told", [1, 4, 16])
def test_the_same_holds_in_continuous_time(tiny_layout: Layout, told: int) -> None:
    levels = ContinuousLevels(n_passes=4, told=told, tilt=0.0)
    clean, noisy, logits = drawn(levels, tiny_layout)
    time = noisy.times.repeat_interleave(4, 1)
    k = torch.ceil(time * told).long()
    torch.testing.assert_close(levels.shown_times(noisy).repeat_interleave(4, 1), k.double() / told)
    cavity = cavity_logits(logits, noisy.ids, t=k, n_times=told)
    evidence = token_evidence(time, n_times=1, vocab_size=V)
    posterior = cavity + evidence[..., None] * functional.one_hot(noisy.ids, V)
    expected = continuous_nats(posterior, noisy.ids, clean, time=time) / 4
    found = nats_of(levels, logits, noisy, clean)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_told_of_the_grid_itself_is_told_the_time(tiny_layout: Layout) -> None:
    plain, told = GridLevels(n_times=4, tilt=0.0), GridLevels(n_times=4, told=4, tilt=0.0)
    clean, noisy, logits = drawn(plain, tiny_layout)
    assert torch.equal(plain.shown_times(noisy), told.shown_times(noisy))
    assert torch.equal(nats_of(plain, logits, noisy, clean), nats_of(told, logits, noisy, clean))


def test_a_time_on_the_told_grid_is_told_as_it_is() -> None:
    times = torch.tensor([[1 / 4, 1 / 2, 3 / 4, 1.0]], dtype=torch.float64)
    noisy = Noisy(ids=torch.zeros(1, 4, dtype=torch.int64), times=times)
    assert torch.equal(
        ContinuousLevels(n_passes=1, told=4, tilt=0.0).shown_times(noisy).double(), times
    )


def test_a_sweep_says_what_the_network_is_told() -> None:
    told = {GridLevels(n_times=4, told=n, tilt=0.0).noise_levels for n in (None, 4, 16)}
    told |= {ContinuousLevels(n_passes=4, told=n, tilt=0.0).noise_levels for n in (None, 4, 16)}
    assert len(told) == 6


def test_evidence_of_many_times_is_that_of_each() -> None:
    found = token_evidence(torch.arange(1, 9), n_times=8, vocab_size=V)
    expected = [own_evidence(t, n_times=8, vocab_size=V) for t in range(1, 9)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "levels", [GridLevels(n_times=4, tilt=0.0), ContinuousLevels(n_passes=4, tilt=0.0)]
)
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


# --- a time for each position ---------------------------------------------------------------------


def every_pair(times: list[float], canvas_tokens: int, vocab_size: int) -> tuple[Noisy, Tensor]:
    """For each time and each pair of tokens a window of one canvas that holds it throughout."""
    pairs = [(t, i, j) for t in times for i in range(vocab_size) for j in range(vocab_size)]
    at, noisy, clean = (torch.tensor(column) for column in zip(*pairs, strict=True))
    ids, truth = (x[:, None].expand(-1, canvas_tokens) for x in (noisy, clean))
    return Noisy(ids=ids.contiguous(), times=at[:, None]), truth.contiguous()


@pytest.mark.parametrize("is_cavity", [False, True])
@pytest.mark.parametrize("n_times", [1, 2, 5])
@pytest.mark.parametrize("tilt", [0.0, 0.7, 2.0, 9.0])
def test_a_step_under_a_tilt_is_that_of_the_times_of_each_position(
    tilt: float, n_times: int, is_cavity: bool
) -> None:
    """By enumeration: a step between any two times, reconstruction, and no step at all."""
    vocab_size, L = 3, 4
    cavity = np.random.default_rng(1).dirichlet(np.ones(vocab_size))
    noisy, clean = every_pair(list(range(1, n_times + 1)), L, vocab_size)
    stands = [
        [
            [
                tilted_time(at, i, canvas_tokens=L, n_times=n_times, tilt=tilt)
                for at in (int(t), int(t) - 1)
            ]
            for i in range(L)
        ]
        for t in noisy.times[:, 0]
    ]
    due, logits = torch.empty(clean.shape).double(), torch.empty(*clean.shape, vocab_size).double()
    for b, row in enumerate(stands):
        for i, (at, before) in enumerate(row):
            seen, truth = int(noisy.ids[b, i]), int(clean[b, i])
            kept = min(kept_share(at, n_times), 1 - 2**-53)
            joint = cavity * noise_matrix(kept, vocab_size)[:, seen]
            posterior = joint / joint.sum()
            due[b, i] = enumerated_step_nats(posterior, seen, truth, at, n_times, before)
            logits[b, i] = torch.from_numpy(np.log(cavity if is_cavity else posterior))
    levels = GridLevels(n_times=n_times, tilt=tilt)
    eye = torch.eye(vocab_size, dtype=torch.float64)
    found = levels.nats(logits, eye, noisy, clean, vocab_chunk=2, is_cavity=is_cavity).bound
    torch.testing.assert_close(found, due, rtol=1e-9, atol=1e-9)
    moved = torch.tensor([[at > before for at, before in row] for row in stands])
    assert torch.equal(found != 0, moved & (found != 0))
    assert bool(moved.any(0).all())  # each position has a step of its own


@pytest.mark.parametrize("is_cavity", [False, True])
@pytest.mark.parametrize(
    "levels", [GridLevels(n_times=4, tilt=9.0), ContinuousLevels(n_passes=4, tilt=9.0)]
)
def test_where_a_token_is_clean_by_its_time_neither_figure_counts_it(
    levels: GridLevels | ContinuousLevels, is_cavity: bool
) -> None:
    """The logits there are of a network that learned nothing there, and may be anything."""
    is_grid = isinstance(levels, GridLevels)
    times = torch.arange(1, 5)[:, None] if is_grid else torch.arange(1, 5)[:, None].double() / 4
    ids = torch.tensor([[0, 1, 2, 1]]).expand(4, -1)
    logits = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    is_clean = torch.tensor(
        [
            [tilted_time(t / 4, i, canvas_tokens=4, n_times=1, tilt=9.0) == 0 for i in range(4)]
            for t in range(1, 5)
        ]
    )
    assert 0 < int(is_clean.sum()) < is_clean.numel()
    eye = torch.eye(3, dtype=torch.float64)
    found = [
        levels.nats(
            logits.masked_fill(is_clean[..., None], there),
            eye,
            Noisy(ids=ids, times=times),
            ids,
            vocab_chunk=2,
            is_cavity=is_cavity,
        )
        for there in (0.0, math.nan)
    ]
    for nats in found:
        for part in (nats.bound, nats.plain):
            assert torch.equal(part[is_clean], torch.zeros(int(is_clean.sum())).double())
            assert bool(part.isfinite().all())
    torch.testing.assert_close(found[0].plain, found[1].plain)
    assert bool((found[0].plain[~is_clean] > 0).all())


@pytest.mark.parametrize("n_times", [4, 16])
def test_a_step_that_ends_just_above_clean_is_finite(n_times: int) -> None:
    """A third, rounded: a position stands at a time whose clean share is 1 in float64."""
    clean = torch.zeros(1, 13, dtype=torch.int64)
    for time in range(1, n_times + 1):
        noisy = Noisy(ids=torch.ones_like(clean), times=torch.tensor([[time]]))
        found = GridLevels(n_times=n_times, tilt=0.33333333).nats(
            torch.zeros(1, 13, 3).double(),
            torch.eye(3).double(),
            noisy,
            clean,
            vocab_chunk=3,
            is_cavity=True,
        )
        assert bool(found.bound.isfinite().all())


@pytest.mark.parametrize("n_times", [1, 2, 7])
@pytest.mark.parametrize("tilt", [0.0, 0.5, 3.0])
def test_under_every_tilt_a_constant_cavity_costs_minus_the_logarithm_of_the_truth(
    tilt: float, n_times: int
) -> None:
    vocab_size, L = 4, 3
    cavity = np.random.default_rng(2).dirichlet(np.ones(vocab_size))
    noisy, clean = every_pair(list(range(1, n_times + 1)), L, vocab_size)
    levels, eye = GridLevels(n_times=n_times, tilt=tilt), torch.eye(vocab_size).double()
    logits = torch.from_numpy(np.log(cavity)).expand(*clean.shape, -1)
    nats = levels.nats(logits, eye, noisy, clean, vocab_chunk=9, is_cavity=True).bound
    total = np.zeros((vocab_size, L))
    for b, t in enumerate(noisy.times[:, 0].tolist()):
        for i in range(L):
            at = tilted_time(t, i, canvas_tokens=L, n_times=n_times, tilt=tilt)
            truth, seen = int(clean[b, i]), int(noisy.ids[b, i])
            total[truth, i] += noise_matrix(kept_share(at, n_times), vocab_size)[
                truth, seen
            ] * float(nats[b, i])
    np.testing.assert_allclose(total, -np.log(cavity)[:, None].repeat(L, 1), rtol=1e-9)


@pytest.mark.parametrize("tilt", [0.0, 2.0])
def test_the_same_holds_of_the_integral_over_continuous_time(tilt: float) -> None:
    vocab_size, L, n = 3, 4, 6000
    cavity = np.random.default_rng(3).dirichlet(np.ones(vocab_size))
    noisy, clean = every_pair([(k + 0.5) / n for k in range(n)], L, vocab_size)
    levels, eye = ContinuousLevels(n_passes=2, tilt=tilt), torch.eye(vocab_size).double()
    logits = torch.from_numpy(np.log(cavity)).expand(*clean.shape, -1)
    cost = levels.nats(logits, eye, noisy, clean, vocab_chunk=9, is_cavity=True)
    each = torch.tensor(
        [
            [tilted_time(t, i, canvas_tokens=L, n_times=1, tilt=tilt) for i in range(L)]
            for t in noisy.times[:, 0].tolist()
        ]
    )
    share = torch.cos(each.double() * (np.pi / 2)) ** 2
    chance = share * (noisy.ids == clean) + (1 - share) / vocab_size
    for truth in range(vocab_size):
        here = clean[:, 0] == truth
        integral = 2 * (chance * cost.bound)[here].sum(0) / n  # the sweep's two parts add up
        due = torch.full((L,), -float(np.log(cavity[truth])), dtype=torch.float64)
        torch.testing.assert_close(integral, due, rtol=2e-3, atol=0)
    assert not bool(cost.plain[(each == 0)].any())


@pytest.mark.parametrize("told", [2, 8])
@pytest.mark.parametrize("kind", [GridLevels, ContinuousLevels])
def test_under_a_tilt_what_is_said_of_a_told_time_is_a_cavity_at_the_time_itself(
    tiny_layout: Layout, told: int, kind: type
) -> None:
    n = {"n_times": 4} if kind is GridLevels else {"n_passes": 4}
    plain, other = kind(**n, tilt=2.0), kind(**n, tilt=2.0, told=told)
    clean, noisy, logits = drawn(plain, tiny_layout)
    shown = other.shown_times(noisy)
    of_told = torch.tensor(
        [
            [
                min(tilted_time(float(t), i % 4, canvas_tokens=4, n_times=1, tilt=2.0), 1.0)
                for i, t in enumerate(row)
            ]
            for row in shown.repeat_interleave(4, 1)
        ],
        dtype=torch.float64,
    )
    seen = token_evidence(of_told, n_times=1, vocab_size=V)
    cavity = logits - seen[..., None] * functional.one_hot(noisy.ids, V)
    eye = torch.eye(V, dtype=torch.float64)
    due = plain.nats(cavity, eye, noisy, clean, vocab_chunk=10, is_cavity=True).bound
    torch.testing.assert_close(nats_of(other, logits, noisy, clean), due, rtol=1e-9, atol=1e-9)
