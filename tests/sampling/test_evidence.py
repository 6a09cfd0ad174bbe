"""Letters: V vocabulary, L canvas tokens, N times."""

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.diffusion.bound import cavity_logits
from canvaslm.layout import Layout
from canvaslm.randomness import stream
from canvaslm.sampling.evidence import Cavity, Evidence, Posterior, excess
from canvaslm.sampling.prediction import Prediction, invert
from canvaslm.sampling.sampler import CanvasSampler, CanvasStep
from canvaslm.sampling.stopping import Never
from oracles import (
    all_sequences,
    copy_chain,
    kept_share,
    own_evidence,
    posterior_table,
    token_posteriors,
    weigh,
)

# Where a Markov source goes from the letter 0, and from the letter 1.
STEPS = np.array([[0.6, 0.3, 0.06, 0.04], [0.05, 0.05, 0.7, 0.2]])


def _without_own_token(joint: np.ndarray, vocab_size: int, length: int, place: int) -> np.ndarray:
    """(V^L noisy, V): p(x_place | all noisy tokens but the one at ``place``), by enumeration."""
    shape = (vocab_size,) * length
    clean_axes = tuple(axis for axis in range(length) if axis != place)
    table = joint.reshape(shape + shape).sum((*clean_axes, length + place))  # (V, the others)
    table = np.moveaxis(table / table.sum(0), 0, -1)
    return np.broadcast_to(np.expand_dims(table, place), (*shape, vocab_size)).reshape(
        -1, vocab_size
    )


def own_at(t: int, n_times: int, vocab_size: int, length: int) -> torch.Tensor:
    own = own_evidence(t, n_times=n_times, vocab_size=vocab_size)
    return torch.full((length,), own, dtype=torch.float64)


@pytest.mark.parametrize("n_times", [1, 4])
def test_cavity_leaves_what_the_others_say_where_nothing_is_accepted(n_times: int) -> None:
    vocab_size, length = 3, 3
    noisy = torch.from_numpy(all_sequences(vocab_size, length))
    for t in range(1, n_times + 1):
        joint, posteriors = token_posteriors(
            copy_chain(vocab_size, length, 0.1), kept_share(t, n_times)
        )
        others = [_without_own_token(joint, vocab_size, length, i) for i in range(length)]
        logits = torch.from_numpy(posteriors).log() + 1.5
        for flags in itertools.product([False, True], repeat=length):
            accepted = torch.tensor(flags).expand(noisy.shape)
            amount = Cavity().excess(accepted, own_at(t, n_times, vocab_size, length))
            weighed = weigh(logits, noisy, amount)
            for place, is_accepted in enumerate(flags):
                expected = posteriors[:, place] if is_accepted else others[place]
                got = weighed[:, place].softmax(-1).numpy()
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_excess_is_what_the_bound_takes_off() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    noisy = torch.tensor([[0, 1, 2, 3], [4, 0, 4, 2]])
    nowhere = torch.zeros(2, 4, dtype=torch.bool)
    for t in (1, 3, 4):
        amount = Cavity().excess(nowhere, own_at(t, 4, 5, 4))
        expected = cavity_logits(logits, noisy, t=t, n_times=4)
        assert (weigh(logits, noisy, amount) - expected).abs().max() < 1e-14


def test_there_is_nothing_to_take_off_a_posterior_or_out_of_pure_noise() -> None:
    nowhere = torch.zeros(1, 4, dtype=torch.bool)
    assert Posterior().excess(nowhere, own_at(1, 4, 5, 4)) is None
    for n_times in (1, 16):
        assert Cavity().excess(nowhere, own_at(n_times, n_times, 5, 4)) is None
    amount = Cavity().excess(~nowhere, own_at(1, 16, 5, 4))
    assert amount is not None
    assert amount.count_nonzero() == 0  # an accepted token is evidence


class _LastStepAll:
    """Accepts nothing before the last step, and everything there."""

    is_monotone: ClassVar[bool] = True

    def accept(self, now: Prediction, before: Prediction | None, accepted: Tensor) -> Tensor:
        return torch.full_like(accepted, now.step == now.n_steps - 1)


@pytest.mark.parametrize(("evidence", "is_exact"), [(Cavity(), True), (Posterior(), False)])
def test_only_without_its_evidence_is_noise_drawn_from_the_context(
    scripted: Any, evidence: Evidence, is_exact: bool
) -> None:
    """An exact model of a Markov source: the context of a token is the letter of the prompt."""
    length, n_steps = 2000, 8
    layout = Layout(canvas_tokens=length, canvases_per_window=2, vocab_size=4)

    def exact(tag: int, start: int, step: int, noisy: Tensor) -> Tensor:
        return torch.from_numpy(posterior_table(STEPS[tag], n_steps - step, n_steps)).log()[noisy]

    states: list[CanvasStep] = []
    sampler = CanvasSampler(
        model=scripted(exact, layout=layout, denoise_steps=n_steps),
        acceptance=_LastStepAll(),
        stopping=Never(),
        denoise_steps=n_steps,
        start_temperature=1.0,
        end_temperature=1.0,
        eot_id=None,
        vocab_chunk=4,
        evidence=evidence,
        on_step=states.append,
    )
    made = sampler.generate([[0], [1]], length, [5, 6])
    for row, law in zip(made, STEPS, strict=True):
        shares = np.bincount(row.ids, minlength=4) / length
        distance = np.abs(shares - law).sum() / 2
        assert (distance < 0.03) if is_exact else (distance > 0.2)
    # The draws themselves: at every step a candidate is the context's, whatever the noise there.
    for seed, (row, law) in zip([5, 6], enumerate(STEPS), strict=True):
        draws = stream(seed, "sample", 0)
        uniforms = [torch.from_numpy(draws.random(length)) for _ in range(n_steps)][-1]
        expected = invert(torch.from_numpy(law).expand(length, 4), uniforms)
        assert torch.equal(states[-1].tokens[row], expected) is is_exact


@pytest.mark.parametrize("rule", [Cavity(), Posterior()])
def test_a_network_that_gives_the_cavity_is_read_as_one_that_gives_the_posterior(
    opinionated, tiny_layout, rule: Evidence
) -> None:
    """The logits that a rule is shown differ by what the network lacks, and by nothing else."""
    accepted = torch.tensor([[True, False, True, False]])
    plain, cavity = (opinionated(tiny_layout, likelihood_bias=bias) for bias in (False, True))
    V = tiny_layout.vocab_size
    for t in (1, 2, 3, 4):
        lacking = own_evidence(t, n_times=4, vocab_size=V)
        taken, given = (
            excess(rule, accepted, t=t, n_times=4, model=model) for model in (plain, cavity)
        )
        taken = torch.zeros(1, 4, dtype=torch.float64) if taken is None else taken
        given = torch.zeros(1, 4, dtype=torch.float64) if given is None else given
        torch.testing.assert_close(given, taken - lacking, rtol=1e-12, atol=0)
    assert excess(Posterior(), accepted, t=2, n_times=4, model=plain) is None
