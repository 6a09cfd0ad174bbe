"""What noisy positions cost: all or the changed ones, with the known evidence, or by the bound."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from canvaslm import scores
from canvaslm.diffusion.bound import step_nats, token_evidence
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.objective.noisy_loss import Denoised, noisy_loss
from oracles import own_evidence, tilted_time
from shapes import tiny_diffusion

V, D, N = 11, 6, 4


def draw(n_times: int = N, *, is_cavity: bool = False) -> tuple[Denoised, Tensor]:
    """Positions at every time, some of them clean, and a head, in float64."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 10, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    clean, other = torch.randint(V, (2, 3, 10), generator=generator)
    times = torch.arange(30).view(3, 10) % (n_times + 1)
    is_kept = torch.rand(3, 10, generator=generator) < 0.5
    noisy = torch.where(is_kept | (times == 0), clean, other)
    return Denoised(
        hidden=hidden, noisy=noisy, clean=clean, times=times, is_cavity=is_cavity, tilt=0.0
    ), weight


def biased(denoised: Denoised, weight: Tensor, n_times: int = N) -> Tensor:
    """Logits with the evidence of the noisy token, one position at a time."""
    logits = (denoised.hidden @ weight.T).clone()
    for place in (denoised.times > 0).nonzero().tolist():
        b, i = place
        t = int(denoised.times[b, i])
        evidence = own_evidence(t, n_times=n_times, vocab_size=V)
        bump = functional.one_hot(denoised.noisy[b, i], V).double() * evidence
        logits[b, i] = logits[b, i] + bump
    return logits


