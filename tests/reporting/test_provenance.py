import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from canvaslm.params import read_yaml
from canvaslm.reporting import collected
from canvaslm.reporting.collected import find_foreign, judge, read_metrics, read_whole_metrics
from canvaslm.reporting.provenance import Record, find_stale, without

ROOT = Path(__file__).resolve().parents[2]
EVALUATIONS = {"eval_bound", "eval_loss_parity", "eval_samples", "eval_speedup"}
BEHIND_DIFFUSION = EVALUATIONS | {"audit_run.diffusion"}


def one_run() -> dict[str, Any]:
    """The reports of one run, as far as they say which model they are about."""
    model = {"autoregressive": "aa", "diffusion": "dd"}
    about = {name: {"trained_model_sha256": sha} for name, sha in model.items()}
    reports = {
        "audit_windows": {"verdict": "pass"},
        "docs_gate": {"verdict": "pass"},
        "pretrain": {x: {"verdict": "pass", "model_sha256": sha} for x, sha in model.items()},
        "audit_run": {x: about[x] | {"verdict": "pass"} for x in model},
        "eval_bound": about | {"verdict": "pass"},
        "eval_loss_parity": about | {"verdict": "pass"},
        "eval_samples": {f"{x}_training": about[x] for x in model} | {"verdict": "pass"},
        "eval_speedup": {f"{x}_training": about[x] for x in model} | {"verdict": "pass"},
    }
    return json.loads(json.dumps(reports))  # nothing is shared


def test_the_reports_of_one_run_are_all_of_it() -> None:
    """Nothing is called stale that is not."""
    assert find_stale(one_run()) == {}


def test_behind_a_training_that_failed_everything_is_of_another_run() -> None:
    """What an earlier model was worth is never shown for one that does not exist."""
    metrics = one_run()
    metrics["pretrain"]["diffusion"] = {"verdict": "fail", "model_sha256": None}
    stale = find_stale(metrics)
    assert set(stale) == BEHIND_DIFFUSION
    assert all("pretrain.diffusion fails" in reason for reason in stale.values())


@pytest.mark.parametrize("model", ["another", None])
def test_a_report_about_other_weights_is_of_another_run(model: str | None) -> None:
    """Another seed leaves every count of the training alike; and an older report names none."""
    metrics = one_run()
    metrics["eval_speedup"]["diffusion_training"]["trained_model_sha256"] = model
    assert list(find_stale(metrics)) == ["eval_speedup"]
    assert "another model than that of pretrain.diffusion" in find_stale(metrics)["eval_speedup"]


def test_a_training_that_left_no_report_leaves_none_behind_it() -> None:
    """A training that was killed under DVC has no report: DVC removed it first."""
    metrics = one_run()
    del metrics["pretrain"]["diffusion"]
    assert set(find_stale(metrics)) == BEHIND_DIFFUSION


def test_counted_forwards_are_about_no_model() -> None:
    metrics = one_run()
    metrics["eval_speedup"] = {"verdict": "not_measured", "rows": {}}
    assert find_stale(metrics) == {}


def test_behind_a_failed_audit_nothing_is_judged() -> None:
    metrics = one_run()
    metrics["audit_run"]["autoregressive"]["verdict"] = "fail"
    assert set(find_stale(metrics)) == EVALUATIONS
    metrics["audit_windows"]["verdict"] = "fail"
    assert len(find_stale(metrics)) == 8


