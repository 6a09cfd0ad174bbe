"""One trained pair of model and optimiser, and its checkpoint."""

import pytest

from checkpoints import make_pair, save


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture
def saved(tmp_path, pair):
    return save(tmp_path / "run", pair)[0]