def expected(
    denoised: Denoised, weight: Tensor, diffusion: DiffusionParams
) -> tuple[Tensor, Tensor]:
    """The loss of each position from a table of all logits, and which positions count."""
    counted = denoised.times > 0
    if diffusion.loss == "changed":
        counted = counted & (denoised.noisy != denoised.clean)
    logits = denoised.hidden @ weight.T
    if denoised.is_cavity:
        logits = biased(denoised, weight)
    if diffusion.loss == "bound":
        times = denoised.times.clamp(min=1)
        each = N * step_nats(logits, denoised.noisy, denoised.clean, t=times, n_times=N)
    else:
        each = functional.cross_entropy(
            logits.flatten(0, 1), denoised.clean.flatten(), reduction="none"
        ).view(3, 10)
    return each, counted


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", ["plain", "changed", "bound"])
def test_each_loss_and_its_gradients_are_those_of_all_logits(loss: str, bias: bool) -> None:
    diffusion = tiny_diffusion(loss=loss)
    denoised, weight = draw(is_cavity=bias)
    each, counted = expected(denoised, weight, diffusion)
    due = each[counted].sum()
    got = noisy_loss(denoised, weight, diffusion=diffusion, vocab_chunk=4)
    assert got.n_targets == int(counted.sum())
    assert got.companion is None
    torch.testing.assert_close(got.nats.double(), due, rtol=1e-11, atol=1e-11)
    inputs = (denoised.hidden, weight)
    for mine, theirs in zip(
        torch.autograd.grad(got.nats, inputs), torch.autograd.grad(due, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", ["plain", "changed", "bound"])
@pytest.mark.parametrize(
    ("dtype", "nats_error", "error"),
    [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 2e-4, 5e-3)],
    ids=["float32", "bfloat16"],
)
def test_each_loss_is_that_of_all_logits_in_the_working_type(
    dtype: torch.dtype,
    nats_error: float,
    error: float,
    loss: str,
    bias: bool,
    has_tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under autocast only the factors of products are rounded: no logit of the tens of nats is."""
    monkeypatch.setattr(scores, "multiplies_in_tiles", lambda: has_tiles)
    diffusion = tiny_diffusion(loss=loss)
    plain, weight = draw(is_cavity=bias)
    hidden = (6 * plain.hidden.detach()).to(dtype).requires_grad_()
    head = weight.detach().float().requires_grad_()
    exact_head = head.detach().double().requires_grad_()
    exact = dataclasses.replace(plain, hidden=hidden.detach().double().requires_grad_())
    each, counted = expected(exact, exact_head, diffusion)
    due = each[counted].sum()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        denoised = dataclasses.replace(plain, hidden=hidden)
        nats = noisy_loss(denoised, head, diffusion=diffusion, vocab_chunk=4).nats
    torch.testing.assert_close(nats.double(), due, rtol=nats_error, atol=0)
    for mine, theirs in zip(
        torch.autograd.grad(nats, (hidden, head)),
        torch.autograd.grad(due, (exact.hidden, exact_head)),
        strict=True,
    ):
        assert (mine - theirs).norm() <= error * theirs.norm()


def test_clean_positions_pull_at_nothing() -> None:
    losses = [("plain", False), ("changed", False), ("bound", False), ("plain", True)]
    for loss, is_cavity in losses:
        denoised, weight = draw(is_cavity=is_cavity)
        diffusion = tiny_diffusion(loss=loss)
        nats = noisy_loss(denoised, weight, diffusion=diffusion, vocab_chunk=4).nats
        (pull,) = torch.autograd.grad(nats, denoised.hidden)
        assert not bool(pull[denoised.times == 0].any())
        assert bool(pull[(denoised.times > 0) & (denoised.noisy != denoised.clean)].any(-1).all())


def test_under_the_bias_a_network_that_knows_nothing_copies_as_much_as_it_should() -> None:
    """Logits of 0 are a uniform cavity; its posterior is the likelihood of each clean token."""
    denoised, weight = draw()
    blank = Denoised(
        hidden=torch.zeros_like(denoised.hidden),
        noisy=denoised.noisy,
        clean=denoised.clean,
        times=denoised.times,
        is_cavity=True,
        tilt=0.0,
    )
    got = noisy_loss(blank, weight, diffusion=tiny_diffusion(), vocab_chunk=4)
    due = 0.0
    for t, noisy, clean in zip(
        *(x.flatten().tolist() for x in (blank.times, blank.noisy, blank.clean)), strict=True
    ):
        if t == 0:
            continue
        share = math.cos(math.pi / 2 * t / N) ** 2 if t < N else 0.0
        due -= math.log(share * (noisy == clean) + (1 - share) / V)
    assert got.nats.item() == pytest.approx(due, rel=1e-12)


def test_continuous_times_give_the_same_loss_where_they_agree() -> None:
    for is_cavity, changes in ((False, {}), (False, {"loss": "changed"}), (True, {})):
        denoised, weight = draw(is_cavity=is_cavity)
        real = dataclasses.replace(denoised, times=denoised.times / N)
        both = [
            noisy_loss(x, weight, diffusion=tiny_diffusion(train_times=n, **changes), vocab_chunk=4)
            for x, n in ((denoised, N), (real, None))
        ]
        torch.testing.assert_close(both[0].nats, both[1].nats, rtol=1e-12, atol=0)


def test_the_evidence_of_a_token_is_finite_at_the_smallest_times() -> None:
    times = torch.tensor([1e-300, 1e-12, 1e-9, 1e-4, 0.5, 1.0], dtype=torch.float64)
    evidence = token_evidence(times, 1, V)
    assert bool(evidence.isfinite().all())
    assert float(evidence[-1]) == 0.0
    assert evidence.tolist() == sorted(evidence.tolist(), reverse=True)


def test_the_mean_of_the_bound_loss_over_all_times_is_the_bound() -> None:
    """A constant cavity costs −log of it for every N (docs/bound.md), drawn noise or not."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(V, generator=generator, dtype=torch.float64)
    cavity, clean = logits.log_softmax(0), 3
    weight = torch.eye(V, dtype=torch.float64)
    total = 0.0
    for t in range(1, N + 1):
        share = math.cos(math.pi / 2 * t / N) ** 2 if t < N else 0.0
        for noisy in range(V):
            chance = share * (noisy == clean) + (1 - share) / V
            one = Denoised(
                hidden=logits.expand(1, 1, V).clone(),
                noisy=torch.tensor([[noisy]]),
                clean=torch.tensor([[clean]]),
                times=torch.tensor([[t]]),
                is_cavity=True,
                tilt=0.0,
            )
            diffusion = tiny_diffusion(loss="bound")
            nats = noisy_loss(one, weight, diffusion=diffusion, vocab_chunk=4).nats
            total += chance * float(nats) / N
    assert total == pytest.approx(-float(cavity[clean]), rel=1e-12)


@pytest.mark.parametrize("tilt", [0.5, 3.0])
@pytest.mark.parametrize("loss", ["plain", "changed", "bound"])
def test_under_a_tilt_each_position_costs_what_its_own_time_says(loss: str, tilt: float) -> None:
    """A canvas of five is five canvases of one at the times of its positions."""
    denoised, weight = draw(is_cavity=True)
    canvases = torch.tensor([[1, 4], [0, 2], [3, 1]])
    at, before = (
        torch.tensor(
            [
                [
                    tilted_time(max(int(t), 0), i, canvas_tokens=5, n_times=N, tilt=tilt)
                    for t in row
                    for i in range(5)
                ]
                for row in times
            ],
            dtype=torch.float64,
        )
        for times in (canvases, canvases - 1)
    )
    noisy = torch.where(at > 0, denoised.noisy, denoised.clean)
    whole = dataclasses.replace(denoised, noisy=noisy, times=canvases, tilt=tilt)
    got = noisy_loss(whole, weight, diffusion=tiny_diffusion(loss=loss), vocab_chunk=4)
    alone = dataclasses.replace(denoised, noisy=noisy, times=at)
    if loss != "bound":
        due = noisy_loss(alone, weight, diffusion=tiny_diffusion(loss=loss), vocab_chunk=4)
        assert got.n_targets == due.n_targets
        torch.testing.assert_close(got.nats, due.nats, rtol=1e-9, atol=1e-9)
        return
    logits = denoised.hidden @ weight.T
    evidence = token_evidence(at, N, V)
    logits = logits + evidence[..., None] * functional.one_hot(noisy, V)
    moves = before < at
    nats = step_nats(
        logits[moves], noisy[moves], denoised.clean[moves], t=at[moves], n_times=N,
        before=before[moves],
    )  # fmt: skip
    assert got.n_targets == 5 * int((canvases > 0).sum())
    torch.testing.assert_close(got.nats.double(), N * nats.sum(), rtol=1e-9, atol=1e-9)
