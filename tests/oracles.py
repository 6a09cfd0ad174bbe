"""Plain implementations that tests hold the product against: slow, explicit, written once more."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canvaslm.randomness import stream

# --- diffusion: dense enumeration, small sources --------------------------------------------------


def kept_share(t: float, n_times: int) -> float:
    """cos², with its ends written out."""
    if t == 0:
        return 1.0
    if t == n_times:
        return 0.0
    return math.cos(math.pi / 2 * t / n_times) ** 2


def tilted_time(t: float, i: int, *, canvas_tokens: int, n_times: int, tilt: float) -> float:
    """When position i of a canvas at time t stands, by its own window of the canvas's time."""
    if canvas_tokens == 1:
        return t
    width = 1 / (1 + tilt)
    begins = (1 - width) * (canvas_tokens - 1 - i) / (canvas_tokens - 1)
    share = (t / n_times - begins) / width
    return n_times * (share if 1e-9 < share < 1 - 1e-9 else float(share > 0.5))


def token_times(times: Tensor, model: Any) -> Tensor:
    """(B, C·L) the time of each token as a share of 1, from that (B, C) of its canvas."""
    L = model.layout.canvas_tokens
    each = times.repeat_interleave(L, 1).clone()
    for row in each:
        for i, share in enumerate(row.tolist()):
            row[i] = tilted_time(share, i % L, canvas_tokens=L, n_times=1, tilt=model.params.tilt)
    return each


def own_evidence(t: float, *, n_times: int, vocab_size: int) -> float:
    """Nats that a noisy token at time t of N adds to its own logit in the posterior."""
    share = kept_share(t, n_times)
    return math.log((1 + (vocab_size - 1) * share) / (1 - share))


def noise_matrix(share: float, vocab_size: int) -> np.ndarray:
    """(V, V): the probability of each noisy token (column) given each clean one (row)."""
    return share * np.eye(vocab_size) + (1 - share) / vocab_size


def reverse_step(
    noisy: int, prediction: np.ndarray, t: float, n_times: int, before: float | None = None
) -> np.ndarray:
    """(V,) q(x_s | x_t = noisy, x_0 ~ prediction), by Bayes' rule over all x_s; s: t-1 or given."""
    vocab_size = len(prediction)
    share_s = kept_share(t - 1 if before is None else before, n_times)
    step = noise_matrix(kept_share(t, n_times) / share_s, vocab_size)
    joint = (prediction @ noise_matrix(share_s, vocab_size)) * step[:, noisy]
    return joint / joint.sum()


def cavity_of(posterior: np.ndarray, noisy: int, t: float, n_times: int) -> np.ndarray:
    """(V,) the prediction that becomes ``posterior`` once the noisy token is seen."""
    likelihood = noise_matrix(kept_share(t, n_times), len(posterior))[:, noisy]
    cavity = posterior / likelihood
    return cavity / cavity.sum()


def posterior_table(cavity: np.ndarray, t: float, n_times: int) -> np.ndarray:
    """(V, V) the prediction ``cavity`` once each noisy token (row) is seen."""
    joint = cavity * noise_matrix(kept_share(t, n_times), len(cavity)).T
    return joint / joint.sum(1, keepdims=True)


def enumerated_step_nats(
    posterior: np.ndarray,
    noisy: int,
    clean: int,
    t: float,
    n_times: int,
    before: float | None = None,
) -> float:
    """The nats of one reverse step, by the definition of the divergence."""
    s = t - 1 if before is None else before
    if s == t:
        return 0.0
    if s == 0:
        return -math.log(posterior[clean])
    truth = reverse_step(noisy, np.eye(len(posterior))[clean], t, n_times, s)
    guess = reverse_step(noisy, cavity_of(posterior, noisy, t, n_times), t, n_times, s)
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


# --- model: attention under written-down masks, the whole forward in one stream of tokens ---------


def masked_softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Scores, exponentials and their sum, for each head; seen (S, n) bool. Empty rows give 0."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(q.shape[-1])
    shifted = scores - scores.amax(-1, keepdim=True)
    weights = shifted.exp() * seen
    return torch.einsum("bhqk,bhke->bhqe", weights / weights.sum(-1, keepdim=True).clamp(1e-300), v)


def causal_mask(n_queries: int, n_keys: int) -> Tensor:
    """(S, n) bool; the last query sits on the last key."""
    first = n_keys - n_queries
    return torch.tensor([[j <= first + i for j in range(n_keys)] for i in range(n_queries)])


