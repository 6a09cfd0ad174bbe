import numpy as np
import pytest

from canvaslm.corpus.ngrams import NgramSet, ngram_hashes


def runs(ids: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 13, 31, 32, 33])
def test_two_runs_have_one_hash_exactly_when_they_are_equal(n: int) -> None:
    ids = np.random.default_rng(n).integers(0, 2, size=400).tolist() * 2
    hashes = ngram_hashes(np.array(ids, dtype=np.uint16), n).tolist()
    assert len(hashes) == len(ids) - n + 1
    by_run = dict(zip(runs(ids, n), hashes, strict=True))
    assert [by_run[run] for run in runs(ids, n)] == hashes
    assert len(set(by_run.values())) == len(by_run)


def test_order_of_ids_and_zeros_in_front_count() -> None:
    seen = {
        int(ngram_hashes(np.array(ids), 3)[0])
        for ids in ([0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0])
    }
    assert len(seen) == 5


@pytest.mark.parametrize(("m", "count"), [(0, 0), (4, 0), (5, 1), (6, 2)])
def test_shorter_than_a_run_there_is_none(m: int, count: int) -> None:
    assert ngram_hashes(np.zeros(m, dtype=np.uint32), 5).shape == (count,)


def test_share_of_marked_runs_counts_repetitions() -> None:
    wanted = NgramSet(ngram_hashes(np.array([1, 2, 1, 2, 1, 9, 9]), 2))
    wanted.mark(ngram_hashes(np.array([5, 1, 2, 5]), 2))
    assert wanted.total == 6
    assert wanted.marked_share == 2 / 6
    wanted.mark(ngram_hashes(np.array([9, 9]), 2))
    assert wanted.marked_share == 3 / 6