def test_figures_of_another_run_are_left_out_and_no_others() -> None:
    metrics = one_run()
    left = without(metrics, {"audit_run.diffusion": "", "eval_speedup": ""})
    assert set(metrics) - set(left) == {"eval_speedup"}
    assert set(left["audit_run"]) == {"autoregressive"}
    assert left["pretrain"] == metrics["pretrain"]


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_a_stale_verdict_is_not_given(verdict: str) -> None:
    metrics = one_run()
    metrics["eval_speedup"]["verdict"] = verdict
    found = {x.place: x for x in judge(metrics, {}, {"eval_speedup": "made from another x"})}
    told = found["eval_speedup"]
    assert (told.verdict, told.reason, told.is_given) == (
        "not_measured", "made from another x", False,
    )  # fmt: skip
    assert len(found) == 10


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """What DVC would write of a run of which two stages matter here, and its files."""
    written = {
        "reports/audit_windows/metrics.json": json.dumps({"verdict": "pass"}),
        "reports/eval_loss_parity/metrics.json": json.dumps(one_run()["eval_loss_parity"]),
        "reports/code/eval_loss_parity.json": "{}",
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def entry(path: str) -> dict[str, str]:
        return {"path": path, "md5": hashlib.md5(written.get(path, path).encode()).hexdigest()}

    def stage(name: str, deps: list[str], outs: list[str], section: str) -> dict[str, Any]:
        params = {"params.yaml": {section: {"seed": 1}}}
        return {name: {"deps": [entry(x) for x in deps], "outs": [entry(x) for x in outs],
                       "params": params}}  # fmt: skip

    stages = stage("pretrain@diffusion", ["data/shards"], ["checkpoints/diffusion"], "pretrain")
    stages |= stage(
        "eval_loss_parity",
        ["checkpoints/diffusion", "reports/code/eval_loss_parity.json"],
        ["reports/eval_loss_parity/metrics.json"],
        "eval_loss_parity",
    )
    params = {"pretrain": {"seed": 1}, "eval_loss_parity": {"seed": 1}}
    return Record(root=tmp_path, lock={"stages": stages}, params=params)


def stale_by(record: Record) -> dict[str, str]:
    return find_stale(one_run(), record)


def test_a_record_of_this_very_run_finds_nothing_stale(record: Record) -> None:
    assert record.knows("eval_loss_parity")
    assert record.knows("eval_loss_parity.part.of_it")
    assert not record.knows("eval_bound.proof")
    assert stale_by(record) == {}


@pytest.mark.parametrize("section", ["pretrain", "eval_loss_parity"])
def test_other_values_since_make_a_report_stale_however_far_above(
    record: Record, section: str
) -> None:
    """An edit of params.yaml is seen before anything runs, through every stage behind it."""
    params = {**record.params, section: {"seed": 2}}
    stale = stale_by(Record(root=record.root, lock=record.lock, params=params))
    assert f"other values of `{section}`" in stale["eval_loss_parity"]


def test_a_folder_that_its_stage_has_made_anew_makes_a_report_stale(record: Record) -> None:
    """The two trainings came to their ends, and the comparison did not run again."""
    lock = copy.deepcopy(dict(record.lock))
    lock["stages"]["pretrain@diffusion"]["outs"][0]["md5"] = "0" * 32
    stale = stale_by(Record(root=record.root, lock=lock, params=record.params))
    assert "made from another `checkpoints/diffusion`" in stale["eval_loss_parity"]


def test_a_file_that_has_changed_makes_a_report_stale(record: Record) -> None:
    (record.root / "reports/code/eval_loss_parity.json").write_text('{"digest": "other"}')
    assert "reports/code/eval_loss_parity.json" in stale_by(record)["eval_loss_parity"]
    (record.root / "reports/code/eval_loss_parity.json").unlink()  # as in a fresh clone
    assert stale_by(record) == {}


def test_a_report_written_by_hand_is_none_that_the_record_knows(record: Record) -> None:
    """What DVC noted of another report is not held against this one."""
    (record.root / "reports/eval_loss_parity/metrics.json").write_text("{}")
    by_hand = Record(root=record.root, lock=record.lock, params={})
    assert not by_hand.knows("eval_loss_parity")
    assert stale_by(by_hand) == {}


@pytest.mark.parametrize("lock", [{}, {"stages": None}, {"stages": {"eval_loss_parity": None}}])
def test_an_empty_record_tells_nothing(record: Record, lock: dict[str, Any]) -> None:
    assert stale_by(Record(root=record.root, lock=lock, params={})) == {}


def test_a_lock_that_was_cut_anywhere_is_no_record_or_one_that_can_be_asked(tmp_path: Path) -> None:
    """A cut at the end of a line leaves YAML, with nothing where a list or a mapping should be."""
    whole = (ROOT / "dvc.lock").read_text()
    cuts = [whole[: at + 1] for at, letter in enumerate(whole) if letter in "\n:"]
    file = tmp_path / "dvc.lock"
    n_records = 0
    for text in [*cuts[:60], *cuts[60::97], whole, "stages: 3\n"]:
        file.write_text(text)
        record = Record.read(file, ROOT / "params.yaml", root=tmp_path)
        if record is not None:
            n_records += 1
            find_stale(one_run(), record)
            record.knows("eval_bound.proof")
            record.change_since("eval_bound")
    assert n_records > 1


def test_only_the_reports_of_the_pipeline_are_read(tmp_path: Path) -> None:
    """A run that a user sent to a folder of its own under reports/ is no verdict."""
    for place in ("docs_gate", "div", "pretrain/mine", "ablations/mine"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "metrics.json").write_text('{"verdict": "fail"}')
    metrics, damaged = read_whole_metrics(tmp_path)
    assert metrics == read_metrics(tmp_path) == {"docs_gate": {"verdict": "fail"}}
    assert "div" not in {finding.place for finding in judge(metrics, damaged, {})}
    assert find_foreign(tmp_path) == ["div/metrics.json", "pretrain/mine/metrics.json"]


def test_the_reports_of_the_pipeline_are_those_that_dvc_declares() -> None:
    declared = set()
    for stage in read_yaml(ROOT / "dvc.yaml")["stages"].values():
        for item in stage.get("matrix", {}).get("objective", [""]):
            for metric in stage.get("metrics", []):
                path = next(iter(metric)).replace("${item.objective}", item)
                declared.add(path.removeprefix("reports/").removesuffix("/metrics.json"))
    known = (*collected._JUDGED, *collected._UNJUDGED)
    assert {place.replace(".", "/") for place in known} == declared
