import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from canvaslm.evaluation.speedup_params import EvalSpeedupParams
from canvaslm.evaluation.speedup_report import measure_speedup
from canvaslm.params import load_section, read_yaml
from canvaslm.reporting.progress import untracked
from shapes import PLAIN

ROOT = Path(__file__).parents[2]
DECODERS = ["fixed_16", "fixed_32", "adaptive_32", "autoregressive"]
COMPANIONS = ["verified", "companion"]
PLACES = ("shards", "tokenizer", "autoregressive", "diffusion")


def _run(places: dict[str, Path], out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    options = [text for name, path in places.items() for text in (f"--{name}", str(path))]
    stage = str(ROOT / "stages" / "eval_speedup.py")
    return subprocess.run(
        [sys.executable, stage, *options, "--out", str(out), *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=out.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _metrics(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())


def _with_model(
    decodable: dict[str, Path], place: Path, changes: dict[str, Any], **knobs: Any
) -> Path:
    """A params file with another model, and with other knobs of the comparison."""
    content = read_yaml(decodable["params"])
    content["model"] |= changes
    content["eval_speedup"] |= knobs
    with (place / "params.yaml").open("w") as file:
        YAML().dump(content, file)
    return place / "params.yaml"


@pytest.fixture(scope="module")
def report(decodable: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speedup") / "report"
    done = _run(decodable, out)
    assert done.returncode == 0, done.stderr
    return out


def test_each_row_has_its_counts_its_seconds_and_its_quality(report: Path) -> None:
    metrics = _metrics(report)
    for rows, new_tokens in ((metrics["rows"], 8), (metrics["short_rows"], 4)):
        assert sorted(rows) == sorted(DECODERS + COMPANIONS)
        for row in (rows[name] for name in DECODERS):
            assert row["n_rows"] == 2
            assert row["tokens"] <= 2 * new_tokens
            assert row["tokens_per_forward"] == row["tokens"] / row["forwards"]
            assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["median_s"])
            assert row["fastest_s"] <= row["median_s"] <= row["slowest_s"]
            # Networks that have seen nothing: one writes noise, the other finds all text alike.
            assert row["twin_nats_per_token"] == pytest.approx(math.log(280), abs=0.5)
            assert row["is_repetitive"] is row["is_noise"] is False
            assert row["speedup_over_companion"] == "not_measured"
            assert "accepted" not in row  # nothing is drafted
        rates = {name: row["tokens_per_second"] for name, row in rows.items()}
        assert rows["fixed_16"]["speedup_over_autoregressive"] == pytest.approx(
            rates["fixed_16"] / rates["autoregressive"]
        )
    assert metrics["held_out"]["n_samples"] == metrics["short_held_out"]["n_samples"] == 2
    assert metrics["held_out"]["n_tokens"] > metrics["short_held_out"]["n_tokens"]
    assert metrics["held_out"]["twin_nats_per_token"] == pytest.approx(math.log(280), abs=0.5)
    assert metrics["verdict"] == "pass"
    assert sorted(path.name for path in report.iterdir()) == ["metrics.json", "samples.json"]
    assert metrics["recipe"]["rounds"] == 2
    assert metrics["machine"]["device"] == "cpu"


def _refuse_figures(row: dict[str, Any], reason: str) -> None:
    """A row that was not measured says so in each figure, and why."""
    assert reason in row["reason"]
    assert row["ended_by"] == {}
    figures = {key: row[key] for key in row if key not in ("reason", "ended_by")}
    assert len(figures) > 20
    assert set(figures.values()) == {"not_measured"}


def test_rows_of_a_companion_that_was_not_trained_say_so(report: Path) -> None:
    metrics = _metrics(report)
    for rows in (metrics["rows"], metrics["short_rows"]):
        for name in COMPANIONS:
            _refuse_figures(rows[name], "was not trained to predict the next token")
        assert rows["verified"]["accepted_per_forward"] == "not_measured"
        assert set(rows["companion"]) == set(rows["fixed_16"]) | {"reason"}


def test_rows_of_a_companion_that_was_trained_are_measured(
    decodable: dict[str, Path], companion: Path, tmp_path: Path
) -> None:
    params = load_section(decodable["params"], "eval_speedup", EvalSpeedupParams)
    measure_speedup(
        **{name: decodable[name] for name in PLACES} | {"diffusion": companion},
        out=tmp_path / "report",
        params=params.model_copy(update={"draft_steps": 2}),
        track=untracked,
    )
    metrics = _metrics(tmp_path / "report")
    for rows in (metrics["rows"], metrics["short_rows"]):
        assert sorted(rows) == sorted(DECODERS + COMPANIONS)
        rates = {name: row["tokens_per_second"] for name, row in rows.items()}
        verified = rows["verified"]
        for other in ("autoregressive", "companion"):
            assert verified[f"speedup_over_{other}"] == pytest.approx(
                rates["verified"] / rates[other]
            )
        for name in COMPANIONS:
            assert "reason" not in rows[name]
            assert rows[name]["twin_nats_per_token"] == pytest.approx(math.log(280), abs=0.5)
        assert verified["verifications"] > 0
        for share in ("forward", "verification"):
            assert verified[f"accepted_per_{share}"] == verified["accepted"] / verified[f"{share}s"]
        assert verified["accepted"] + verified["verifications"] >= verified["tokens"] - 2
    assert (metrics["recipe"]["draft_steps"], metrics["recipe"]["draft_temperature"]) == (2, 0.8)
    written = json.loads((tmp_path / "report" / "samples.json").read_text())["samples"]
    assert {sample["decoder"] for sample in written} == {*DECODERS, *COMPANIONS}


def test_samples_are_text_behind_their_prompts(decodable: dict[str, Path], report: Path) -> None:
    samples = json.loads((report / "samples.json").read_text())["samples"]
    assert [sample["decoder"] for sample in samples[:8:2]] == DECODERS
    assert len(samples) == 2 * 2 * 4
    prompts = {sample["prompt"] for sample in samples}
    assert len(prompts) == 2
    documents = pq.read_table(decodable["shards"].parent / "val.parquet")["text"].to_pylist()
    packed = "".join(f"{text}<|endoftext|>" for text in documents)
    assert all(prompt in packed for prompt in prompts), prompts
    assert all(sample["text"] for sample in samples if sample["tokens"])


@pytest.mark.parametrize(
    ("with_shards", "changes"),
    [(True, {}), (False, {}), (False, {"tilt": 0.0}), (False, PLAIN["model"])],
)
def test_counts_need_no_checkpoint_and_are_the_same_bytes_again(
    decodable: dict[str, Path], tmp_path: Path, with_shards: bool, changes: dict[str, Any]
) -> None:
    shards = decodable["shards"] if with_shards else tmp_path / "nowhere"
    params = _with_model(decodable, tmp_path, changes, end_temperature=0.4)
    places = {"params": params, "shards": shards}
    names = ["metrics.json", "samples.json"]
    written = []
    for run in ("first", "second") if with_shards else ("first",):
        done = _run(places, tmp_path / run, "--counts-only")
        assert done.returncode == 0, done.stderr
        written.append([(tmp_path / run / name).read_bytes() for name in names])
    assert written[0] == written[-1]
    metrics = _metrics(tmp_path / "first")
    assert metrics["recipe"]["prompts"] == ("held_out" if with_shards else "drawn")
    assert metrics["machine"] == metrics["verdict"] == "not_measured"
    assert metrics["held_out"]["distinct_1"] == "not_measured"
    for name, steps in (("fixed_16", 16), ("fixed_32", 32), ("adaptive_32", 32)):
        row, most = metrics["rows"][name], 2 * (1 + 2 * (steps + 1))
        if name == "adaptive_32" and changes == {"tilt": 0.0}:
            # What knows nothing is never sure, but where the known evidence of its token makes it;
            # under a large tilt the last position has its time too late for that.
            assert row["forwards"] < most
            assert row["tokens_per_forward_after_prompt"] > 4 / (steps + 1)
        else:
            assert row["forwards"] == most
            assert row["tokens_per_forward_after_prompt"] == pytest.approx(4 / (steps + 1))
        assert row["median_s"] == row["tokens_per_second"] == "not_measured"
        assert row["twin_nats_per_token"] == row["is_repetitive"] == "not_measured"
        assert row["is_noise"] == "not_measured"
    assert metrics["rows"]["autoregressive"]["forwards"] == 2 * 8
    for name in COMPANIONS:
        _refuse_figures(metrics["rows"][name], "the weights are drawn")


def test_missing_checkpoint_is_told_in_one_line(decodable: dict[str, Path], tmp_path: Path) -> None:
    done = _run({**decodable, "diffusion": tmp_path / "nowhere"}, tmp_path / "out")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "nowhere" in done.stderr
    assert not (tmp_path / "out").exists()


def test_more_prompts_than_held_out_windows_are_refused(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    params = tmp_path / "params.yaml"
    params.write_text(decodable["params"].read_text().replace("n_prompts: 2", "n_prompts: 5000"))
    done = _run({**decodable, "params": params}, tmp_path / "out")
    assert done.returncode == 2
    assert "expected at least 5000 windows of 32 tokens" in done.stderr


def test_prompts_of_part_canvases_are_refused_under_the_name_of_their_knob(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    """A block mask reads whole canvases of 4 tokens; the error names what to set."""
    changes = PLAIN["model"] | {"clean_mask": "block"}
    params = _with_model(decodable, tmp_path, changes, prompt_tokens=6)
    places = {"params": params, "shards": decodable["shards"]}
    done = _run(places, tmp_path / "out", "--counts-only")
    assert done.returncode == 2
    assert "eval_speedup.prompt_tokens: expected a multiple of canvas_tokens, 4" in done.stderr
