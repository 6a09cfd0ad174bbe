import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.params import read_yaml
from canvaslm.reporting.collected import find_verdicts

ROOT = Path(__file__).parents[2]
KNOBS = {
    "device": "cpu",
    "n_prompts": 2,
    "batch_rows": 2,
    "prompt_tokens": 8,
    "new_tokens": 8,
    "denoise_steps": [2, 4],
    "reference_steps": 8,
}


@pytest.fixture(scope="module")
def inputs(decodable: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards, two checkpoints of untrained networks, and a params file."""
    values = read_yaml(decodable["params"])
    values["eval_samples"] |= KNOBS
    params = tmp_path_factory.mktemp("params") / "params.yaml"
    with params.open("w") as file:
        YAML().dump(values, file)
    places = ("shards", "autoregressive", "diffusion")
    return {name: decodable[name] for name in places} | {"params": params}


def run_stage(inputs: dict[str, Path], out: Path) -> subprocess.CompletedProcess[str]:
    options = [text for name, path in inputs.items() for text in (f"--{name}", str(path))]
    return subprocess.run(
        [sys.executable, ROOT / "stages" / "eval_samples.py", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=inputs["params"].parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def metrics(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("samples") / "out"
    done = run_stage(inputs, out)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in out.iterdir()] == ["metrics.json"]
    return json.loads((out / "metrics.json").read_text())


def test_each_sampler_has_what_it_took_what_it_is_worth_and_how_it_stands(
    metrics: dict[str, Any],
) -> None:
    rows = metrics["rows"]
    assert len(rows) == 3 * 3 * 2 + 3 + 2
    quality = set(metrics["held_out"]) - {"n_samples"}
    for name, row in rows.items():
        assert quality < set(row)
        assert row["tokens_with_end"] <= 16
        assert row["forwards_per_token"] == row["forwards"] / row["tokens_with_end"]
        assert row["tokens_with_end_per_forward"] == pytest.approx(1 / row["forwards_per_token"])
        assert row["seconds_per_token"] == row["elapsed_s"] / row["tokens_with_end"] > 0
        # Networks that have seen nothing: one writes noise, the other finds all text alike.
        assert row["twin_nats_per_token"] == pytest.approx(math.log(280), abs=0.5)
        assert row["standing"] in ("frontier", "dominated", "trade"), name
        assert (row["standing"] == "dominated") == ("dominated_by" in row)
        assert row.get("dominated_by", "quota/never/2") in rows
        assert row["reference"] == f"{row['acceptance']}/never/8"
        assert 0 <= row["share_equal_to_reference"] <= 1
        if row["is_reference"]:
            assert row["share_equal_to_reference"] == 1
    fixed = rows["quota/never/4"]
    assert fixed["forwards"] <= 2 * (1 + 2 * (4 + 1))
    assert (fixed["start_temperature"], fixed["end_temperature"]) == (0.8, 0.8)
    assert any(row["standing"] == "frontier" for row in rows.values())


def test_the_twins_samples_and_held_out_text_stand_beside_them(metrics: dict[str, Any]) -> None:
    twin = metrics["autoregressive"]
    assert twin["forwards_per_token"] == 1
    assert twin["n_tokens"] > 0
    assert "standing" not in twin
    assert metrics["held_out"]["n_samples"] == 2
    assert metrics["held_out"]["twin_nats_per_token"] == pytest.approx(math.log(280), abs=0.5)
    assert metrics["recipe"]["reference_steps"] == 8
    for name in ("autoregressive", "diffusion"):
        assert len(metrics[f"{name}_training"]["trained_model_sha256"]) == 64


def test_the_report_gives_one_verdict_whatever_its_rows_are_called(metrics: dict[str, Any]) -> None:
    (finding,) = find_verdicts({"eval_samples": metrics})
    assert (finding.place, finding.verdict) == ("eval_samples", "pass")
    assert "samplers write text" in finding.reason


def test_a_missing_checkpoint_is_told_in_one_line_with_status_2(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    done = run_stage({**inputs, "diffusion": tmp_path / "nowhere"}, tmp_path / "out")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nowhere" in done.stderr
    assert not (tmp_path / "out").exists()


def test_more_prompts_than_held_out_windows_are_refused_under_the_name_of_their_knob(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    values = read_yaml(inputs["params"])
    values["eval_samples"]["n_prompts"] = 5000
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    done = run_stage({**inputs, "params": tmp_path / "params.yaml"}, tmp_path / "out")
    assert done.returncode == 2
    assert "lower eval_samples.n_prompts" in done.stderr
