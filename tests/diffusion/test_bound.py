import math

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.diffusion.bound import (
    cavity_logits,
    chunked_step_nats,
    expected_step_nats,
    step_nats,
)
from canvaslm.errors import InputError
from oracles import (
    all_sequences,
    best_plain_cross_entropy,
    cavity_of,
    copy_chain,
    entropy_nats,
    enumerated_step_nats,
    kept_share,
    noise_matrix,
    posterior_table,
    token_posteriors,
)

COUNTS = [1, 2, 4, 16]
# Weights of a seven-letter source whose entropy is 1.794 nats.
SEVEN_LETTERS = np.array([1, 2, 2, 3, 3, 4, 7]) / 22


def logits_of(probabilities: np.ndarray) -> Tensor:
    return torch.from_numpy(np.log(probabilities))


def expected_bound(source: np.ndarray, posterior_logits: Tensor, n_times: int) -> float:
    """The bound of an i.i.d. source in expectation; posterior_logits (N, V noisy, V)."""
    vocab_size = len(source)
    noisy, clean = torch.meshgrid(*[torch.arange(vocab_size)] * 2, indexing="ij")
    times = torch.arange(1, n_times + 1)[:, None, None].expand(-1, vocab_size, vocab_size)
    noise = [noise_matrix(kept_share(t, n_times), vocab_size) for t in range(1, n_times + 1)]
    nats = step_nats(
        posterior_logits[:, :, None, :].expand(-1, -1, vocab_size, -1),  # (N, noisy, clean, V)
        noisy.expand(n_times, -1, -1),
        clean.expand(n_times, -1, -1),
        t=times,
        n_times=n_times,
    )
    assert bool(nats.isfinite().all())
    joint = torch.from_numpy(source[:, None] * np.array(noise)).mT  # (N, noisy, clean)
    return float((joint * nats).sum())


def posteriors_from_cavity(cavity: np.ndarray, n_times: int) -> Tensor:
    """(N, V noisy, V) posterior logits of a prediction that never changes."""
    tables = [posterior_table(cavity, t, n_times) for t in range(1, n_times + 1)]
    return logits_of(np.array(tables))


def chain_bound(source: np.ndarray, n_times: int, *, wrong_from: int | None = None) -> float:
    """The bound per token of one canvas from exact per-token posteriors.

    From time ``wrong_from`` on, the posterior is passed off as the cavity.
    """
    vocab_size, length = source.shape[0], source.ndim
    tokens = torch.from_numpy(all_sequences(vocab_size, length))
    n_sequences = len(tokens)
    clean = tokens[:, None].expand(-1, n_sequences, -1)  # (X, Y, L)
    noisy = tokens[None].expand(n_sequences, -1, -1)
    total = 0.0
    for t in range(1, n_times + 1):
        share = kept_share(t, n_times)
        joint, posteriors = token_posteriors(source, share)
        logits = logits_of(posteriors)
        if wrong_from is not None and t >= wrong_from:
            evidence = math.log((1 + (vocab_size - 1) * share) / (1 - share))
            logits = logits + evidence * torch.nn.functional.one_hot(tokens, vocab_size)
        nats = step_nats(
            logits[None].expand(n_sequences, -1, -1, -1), noisy, clean, t=t, n_times=n_times
        )
        total += float((torch.from_numpy(joint)[..., None] * nats).sum())
    return total / length