def block_causal_mask(n_queries: int, n_keys: int, canvas_tokens: int) -> Tensor:
    """(S, n) bool: ``k // L <= i // L``; the last query sits on the last key."""
    first, L = n_keys - n_queries, canvas_tokens
    return torch.tensor(
        [[j // L <= (first + i) // L for j in range(n_keys)] for i in range(n_queries)]
    )


def two_stream_mask(
    window_tokens: int, canvas_tokens: int, clean_mask: str, *, leaks: bool = False
) -> Tensor:
    """(2T, 2T) bool, noisy tokens before clean ones; ``leaks`` writes >= where > belongs."""
    T, L = window_tokens, canvas_tokens
    canvas = torch.arange(T) // L
    rows, columns = canvas[:, None], canvas[None, :]
    before = rows >= columns if leaks else rows > columns
    clean = causal_mask(T, T) if clean_mask == "causal" else block_causal_mask(T, T, L)
    nothing = torch.zeros(T, T, dtype=torch.bool)
    return torch.cat((torch.cat((rows == columns, before), 1), torch.cat((nothing, clean), 1)), 0)


def plain_forward(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    times: Tensor,
    seen: Tensor,
    guess: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Hidden states (B, S, D) of any tokens at any positions and times under any mask.

    Reads the weights by name and nothing else of the model.

    Args:
        model: its state and its params.
        ids: (B, S) int64; -1 is what stands before the first token.
        positions: (S,) int64.
        times: (B, S), each token's own.
        seen: (S, S) bool.
        guess: (B, S, D) or None; 0 where a token has none.
        before: (B, S) int64, the token before each one, -1 for none; None: ids are one text.
    """
    p, w = model.params, dict(model.named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        y = torch.einsum("...i,oi->...o", x, w[f"{name}.weight"])
        return y + w[f"{name}.bias"] if p.bias else y

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + p.norm_eps).sqrt() * w[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        y = linear(x, f"{name}").reshape(*x.shape[:2], -1, p.head_width).transpose(1, 2)
        kind = name.rsplit(".", 1)[1]
        return norm(y, f"{name}_norm") if p.qk_norm and kind in ("query", "key") else y

    def rotate(x: Tensor) -> Tensor:
        half = p.head_width // 2
        speeds = torch.tensor([p.rope_base ** (-i / half) for i in range(half)], dtype=x.dtype)
        turn = torch.exp(1j * positions[:, None] * speeds)
        y = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((y.real, y.imag), -1)

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    table = w["embedding.weight"]
    x = (torch.cat((table, w["opening"][None])) if "opening" in w else table)[ids]
    if p.token_shift:
        if before is None:
            before = torch.cat((torch.full_like(ids[:, :1], -1), ids[:, :-1]), 1)
        rows = torch.cat((table, torch.zeros_like(table[:1])))[before]
        x = x + torch.einsum("...i,oi->...o", rows, w["token_shift.weight"])
    if p.time_width:
        half = p.time_width // 2
        speeds = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=x.dtype)
        angles = 1000 * times[..., None] * speeds
        features = torch.cat((angles.cos(), angles.sin()), -1)
        hidden = silu(linear(features, "time_embedding.inner"))
        x = x + linear(hidden, "time_embedding.outer")
    said = 0
    if guess is not None:
        has = (guess != 0).any(-1, keepdim=True)
        said = linear(guess, "self_conditioning.projection") * has
    if p.self_conditioning == "input":
        x = x + said
    for layer in range(p.n_layers):
        name = f"blocks.{layer}"
        y = norm(x, f"{name}.attention_norm")
        q, k, v = (heads(y, f"{name}.attention.{part}") for part in ("query", "key", "value"))
        y = masked_softmax_attention(rotate(q), rotate(k), v, seen)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{name}.attention.output")
        y = norm(x, f"{name}.feed_forward_norm")
        y = silu(linear(y, f"{name}.feed_forward.gate")) * linear(y, f"{name}.feed_forward.up")
        x = x + linear(y, f"{name}.feed_forward.down")
    x = norm(x, "final_norm")
    return x + said if p.self_conditioning == "output" else x


def two_stream_forward(
    model: Any,
    clean: Tensor,
    noisy: Tensor,
    times: Tensor,
    guess: Tensor | None = None,
    *,
    leaks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Hidden states (B, T, D) of the noisy and of the clean stream, as one row of 2T tokens."""
    T, L = clean.shape[1], model.layout.canvas_tokens
    shift = int(model.params.noisy_input == "previous")
    none = torch.full_like(clean[:, :1], -1)
    read, before = noisy.clone(), noisy.clone()
    for i in range(T):
        # What stands `n` before place i, as its canvas sees it.
        one, two = (
            none[:, 0] if i < n else (noisy if n <= i % L else clean)[:, i - n] for n in (1, 2)
        )
        read[:, i] = one if shift else noisy[:, i]
        before[:, i] = two if shift else one
    ids = torch.cat((read, clean), 1)
    before = torch.cat((before, none, clean[:, :-1]), 1)
    positions = torch.cat((torch.arange(T) - shift, torch.arange(T)))
    own = token_times(times, model)
    both_times = torch.cat((own, torch.zeros_like(own)), 1)
    seen = two_stream_mask(T, L, model.params.clean_mask, leaks=leaks)
    if guess is not None:
        guess = torch.cat((guess, torch.zeros_like(guess)), 1)
    hidden = plain_forward(model, ids, positions, both_times, seen, guess, before)
    return hidden[:, :T], hidden[:, T:]


# --- loss: the definition -------------------------------------------------------------------------


def defined_nats(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """−log of the target's share of the exponentials (...), 0 where a target is ignored."""
    scores = torch.einsum("...d,vd->...v", hidden, weight)
    counted = targets != ignored
    chosen = scores.gather(-1, targets.where(counted, 0)[..., None])[..., 0]
    largest = scores.detach().amax(-1)
    lse = largest + (scores - largest[..., None]).exp().sum(-1).log()
    return torch.where(counted, lse - chosen, 0)


# --- sampling: one row, no cache, everything computed again at every step -------------------------


class WrittenContext:
    """Clean keys and values computed anew for the whole text so far, with room for none."""

    def __init__(self, model: Any, text: list[int]) -> None:
        self.start = len(text)
        self._text = list(text)
        params, weight = model.params, model.head_weight
        nothing = weight.new_zeros(1, params.n_kv_heads, 0, params.head_width)
        self._layers = [(nothing, nothing)] * params.n_layers
        if text:
            encoded = model.encode(torch.tensor([text]))
            self._layers = [encoded.keys_values(layer) for layer in range(params.n_layers)]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]

    def ids_at(self, positions: Sequence[int]) -> Tensor:
        return torch.tensor([[self._text[place] for place in positions]], dtype=torch.int64)


def accepted_by_hand(
    rule: str,
    now: dict[str, list[float]],
    before: dict[str, list[float]] | None,
    accepted: list[bool],
    *,
    step: int,
    n_steps: int,
    level: float,
    has_choice: list[bool],
) -> list[bool]:
    """The three acceptance rules of math.md section 7, position by position.

    Where a position waits for its time, or is cleared by now, no rule sees it.
    """
    every = range(len(accepted))
    positions = [p for p in every if has_choice[p]]
    if rule == "unchanged_or_stronger":
        if before is None:
            return [False for _ in every]
        return [
            has_choice[p]
            and (
                accepted[p]
                or now["argmax"][p] == before["argmax"][p]
                or now["confidence"][p] >= before["confidence"][p]
            )
            for p in every
        ]
    if rule == "entropy_bound":
        chosen, spent = set(), 0.0
        for p in sorted(positions, key=lambda p: now["entropy"][p]):
            if spent > level:
                break
            chosen.add(p)
            spent += now["entropy"][p]
        return [p in chosen for p in every]
    assert rule == "quota", rule
    free = sorted((p for p in positions if not accepted[p]), key=lambda p: -now["confidence"][p])
    due = math.ceil((step + 1) * len(accepted) / n_steps) - sum(accepted)
    chosen = set(free[: max(due, 0)])
    sure = {p for p in positions if now["confidence"][p] > level}
    return [accepted[p] or p in chosen | sure for p in every]


def weigh(logits: Tensor, noisy: Tensor, excess: Tensor | None) -> Tensor:
    """The logits (B, L, V) that are sampled from, float64: the noisy token's less its excess."""
    logits = logits.double()
    if excess is None:
        return logits
    return logits.scatter_add(-1, noisy[..., None], -excess[..., None])


def generate_without_cache(
    model: Any,
    prompt: list[int],
    n_canvases: int,
    seed: int,
    *,
    rule: str,
    level: float,
    n_steps: int,
    temperatures: tuple[float, float],
    evidence: str = "posterior",
) -> tuple[list[int], list[Tensor]]:
    """The fixed schedule with no cache: ids of all canvases, and each step's hidden states.

    Under the evidence "cavity", a token that is a fresh draw counts for nothing.
    """
    L, V = model.layout.canvas_tokens, model.layout.vocab_size
    text, seen = list(prompt), []
    for canvas in range(n_canvases):
        draws, noise = stream(seed, "sample", canvas), stream(seed, "renoise", canvas)
        noisy = noise.integers(V, size=L).tolist()
        held, accepted, before, hidden, emitted = noisy, [False] * L, None, None, noisy
        for step in range(n_steps):
            share = step / (n_steps - 1) if n_steps > 1 else 0.0
            tau = temperatures[0] + (temperatures[1] - temperatures[0]) * share
            guess = None
            if hidden is not None and model.params.self_conditioning != "off":
                guess = torch.softmax(model.logits(hidden), -1) @ model.head_weight
            hidden = model.denoise(
                torch.tensor([noisy]),
                torch.tensor([[(n_steps - step) / n_steps]], dtype=torch.float64),
                context=WrittenContext(model, text),
                guess=guess,
                has_guess=None,
            )
            seen.append(hidden[0])
            logits = model.logits(hidden)[0].double()
            stands, stands_next = (
                [
                    tilted_time(t, i, canvas_tokens=L, n_times=n_steps, tilt=model.params.tilt)
                    for i in range(L)
                ]
                for t in (n_steps - step, n_steps - step - 1)
            )
            for i in range(L):
                kept = min(kept_share(stands[i], n_steps), 1 - 2**-53)
                evidence_nats = math.log((1 + (V - 1) * kept) / (1 - kept))
                if model.params.likelihood_bias:
                    logits[i, noisy[i]] += evidence_nats
                if evidence == "cavity" and not accepted[i]:
                    logits[i, noisy[i]] -= evidence_nats
            p = torch.softmax(logits / (tau or 1.0), -1).numpy()
            argmax = logits.argmax(-1).tolist()
            drawn = argmax
            if tau:
                uniforms = draws.random(L)
                drawn = [int((np.cumsum(p[i]) <= uniforms[i]).sum()) for i in range(L)]
            now = {
                "argmax": argmax,
                "confidence": p.max(-1).tolist(),
                "entropy": (-(p * np.log(p)).sum(-1)).tolist(),
            }
            tilted = model.params.tilt > 0
            is_cleared = [tilted and at == 0 for at in stands_next]
            has_choice = [not tilted or 0 < at < n_steps for at in stands_next]
            chosen = accepted_by_hand(
                rule,
                now,
                before,
                accepted,
                step=step,
                n_steps=n_steps,
                level=level,
                has_choice=has_choice,
            )
            chosen = [chosen[i] or is_cleared[i] for i in range(L)]
            settled = [
                accepted[i] and (rule != "entropy_bound" or (tilted and stands[i] == 0))
                for i in range(L)
            ]
            held = [held[i] if settled[i] else drawn[i] for i in range(L)]
            emitted = [held[i] if chosen[i] else argmax[i] for i in range(L)]
            accepted, before = chosen, now
            if step < n_steps - 1:
                fresh = noise.integers(V, size=L).tolist()
                noisy = [held[i] if accepted[i] else fresh[i] for i in range(L)]
        text += emitted
    return text[len(prompt) :], seen


def chi_square_p(texts: Tensor, law: Tensor, *, vocab_size: int) -> float:
    """How probable counts at least as far from a law are, by Pearson's chi-square test.

    Args:
        texts: (n, length) ids.
        law: (V^length,) probabilities, in the order of :func:`all_sequences`.
        vocab_size: V.
    """
    number = torch.zeros(len(texts), dtype=torch.int64)
    for column in texts.unbind(1):
        number = number * vocab_size + column
    counts = torch.bincount(number, minlength=len(law)).double()
    expected = law * len(texts)
    is_rare = expected < 5.0  # pooled: the test is an approximation for many of each
    if bool(is_rare.any()):
        counts = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
        expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None]))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


# --- optimisers -----------------------------------------------------------------------------------


def orthogonalised(matrix: Tensor) -> Tensor:
    """Muon's five iterations in float64, on the singular values alone."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / max(float(matrix.double().norm()), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def muon_by_hand(
    weight: Tensor, gradients: list[Tensor], *, rate: float, momentum: float, decay: float
) -> Tensor:
    """Weights after a step on each gradient, in float64."""
    weight, mean = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient.double()
        ahead = momentum * mean + (1 - momentum) * gradient.double()
        size = 0.2 * math.sqrt(max(weight.shape))
        weight = weight - rate * decay * weight - rate * size * orthogonalised(ahead)
    return weight


def averaged_by_hand(weights: list[Tensor], decay: float) -> Tensor:
    """The average after some updates, in float64; what stood before the first is forgotten."""
    average = torch.zeros_like(weights[0], dtype=torch.float64)
    for number, weight in enumerate(weights, start=1):
        memory = min(decay, (number - 1) / (number + 9))
        average = memory * average + (1 - memory) * weight.double()
    return average
