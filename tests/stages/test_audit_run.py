"""Does the stage audit a run from the command line, write first, and then close the gate?"""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.params import read_yaml

ROOT = Path(__file__).parents[2]
PRETRAIN = {
    "steps": 4,
    "windows_per_step": 2,
    "micro_batch_windows": 2,
    "warmup_steps": 1,
    "decay_steps": 1,
    "device": "cpu",
    "vocab_chunk": 280,
    "log_every": 2,
    "save_every": 2,
}
AUDIT = {"device": "cpu", "n_windows": 2, "max_held_out_windows": 2, "overfit_learning_rate": 0.01}


@pytest.fixture(scope="module")
def trained(decodable: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the twin."""
    place = tmp_path_factory.mktemp("trained")
    (place / "data/tokenizer").mkdir(parents=True)
    (place / "data/shards").symlink_to(decodable["shards"])
    (place / "data/tokenizer/tokenizer.json").symlink_to(decodable["tokenizer"])
    (place / "reports/collect_documents").mkdir(parents=True)
    (place / "reports/collect_documents/metrics.json").write_text("{}")
    values = read_yaml(decodable["params"])
    values["pretrain"] |= PRETRAIN
    values["audit_run"] |= AUDIT
    with (place / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("DVC_ROOT", str(place))
        assert call("pretrain", patch) == 0
    return place


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is also the working directory."""
    place = tmp_path / "run"
    shutil.copytree(trained, place, symlinks=True)
    monkeypatch.chdir(place)
    return place


def call(stage: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Run a stage as its command does and give the exit status."""
    script = str(ROOT / "stages" / f"{stage}.py")
    monkeypatch.setattr(sys, "argv", [script, "--objective=autoregressive", *options])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(script, run_name="__main__")
    return int(left.value.code or 0)


def metrics(run: Path) -> dict[str, Any]:
    return json.loads((run / "reports/audit_run/autoregressive/metrics.json").read_text())


def test_a_clean_run_passes_and_both_files_are_the_same_bytes_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("audit_run", monkeypatch) == 0, metrics(run)["verdict_reason"]
    found = metrics(run)
    assert (found["verdict"], found["first_failure"], found["n_failed"]) == ("pass", None, 0)
    names = [check["name"] for check in found["checks"]]
    assert len(set(names)) == found["n_checks"] > 10
    out = run / "reports/audit_run/autoregressive"
    first = {file.name: file.read_bytes() for file in out.iterdir()}
    assert sorted(first) == ["index.html", "metrics.json"]
    assert call("audit_run", monkeypatch) == 0
    assert {file.name: file.read_bytes() for file in out.iterdir()} == first


def test_a_failed_check_closes_the_gate_after_the_report_and_stands_on_top_of_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = run / "reports/pretrain/autoregressive/loss.csv"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines, lines[-1]]))  # BR-47: a row that stands twice
    capfd.readouterr()
    assert call("audit_run", monkeypatch) == 1
    told = capfd.readouterr().err.splitlines()
    assert told[-1].startswith("gate closed: audit_run: loss_log_is_whole: 3 rows")
    found = metrics(run)
    assert (found["verdict"], found["first_failure"]) == ("fail", "loss_log_is_whole")
    page = (run / "reports/audit_run/autoregressive/index.html").read_text()
    assert page.index("failed: loss log is whole") < page.index("ids_are_in_vocabulary")


def test_another_runs_checkpoint_is_told_by_its_identity(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = read_yaml(run / "params.yaml")
    values["pretrain"]["weight_decay"] = 0.05
    with (run / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    assert call("audit_run", monkeypatch) == 1
    (check,) = (x for x in metrics(run)["checks"] if x["name"] == "identity_is_that_of_the_inputs")
    assert check["verdict"] == "fail"
    assert "1 of" in check["measured"]
    assert "pretrain.weight_decay" in check["measured"]


@pytest.mark.parametrize("missing", ["reports/pretrain/autoregressive/loss.csv", "params.yaml"])
def test_a_missing_file_is_told_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    (run / missing).unlink()
    capfd.readouterr()
    assert call("audit_run", monkeypatch) == 2
    (told,) = capfd.readouterr().err.splitlines()
    assert missing in told
