"""Letters: V vocabulary, M drafted tokens. Texts are held against an enumerated law."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from canvaslm.randomness import stream
from canvaslm.sampling import verification
from canvaslm.sampling.prediction import invert
from canvaslm.sampling.verification import left_over, verify
from oracles import all_sequences, chi_square_p

V, M, N = 4, 3, 100_000
N_CANVASES = 5  # noisy canvases that a draft may come from


def _laws(*shape: int, seed: int, spread: float = 1.5) -> Tensor:
    """Random distributions (*shape, V)."""
    draws = stream(seed, "test").standard_normal((*shape, V)) * spread
    return torch.softmax(torch.from_numpy(draws), -1)


class _Chain:
    """An arbitrary law of M + 1 tokens: one table of the next token for each beginning."""

    def __init__(self) -> None:
        self._tables = [_laws(V**length, seed=length) for length in range(M + 1)]

    def next_law(self, texts: Tensor) -> Tensor:
        """(B, V) behind texts (B, length)."""
        number = torch.zeros(len(texts), dtype=torch.int64)
        for column in texts.unbind(1):
            number = number * V + column
        return self._tables[texts.shape[1]][number]

    def of_all(self) -> Tensor:
        """(V^(M+1),) of each text, in the order of ``all_sequences``."""
        texts = torch.from_numpy(all_sequences(V, M + 1))
        steps = [self.next_law(texts[:, :i]).gather(1, texts[:, i : i + 1]) for i in range(M + 1)]
        return torch.cat(steps, 1).prod(-1)


Told = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _as_it_is(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return q, p


def _p_value(*, temperature: float, told: Told = _as_it_is) -> float:
    """How well texts fit the chain's law, each made by one ruling and, from there, by the chain.

    What the ruling is told of the laws of draft and target may be changed by ``told``.
    """
    chain = _Chain()
    numbers = torch.from_numpy(stream(1, "test").random((N, 3 * M + 3)))
    draft_numbers, coins, rest = numbers[:, :M], numbers[:, M : 2 * M + 1], numbers[:, 2 * M + 1 :]
    laws = _laws(N_CANVASES, M, seed=99)
    if temperature == 0.0:
        laws = torch.nn.functional.one_hot(laws.argmax(-1), V).double()
    q = laws[torch.arange(N) % N_CANVASES]
    drafted = invert(q, draft_numbers)
    p = torch.stack([chain.next_law(drafted[:, :i]) for i in range(M + 1)], 1)
    ruling = verify(drafted, *told(q, p), coins)
    texts = torch.cat((drafted, torch.zeros(N, 1, dtype=torch.int64)), 1)
    for i in range(M + 1):
        own = invert(chain.next_law(texts[:, :i]), rest[:, i])
        is_next, is_behind = ruling.n_accepted.eq(i), ruling.n_accepted.lt(i)
        texts[:, i] = torch.where(is_next, ruling.next_ids, texts[:, i])
        texts[:, i] = torch.where(is_behind, own, texts[:, i])
    return chi_square_p(texts, chain.of_all(), vocab_size=V)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_follow_the_enumerated_law(temperature: float) -> None:
    assert _p_value(temperature=temperature) > 0.01


def _not_renormalised(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0.0)
    rest[:, -1] += 1.0 - rest.sum(-1)  # where a draw from masses that do not sum to 1 ends up
    return rest


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [_not_renormalised, lambda p, q: p])
def test_another_law_of_the_replacement_is_seen(
    wrong: Callable[[Tensor, Tensor], Tensor], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "left_over", wrong)
    assert _p_value(temperature=temperature) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepting_by_the_law_of_another_position_is_seen(temperature: float) -> None:
    wrong = lambda q, p: (q, torch.cat((p[:, 1:], p[:, -1:]), 1))  # noqa: E731
    assert _p_value(temperature=temperature, told=wrong) < 1e-6


def test_a_draft_law_that_forgets_what_the_draft_was_drawn_given_is_seen() -> None:
    """The law of a token over all canvases is not the law that it was drawn from."""

    def marginal(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return q[:N_CANVASES].mean(0).expand_as(q), p

    assert _p_value(temperature=1.0, told=marginal) < 1e-6


def test_a_certain_draft_is_kept_with_the_probability_of_the_target() -> None:
    drafted = torch.full((N, 1), 2)
    q = torch.nn.functional.one_hot(drafted, V).double()
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(N, 2, V)
    ruling = verify(drafted, q, p, torch.from_numpy(stream(3, "test").random((N, 2))))
    kept = ruling.n_accepted == 1
    assert abs(float(kept.double().mean()) - 0.3) < 5 * math.sqrt(0.21 / N)
    assert not bool((ruling.next_ids[~kept] == 2).any())


def test_equal_laws_keep_everything() -> None:
    q = _laws(1000, M, seed=5)
    numbers = torch.from_numpy(stream(5, "test").random((1000, 2 * M + 1)))
    drafted = invert(q, numbers[:, :M])
    p = torch.cat((q, _laws(1000, 1, seed=6)), 1)
    coins = numbers[:, M:].clone()
    coins[:, :M] = 1.0 - 2**-53
    ruling = verify(drafted, q, p, coins)
    assert (ruling.n_accepted == M).all()
    assert torch.equal(ruling.next_ids, invert(p[:, M], coins[:, M]))


def test_what_the_target_never_says_is_never_kept() -> None:
    q = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]], dtype=torch.float64).expand(2, 1, V)
    p = torch.tensor([[0.0, 0.0, 0.5, 0.5]], dtype=torch.float64).expand(2, 2, V)
    drafted = torch.tensor([[0], [1]])
    ruling = verify(drafted, q, p, torch.tensor([[0.0, 0.0], [0.0, 0.9]], dtype=torch.float64))
    assert ruling.n_accepted.tolist() == [0, 0]
    assert ruling.texts(drafted) == [[2], [3]]


def test_without_a_draft_one_token_is_drawn_from_the_target() -> None:
    p = _laws(9, 1, seed=7)
    coins = torch.from_numpy(np.linspace(0.0, 0.99, 9))[:, None]
    drafted = torch.empty(9, 0, dtype=torch.int64)
    ruling = verify(drafted, torch.empty(9, 0, V, dtype=torch.float64), p, coins)
    assert torch.equal(ruling.next_ids, invert(p[:, 0], coins[:, 0]))
    assert ruling.texts(drafted) == [[i] for i in ruling.next_ids.tolist()]


def test_what_is_left_over_sums_to_one_and_is_the_target_where_rounding_leaves_nothing() -> None:
    p, q = _laws(50, seed=8), _laws(50, seed=9)
    rest = left_over(p, q)
    assert (rest.sum(-1) - 1.0).abs().max() < 1e-12
    assert ((rest > 0) == (p > q)).all()
    assert torch.equal(left_over(p, p), p)
