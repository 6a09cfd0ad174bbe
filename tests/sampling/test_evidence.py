"""Letters: V vocabulary, L canvas tokens, N times."""

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.layout import Layout
from canvaslm.randomness import stream
from canvaslm.sampling.evidence import Cavity, Evidence, Posterior
from canvaslm.sampling.prediction import Prediction, invert
from canvaslm.sampling.sampler import CanvasSampler, CanvasStep
from canvaslm.sampling.stopping import Never
from oracles import all_sequences, copy_chain, kept_share, posterior_table, token_posteriors

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
            weighed = Cavity().weigh(logits, noisy, accepted, t=t, n_times=n_times)
            for place, is_accepted in enumerate(flags):
                expected = posteriors[:, place] if is_accepted else others[place]
                got = weighed[:, place].softmax(-1).numpy()
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_posterior_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    noisy, accepted = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.bool)
    assert Posterior().weigh(logits, noisy, accepted, t=1, n_times=4) is logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_there_is_no_evidence_in_pure_noise(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    noisy, accepted = torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.bool)
    for n_times in (1, 16):
        weighed = Cavity().weigh(logits, noisy, accepted, t=n_times, n_times=n_times)
        assert torch.equal(weighed, logits.double())
        assert Cavity().weigh(logits, noisy, accepted, t=1, n_times=n_times).isfinite().all()


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
