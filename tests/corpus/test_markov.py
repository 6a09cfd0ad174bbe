"""Is the floor of a corpus measured where there is one, and read back as it was written?"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from canvaslm.corpus.chain import Chain
from canvaslm.corpus.markov import measure_floor, read_entropy_rate
from canvaslm.errors import InputError
from canvaslm.reporting.files import write_json
from canvaslm.reporting.progress import untracked


def flipping(p: float) -> Chain:
    return Chain(order=1, symbols="ab", probabilities=np.array([[1 - p, p], [p, 1 - p]]))


def test_each_split_costs_what_the_chain_pays_for_its_texts(
    tmp_path: Path, write_documents: Callable[..., Path]
) -> None:
    folder = write_documents(tmp_path, {"train": ["aab", "bb"], "val": ["abab"]})
    floor = measure_floor(flipping(0.25), folder, track=untracked)
    stay, flip, first = -math.log(0.75), -math.log(0.25), math.log(2)
    assert floor["entropy_rate_nats_per_byte"] == pytest.approx(0.75 * stay + 0.25 * flip)
    assert floor["chain_nats_per_byte"] == {
        "train": pytest.approx((2 * first + 2 * stay + flip) / 5),
        "val": pytest.approx((first + 3 * flip) / 4),
    }


def test_a_text_of_other_symbols_is_refused(
    tmp_path: Path, write_documents: Callable[..., Path]
) -> None:
    folder = write_documents(tmp_path, {"train": ["aab"], "val": ["abc"]})
    with pytest.raises(InputError, match=r"symbols 'ab', got 'c'; run stages/fetch_corpus\.py"):
        measure_floor(flipping(0.25), folder, track=untracked)


def test_without_a_chain_nothing_is_measured_and_nothing_read(tmp_path: Path) -> None:
    floor = measure_floor(None, tmp_path / "nowhere", track=untracked)
    assert set(floor.values()) == {"not_measured"}
    write_json(tmp_path / "metrics.json", floor)
    assert read_entropy_rate(tmp_path / "metrics.json") is None


def test_the_rate_comes_back_to_the_last_bit(
    tmp_path: Path, write_documents: Callable[..., Path]
) -> None:
    folder = write_documents(tmp_path, {"train": ["aab"], "val": ["ab"]})
    chain = flipping(0.1)
    floor = measure_floor(chain, folder, track=untracked)
    write_json(tmp_path / "metrics.json", {"read": 2} | floor)
    assert read_entropy_rate(tmp_path / "metrics.json") == chain.entropy_rate_nats


@pytest.mark.parametrize("value", [None, -0.1, "1.2", True, [1.0], "missing"])
def test_a_report_that_does_not_say_the_rate_is_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "metrics.json"
    key = "entropy_rate_nats_per_byte"
    path.write_text(json.dumps({} if value == "missing" else {key: value}))
    with pytest.raises(InputError, match=f"a report with {key}"):
        read_entropy_rate(path)


def test_a_report_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_entropy_rate(tmp_path / "metrics.json")
