"""Plain implementations that tests hold the product against: slow, explicit, written once more."""

import math

import numpy as np

# --- diffusion: dense enumeration, small sources --------------------------------------------------


def kept_share(t: float, n_times: int) -> float:
    """cos², with its ends written out."""
    if t == 0:
        return 1.0
    if t == n_times:
        return 0.0
    return math.cos(math.pi / 2 * t / n_times) ** 2


def noise_matrix(share: float, vocab_size: int) -> np.ndarray:
    """(V, V): the probability of each noisy token (column) given each clean one (row)."""
    return share * np.eye(vocab_size) + (1 - share) / vocab_size


def reverse_step(noisy: int, prediction: np.ndarray, t: int, n_times: int) -> np.ndarray:
    """(V,) q(x_{t-1} | x_t = noisy, x_0 ~ prediction), by Bayes' rule over all x_{t-1}."""
    vocab_size = len(prediction)
    share_s = kept_share(t - 1, n_times)
    step = noise_matrix(kept_share(t, n_times) / share_s, vocab_size)
    joint = (prediction @ noise_matrix(share_s, vocab_size)) * step[:, noisy]
    return joint / joint.sum()


def cavity_of(posterior: np.ndarray, noisy: int, t: int, n_times: int) -> np.ndarray:
    """(V,) the prediction that becomes ``posterior`` once the noisy token is seen."""
    likelihood = noise_matrix(kept_share(t, n_times), len(posterior))[:, noisy]
    cavity = posterior / likelihood
    return cavity / cavity.sum()


def posterior_of(cavity: np.ndarray, noisy: int, t: int, n_times: int) -> np.ndarray:
    """(V,) the prediction ``cavity`` once the noisy token is seen."""
    posterior = cavity * noise_matrix(kept_share(t, n_times), len(cavity))[:, noisy]
    return posterior / posterior.sum()


def enumerated_step_nats(
    posterior: np.ndarray, noisy: int, clean: int, t: int, n_times: int
) -> float:
    """The nats of one reverse step, by the definition of the divergence."""
    if t == 1:
        return -math.log(posterior[clean])
    truth = reverse_step(noisy, np.eye(len(posterior))[clean], t, n_times)
    guess = reverse_step(noisy, cavity_of(posterior, noisy, t, n_times), t, n_times)
    return float(np.sum(truth * np.log(truth / guess)))


def copy_chain(vocab_size: int, length: int, flip: float) -> np.ndarray:
    """(V,)*length probabilities: the first token uniform, each next one its copy unless flipped.

    A flip, of that probability, goes to one of the other tokens.
    """
    step = np.full((vocab_size, vocab_size), flip / (vocab_size - 1))
    np.fill_diagonal(step, 1 - flip)
    chain = np.full(vocab_size, 1 / vocab_size)
    for _ in range(length - 1):
        chain = chain[..., None] * step
    return chain


def entropy_nats(probabilities: np.ndarray) -> float:
    """Shannon entropy of a distribution of any shape."""
    positive = probabilities[probabilities > 0]
    return float(-np.sum(positive * np.log(positive)))


def token_posteriors(source: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Everything about a source (V,)*L seen through noise that keeps tokens with ``share``.

    Returns:
        The joint (V^L clean, V^L noisy) probabilities, sequences in C order, and the per-token
        posteriors (V^L noisy, L, V).
    """
    vocab_size, length = source.shape[0], source.ndim
    noise = np.ones((1, 1))
    for _ in range(length):
        noise = np.kron(noise, noise_matrix(share, vocab_size))
    joint = source.reshape(-1, 1) * noise
    sequences = all_sequences(vocab_size, length)
    is_token = sequences[:, :, None] == np.arange(vocab_size)  # (V^L, L, V)
    posteriors = np.einsum("xy,xlv->ylv", joint, is_token) / joint.sum(0)[:, None, None]
    return joint, posteriors


def all_sequences(vocab_size: int, length: int) -> np.ndarray:
    """(V^L, L) every sequence, in C order."""
    return np.indices((vocab_size,) * length).reshape(length, -1).T


def best_plain_cross_entropy(source: np.ndarray, n_times: int) -> float:
    """What the best possible denoiser of an i.i.d. source scores on average over 1..N."""
    total = 0.0
    for t in range(1, n_times + 1):
        joint = source[:, None] * noise_matrix(kept_share(t, n_times), len(source))
        total += entropy_nats(joint) - entropy_nats(joint.sum(0))
    return total / n_times
