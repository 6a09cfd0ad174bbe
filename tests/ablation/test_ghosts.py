"""Are two settings that show one model refused, and is a mean of the weights a model of its own?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvaslm.ablation.arms import Trial
from canvaslm.ablation.rows import Row, refuse_ghosts
from canvaslm.errors import InputError
from canvaslm.params import read_yaml

PARAMS = read_yaml(Path(__file__).parents[2] / "params.yaml")


def row(arm: str, nats: float, model: str, **pretrain: Any) -> Row:
    params = {**PARAMS, "pretrain": {**PARAMS["pretrain"], **pretrain}}
    return Row(
        trial=Trial(arm=arm, seed=1, name=f"x-{arm}-s1", params=params),
        rev="r",
        figures=(nats,),
        documents=None,
        tokens=np.ones(1),
        amounts=np.array([nats]),
        steps=10,
        flops=1.0,
        model_sha256=model,
    )


def test_a_mean_of_the_same_last_weights_is_a_model_of_its_own() -> None:
    refuse_ghosts([row("last", 3.2, "a", ema_decay=0.0), row("mean", 3.1, "a", ema_decay=0.9)])


@pytest.mark.parametrize(
    ("nats", "pretrain"),
    [
        (3.2, {"ema_decay": 0.9}),
        (3.1, {"weight_decay": 0.2}),
        (3.2, {"weight_decay": 0.2, "ema_decay": 0.9}),
    ],
    ids=["a mean that scores the same", "other decay", "both"],
)
def test_other_params_with_one_model_are_refused(nats: float, pretrain: dict[str, Any]) -> None:
    rows = [row("last", 3.2, "a", ema_decay=0.0), row("other", nats, "a", **pretrain)]
    with pytest.raises(InputError, match=r"x-other-s1: expected a model of its own.*x-last-s1"):
        refuse_ghosts(rows)


def test_other_params_with_other_models_pass() -> None:
    refuse_ghosts([row("last", 3.2, "a"), row("other", 3.2, "b", weight_decay=0.2)])
