import itertools

import numpy as np
import pytest

from canvaslm.corpus import batches
from canvaslm.corpus.batches import training_order, window_indices


def test_an_epoch_is_every_window_once() -> None:
    order = training_order(1, 0, 100)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))


def test_epochs_and_seeds_have_orders_of_their_own_and_repeat_them() -> None:
    # BR-19
    orders = [training_order(seed, epoch, 50).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert training_order(2, 1, 50).tolist() == orders[3]


@pytest.mark.parametrize("cuts", [[3], [5], [7, 10], [12], [5, 10], list(range(1, 30))])
def test_windows_of_a_run_do_not_depend_on_where_it_was_cut(cuts: list[int]) -> None:
    # BR-15, BR-16, BR-17: ten windows, three epochs
    straight = window_indices(0, 30, seed=1, n_windows=10)
    edges = [0, *cuts, 30]
    parts = [window_indices(a, b - a, seed=1, n_windows=10) for a, b in itertools.pairwise(edges)]
    assert np.concatenate(parts).tolist() == straight.tolist()


def test_each_epoch_of_a_run_is_its_own_order() -> None:
    straight = window_indices(0, 30, seed=4, n_windows=10)
    for epoch in range(3):
        here = straight[epoch * 10 : epoch * 10 + 10]
        assert here.tolist() == training_order(4, epoch, 10).tolist()


def test_no_windows_are_asked_for_and_none_come() -> None:
    assert window_indices(7, 0, seed=1, n_windows=10).shape == (0,)


def test_an_epoch_s_order_is_drawn_once_for_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def counted(seed: int, epoch: int, n_windows: int) -> np.ndarray:
        drawn.append(epoch)
        return training_order(seed, epoch, n_windows)

    monkeypatch.setattr(batches, "training_order", counted)
    steps = [window_indices(start, 5, seed=9, n_windows=12) for start in range(0, 36, 5)]
    assert drawn == [0, 1, 2, 3]
    steps[0][:] = -1  # what a caller does to its indices reaches nobody
    again = window_indices(0, 5, seed=9, n_windows=12)
    assert again.tolist() == training_order(9, 0, 12)[:5].tolist()