@pytest.mark.parametrize("n_times", COUNTS)
@pytest.mark.parametrize("vocab_size", [2, 3, 5, 9])
def test_closed_form_equals_dense_enumeration(vocab_size: int, n_times: int) -> None:
    rng = np.random.default_rng(vocab_size)
    tokens = range(vocab_size)
    for t in range(1, n_times + 1):
        posterior = rng.dirichlet(np.ones(vocab_size))
        expected = [
            [enumerated_step_nats(posterior, i, j, t, n_times) for j in tokens] for i in tokens
        ]
        noisy, clean = torch.meshgrid(
            torch.arange(vocab_size), torch.arange(vocab_size), indexing="ij"
        )
        logits = logits_of(posterior).expand(vocab_size, vocab_size, vocab_size)
        nats = step_nats(logits + 3.5, noisy, clean, t=t, n_times=n_times)
        np.testing.assert_allclose(nats.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_times", COUNTS)
def test_cavity_is_the_posterior_without_the_evidence_of_the_noisy_token(n_times: int) -> None:
    posterior = np.random.default_rng(1).dirichlet(np.ones(5))
    for t in range(1, n_times + 1):
        for noisy in range(5):
            logits = cavity_logits(
                logits_of(posterior) - 2.0, torch.tensor(noisy), t=t, n_times=n_times
            )
            expected = cavity_of(posterior, noisy, t, n_times)
            np.testing.assert_allclose(logits.softmax(-1).numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("n_times", [*COUNTS, 64])
def test_a_uniform_cavity_costs_the_logarithm_of_the_vocabulary(n_times: int) -> None:
    for vocab_size in (3, 7):
        uniform = np.full(vocab_size, 1 / vocab_size)
        bound = expected_bound(uniform, posteriors_from_cavity(uniform, n_times), n_times)
        assert bound == pytest.approx(math.log(vocab_size), abs=1e-12)


@pytest.mark.parametrize("n_times", [*COUNTS, 64])
def test_a_constant_cavity_costs_minus_the_logarithm_of_the_truth(n_times: int) -> None:
    logits = posteriors_from_cavity(SEVEN_LETTERS, n_times)
    for clean in range(7):
        certain = np.eye(7)[clean]
        bound = expected_bound(certain, logits, n_times)
        assert bound == pytest.approx(-math.log(SEVEN_LETTERS[clean]), abs=1e-12)


@pytest.mark.parametrize(
    ("vocab_size", "n_times", "nats"), [(3, 4, 1.949), (3, 16, 3.627), (7, 16, 6.021)]
)
def test_a_uniform_posterior_is_not_a_uniform_prediction(
    vocab_size: int, n_times: int, nats: float
) -> None:
    uniform = np.full(vocab_size, 1 / vocab_size)
    logits = torch.zeros(n_times, vocab_size, vocab_size)
    assert expected_bound(uniform, logits, n_times) == pytest.approx(nats, abs=6e-4)


@pytest.mark.parametrize("n_times", COUNTS)
def test_exact_posteriors_of_an_iid_source_reach_its_entropy(n_times: int) -> None:
    tables = [
        token_posteriors(SEVEN_LETTERS, kept_share(t, n_times))[1][:, 0]
        for t in range(1, n_times + 1)
    ]
    bound = expected_bound(SEVEN_LETTERS, logits_of(np.array(tables)), n_times)
    assert bound == pytest.approx(entropy_nats(SEVEN_LETTERS), abs=1e-12)


@pytest.mark.parametrize("n_times", [1, 2, 16])
def test_canvases_of_one_token_reach_the_entropy_of_a_markov_source(n_times: int) -> None:
    rng = np.random.default_rng(4)
    steps = rng.dirichlet(np.ones(4), size=4)  # next token given the one before
    before = rng.dirichlet(np.ones(4))
    bound = sum(
        weight * expected_bound(step, posteriors_from_cavity(step, n_times), n_times)
        for weight, step in zip(before, steps, strict=True)
    )
    entropy = sum(w * entropy_nats(step) for w, step in zip(before, steps, strict=True))
    assert bound == pytest.approx(entropy, abs=1e-12)


@pytest.mark.parametrize(
    ("flip", "n_times", "nats"),
    [
        (0.1, 1, 1.0986),
        (0.1, 4, 0.7759),
        (0.1, 16, 0.6656),
        (0.1, 64, 0.6381),
        (0.3, 16, 0.9286),
        (0.3, 64, 0.9162),
    ],
)
def test_the_copy_chain_approaches_its_entropy_from_above(
    flip: float, n_times: int, nats: float
) -> None:
    chain = copy_chain(3, 3, flip)
    bound = chain_bound(chain, n_times)
    assert bound == pytest.approx(nats, abs=6e-5)
    assert bound > entropy_nats(chain) / 3


@pytest.mark.parametrize(("flip", "entropy"), [(0.1, 0.6291), (0.3, 0.9121)])
def test_the_copy_chain_has_the_entropy_that_its_flips_give(flip: float, entropy: float) -> None:
    assert entropy_nats(copy_chain(3, 3, flip)) / 3 == pytest.approx(entropy, abs=6e-5)


@pytest.mark.parametrize(("wrong_from", "nats"), [(1, 1.0255), (2, 0.9959)])
def test_a_posterior_passed_off_as_the_cavity_is_told_by_its_price(
    wrong_from: int, nats: float
) -> None:
    bound = chain_bound(copy_chain(3, 3, 0.1), 16, wrong_from=wrong_from)
    assert bound == pytest.approx(nats, abs=6e-5)


def test_no_prediction_goes_below_the_entropy_of_a_markov_source() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        steps = rng.dirichlet(np.ones(3), size=3)
        source = rng.dirichlet(np.ones(3))[:, None, None] * steps[:, :, None] * steps[None]
        exact = chain_bound(source, 4)
        assert exact >= entropy_nats(source) / 3
        tilt = rng.normal(size=(4, 3, 3))
        single = source.sum((1, 2))
        wrong = expected_bound(single, torch.from_numpy(tilt), 4)
        assert wrong >= entropy_nats(single)


def test_plain_cross_entropy_of_the_best_denoiser_is_no_likelihood() -> None:
    assert best_plain_cross_entropy(SEVEN_LETTERS, 16) == pytest.approx(1.193, abs=6e-4)
    assert entropy_nats(SEVEN_LETTERS) == pytest.approx(1.794, abs=6e-4)


def test_on_uniform_tokens_plain_cross_entropy_says_6_and_the_bound_says_the_truth() -> None:
    vocab_size, n_times = 50_257, 16
    noisy, clean = torch.tensor([0, 0]), torch.tensor([0, 1])  # kept or seen by chance; replaced
    plain = bound = 0.0
    for t in range(1, n_times + 1):
        share = kept_share(t, n_times)
        other = (1 - share) / vocab_size
        logits = torch.full((2, vocab_size), math.log(other), dtype=torch.float64)
        logits[:, 0] = math.log(share + other)
        weights = torch.tensor([share + other, (vocab_size - 1) * other])
        plain += float(weights @ -logits.log_softmax(-1)[:, [0, 1]].diagonal().float()) / n_times
        bound += float(weights.double() @ step_nats(logits, noisy, clean, t=t, n_times=n_times))
    assert plain == pytest.approx(6.137, abs=6e-4)
    assert bound == pytest.approx(math.log(vocab_size), abs=1e-6)


@pytest.mark.parametrize("n_times", [1, 16, 64])
def test_both_ends_of_time_are_finite_even_for_certain_predictions(n_times: int) -> None:
    logits = torch.tensor([[80.0, 0.0, 0.0], [0.0, 80.0, 0.0], [0.0, 0.0, -80.0]])
    for t in {1, 2, n_times - 1, n_times} & set(range(1, n_times + 1)):
        noisy, clean = torch.tensor([0, 0, 2]), torch.tensor([0, 0, 0])
        assert bool(step_nats(logits, noisy, clean, t=t, n_times=n_times).isfinite().all())


def test_reconstruction_is_the_cross_entropy_of_the_posterior() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy, clean = torch.arange(6), torch.tensor([0, 1, 2, 8, 8, 8])
    nats = step_nats(logits, noisy, clean, t=1, n_times=16)
    expected = torch.nn.functional.cross_entropy(logits, clean, reduction="none")
    torch.testing.assert_close(nats, expected, rtol=0, atol=1e-13)


def test_each_position_has_its_own_time() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, 5, generator=generator)
    noisy = torch.randint(5, (2, 8), generator=generator)
    clean = torch.randint(5, (2, 8), generator=generator)
    times = torch.arange(1, 9)
    together = step_nats(logits, noisy, clean, t=times, n_times=8)
    for t in range(1, 9):
        alone = step_nats(logits[:, t - 1], noisy[:, t - 1], clean[:, t - 1], t=t, n_times=8)
        assert torch.equal(together[:, t - 1], alone)


@pytest.mark.parametrize("t", [0, 17, -3])
def test_steps_outside_the_process_are_refused(t: int) -> None:
    with pytest.raises(InputError):
        step_nats(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([0]), t=t, n_times=16)


def test_chunked_nats_are_the_dense_ones_at_a_full_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    vocab_size, width, n_positions = 50_257, 32, 48
    hidden = torch.randn(n_positions, width, generator=generator)
    weight = torch.randn(vocab_size, width, generator=generator) * (2 / width**0.5)
    noisy = torch.randint(vocab_size, (n_positions,), generator=generator)
    clean = noisy.clone()
    clean[::2] = torch.randint(vocab_size, (n_positions // 2,), generator=generator)
    times = 1 + torch.arange(n_positions) % 16
    truth = step_nats(hidden.double() @ weight.double().T, noisy, clean, t=times, n_times=16)
    for vocab_chunk in (8192, 60_000):
        nats = chunked_step_nats(
            hidden, weight, noisy, clean, t=times, n_times=16, vocab_chunk=vocab_chunk
        )
        assert float((nats.bound - truth).abs().max()) < 4e-6


@pytest.mark.parametrize("vocab_chunk", [1, 7, 12, 13, 100])
def test_chunk_size_changes_no_value(vocab_chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    noisy = torch.randint(13, (3, 5), generator=generator)
    clean = torch.randint(13, (3, 5), generator=generator)
    clean[0] = noisy[0]
    times = torch.tensor([1, 2, 3, 4, 4])
    expected = step_nats(hidden @ weight.T, noisy, clean, t=times, n_times=4)
    nats = chunked_step_nats(
        hidden, weight, noisy, clean, t=times, n_times=4, vocab_chunk=vocab_chunk
    )
    torch.testing.assert_close(nats.bound, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_plain_cross_entropy_is_that_of_the_posterior_at_every_time(
    dtype: torch.dtype, most: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator, dtype=dtype)
    weight = torch.randn(50, 8, generator=generator, dtype=dtype)
    noisy = torch.randint(50, (64,), generator=generator)
    clean = noisy.where(torch.arange(64) % 2 == 0, noisy.roll(1))
    hidden[:8] += 40 * weight[noisy[:8]]  # sure of the noisy token, right or wrong
    times = 1 + torch.arange(64) % 16
    nats = chunked_step_nats(hidden, weight, noisy, clean, t=times, n_times=16, vocab_chunk=20)
    logits = hidden.double() @ weight.double().T
    expected = torch.nn.functional.cross_entropy(logits, clean, reduction="none")
    scale = 1 + expected.abs()
    assert float(((nats.plain - expected) / scale).abs().max()) < most


@pytest.mark.parametrize("n_times", COUNTS)
def test_expected_nats_are_those_of_all_noisy_tokens_by_their_probability(n_times: int) -> None:
    cavity = np.random.default_rng(3).dirichlet(np.ones(6), size=6)  # a row for each clean token
    clean = torch.arange(6)
    noisy, of = torch.meshgrid(torch.arange(6), clean, indexing="ij")  # (V noisy, 6)
    for t in range(1, n_times + 1):
        tables = np.array([posterior_table(row, t, n_times) for row in cavity])  # (6, noisy, V)
        terms = step_nats(logits_of(tables.transpose(1, 0, 2)), noisy, of, t=t, n_times=n_times)
        odds = torch.from_numpy(noise_matrix(kept_share(t, n_times), 6)).mT
        expected = (odds * terms).sum(0)
        found = expected_step_nats(logits_of(cavity), clean, t=t, n_times=n_times)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_times", [*COUNTS, 64])
def test_expected_nats_of_all_times_are_minus_the_logarithm_of_the_truth(n_times: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20, 300, generator=generator, dtype=torch.float64)
    clean = torch.randint(300, (20,), generator=generator)
    log_x = logits.log_softmax(-1)
    steps = [expected_step_nats(log_x, clean, t=t, n_times=n_times) for t in range(1, n_times + 1)]
    due = -log_x[torch.arange(20), clean]
    torch.testing.assert_close(torch.stack(steps).sum(0), due, rtol=0, atol=1e-11)


@pytest.mark.parametrize("wrong", [-4, -1, 5, 12])
@pytest.mark.parametrize("place", ["noisy", "clean"])
def test_id_that_is_no_token_is_refused_by_the_chunked_form(place: str, wrong: int) -> None:
    ids = {"noisy": torch.tensor([0, 1, 2]), "clean": torch.tensor([2, 1, 0])}
    ids[place][1] = wrong
    hidden, weight = torch.ones(3, 4), torch.ones(5, 4)
    with pytest.raises(InputError, match=f"{place} ids: .*got {wrong}"):
        chunked_step_nats(hidden, weight, ids["noisy"], ids["clean"], t=2, n_times=4, vocab_chunk=2)
