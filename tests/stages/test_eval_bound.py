import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.checkpoint_state import read_state
from canvaslm.errors import InputError
from canvaslm.evaluation.bound import judge_bound
from canvaslm.evaluation.bound_params import EvalBoundParams
from canvaslm.params import read_yaml
from canvaslm.reporting.progress import untracked
from shapes import PLAIN

ROOT = Path(__file__).parents[2]
OUTS = ("by_canvas.csv", "by_position.csv", "by_time.csv", "metrics.json")
KNOBS = {
    "device": "cpu",
    "n_times": [2, 3],
    "continuous_passes": 2,
    "max_windows": 4,
    "batch_windows": 3,
    "proof_windows": 1,
}


@pytest.fixture(scope="module")
def inputs(
    decodable: dict[str, Path],
    save_decodable: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Shards, a params file, and two untrained networks, of which the denoiser takes a guess."""
    values = read_yaml(decodable["params"])
    values["eval_bound"] |= KNOBS
    params = tmp_path_factory.mktemp("params") / "params.yaml"
    with params.open("w") as file:
        YAML().dump(values, file)
    data = read_state(decodable["diffusion"]).identity.data.model_dump()
    return {
        "shards": decodable["shards"],
        "autoregressive": decodable["autoregressive"],
        "diffusion": save_decodable("diffusion", data, **PLAIN["model"]),
        "params": params,
    }


def run_stage(inputs: dict[str, Path], out: Path) -> subprocess.CompletedProcess[str]:
    options = [text for name, path in inputs.items() for text in (f"--{name}", str(path))]
    return subprocess.run(
        [sys.executable, ROOT / "stages" / "eval_bound.py", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=inputs["params"].parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def judge(inputs: dict[str, Path], out: Path, **changes: Any) -> None:
    knobs = read_yaml(inputs["params"])["eval_bound"]
    places = {name: inputs[name] for name in ("shards", "autoregressive", "diffusion")}
    params = EvalBoundParams.model_validate(knobs)
    judge_bound(**(places | changes), out=out, params=params, track=untracked)


def test_stage_takes_all_bounds_of_both_checkpoints_and_says_which_they_are(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    done = run_stage(inputs, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    sweeps = {"n_times_2", "n_times_3", "continuous"}
    assert {kind: set(rows) for kind, rows in metrics["diffusion"].items() if kind in
            ("off", "two_pass")} == {"off": sweeps, "two_pass": sweeps}  # fmt: skip
    # Its self-conditioning is zero, as it was before training: the guess is not looked at.
    for name in sweeps:
        two_pass = metrics["diffusion"]["two_pass"][name]
        assert two_pass["over_off_nats"] == 0
        assert two_pass["bound_nats_per_token"] > math.log(280)  # untrained, and a bound
    assert set(metrics["shares"]) == {"n_times_2", "n_times_3"}
    assert metrics["n_windows"] == 4
    assert metrics["verdict"] == metrics["proof"]["verdict"] == "pass"
    for name in ("autoregressive", "diffusion"):
        assert len(metrics[name]["trained_model_sha256"]) == 64
    for place, n_places in (("time", 2 + 3 + 2), ("position", 3 * 4), ("canvas", 3 * 8)):
        with (tmp_path / "out" / f"by_{place}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 2 * n_places


def test_a_network_of_the_default_recipe_takes_no_guess_and_has_the_other_bounds(
    inputs: dict[str, Path], decodable: dict[str, Path], tmp_path: Path
) -> None:
    judge(inputs, tmp_path / "out", diffusion=decodable["diffusion"])
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    rows = metrics["diffusion"]["off"]
    assert set(rows) == {"n_times_2", "n_times_3", "continuous"}
    assert all(row["bound_nats_per_token"] > 0 for row in rows.values())
    assert metrics["diffusion"]["two_pass"] == "not_measured"
    assert metrics["verdict"] == metrics["proof"]["verdict"] == "pass"


def test_evaluating_again_writes_the_same_bytes(inputs: dict[str, Path], tmp_path: Path) -> None:
    judge(inputs, tmp_path / "first")
    judge(inputs, tmp_path / "second")
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == sorted(OUTS)
    for name in OUTS:
        first, second = (tmp_path / run / name for run in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_a_missing_checkpoint_is_told_in_one_line_with_status_2(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    done = run_stage({**inputs, "diffusion": tmp_path / "nowhere"}, tmp_path / "out")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nowhere" in done.stderr
    assert not (tmp_path / "out").exists()


def test_checkpoints_given_in_each_others_place_are_refused(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="expected diffusion, got autoregressive"):
        judge(inputs, tmp_path, diffusion=inputs["autoregressive"])
