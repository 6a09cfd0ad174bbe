import math

import numpy as np
import pytest

from canvaslm.corpus.entropy import entropy_nats


@pytest.mark.parametrize("n", [1, 2, 37])
def test_equal_counts_have_the_logarithm_of_their_number(n: int) -> None:
    found = entropy_nats(np.array([5] * n + [0, 0]))
    assert found == pytest.approx(math.log(n), abs=1e-15)
    assert math.copysign(1, found) == 1


def test_entropy_is_the_mean_cost_under_the_frequencies_themselves() -> None:
    counts = np.array([1, 0, 3, 4])
    costs = [math.log(8 / count) for count in counts if count for _ in range(count)]
    assert entropy_nats(counts) == pytest.approx(math.fsum(costs) / 8)
