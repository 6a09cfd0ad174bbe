"""Does an ablation run what is missing, believe nothing else, and conclude no more than it may?"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import door
from canvaslm.ablation.arms import Trial, as_overrides, find_arms, find_trials
from canvaslm.ablation.experiments import find_revisions, run_git, unpacked
from canvaslm.ablation.programme import refuse_unready, run_programme
from canvaslm.ablation.report import tabulate
from canvaslm.ablation.rows import collect, find_row
from canvaslm.ablation.spec import Spec, read_spec
from canvaslm.ablation.timing import measure_seconds
from canvaslm.errors import InputError
from canvaslm.params import read_yaml
from canvaslm.reporting.progress import untracked
from tiny_pipeline import LIMIT_S, call, commit, environment, lay_pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # nine experiments of DVC in all
ROOT = Path(__file__).parents[2]
ABLATION = """# What the width of the feed-forward is worth.
id: {id}
question: Is a wider feed-forward better?
hypothesis: It is, since it holds more.
profile: tiny
overrides:
  pretrain.learning_rate: 0.001
varies: {varies}
arms:
  plain: {{}}
  other: {{{varies}: {value}}}
baseline: plain
seeds: [1]
also:
  - {{file: reports/eval_loss_parity/metrics.json, key: gap_percent, better: lower}}
decision: {{paired_interval_excludes: 0.1, confidence: 0.95}}
timing: {{steps: 2, rounds: 1, warmup_rounds: 0}}
does_not_establish:
  - That this holds at any other size.
"""


def ablate(place: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "stages/ablate.py"), "--root", str(place), "--id", name]
    return subprocess.run(
        [*script, *words],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def place(decodable: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with an ablation that has run to its end, and with others that have not."""
    folder = tmp_path_factory.mktemp("ablations") / "repository"
    lay_pipeline(folder, shards=decodable["shards"], params=decodable["params"])
    (folder / "docs/ablations").mkdir(parents=True)
    file = folder / "docs/ablations/width.yaml"
    file.write_text(ABLATION.format(id="width", varies="model.ffn_width", value=32))
    frozen = ablate(folder, "width", "--do", "freeze")
    assert frozen.returncode == 0, frozen.stderr
    fixed = file.read_text().partition("\nfixed:")[2]
    unread = "diffusion.self_conditioning_share"
    for name, varies, value in (("sham", "model.ffn_width", 32), ("edit", "model.ffn_width", 32),
                                ("idle", unread, 0.25), ("torn", unread, 0.25)):  # fmt: skip
        text = ABLATION.format(id=name, varies=varies, value=value)
        file.with_name(f"{name}.yaml").write_text(f"{text}\nfixed:{fixed}")
    commit(folder, "Say what is asked")
    ran = ablate(folder, "width")
    assert ran.returncode == 0, ran.stderr
    return folder


def spec_of(place: Path, name: str, **changes: Any) -> Spec:
    return read_spec(place, name).model_copy(update=changes)


def trial_of(place: Path, name: str, arm: str, seed: int) -> tuple[Spec, Trial]:
    spec = read_spec(place, name)
    trials = find_trials(find_arms(place, spec), spec)
    return spec, next(trial for trial in trials if (trial.arm, trial.seed) == (arm, seed))


def run_by_hand(place: Path, trial: Trial, *more: str) -> None:
    """An experiment under a trial's name, with other values than its own perhaps."""
    words = as_overrides(trial.params, read_yaml(place / "params.yaml"))
    options = [word for change in (*words, *more) for word in ("-S", change)]
    dvc = (sys.executable, "-m", "dvc", "exp", "run", "--temp", "--name", trial.name)
    call(place, *dvc, *options, "eval_loss_parity")


@contextmanager
def sham(place: Path, changes: dict[str, Any], *, of: str = "width-other-s1") -> Iterator[None]:
    """An experiment `sham-other-s1` that is that one, with some of its files changed."""
    rev = find_revisions(place, of)[0]
    index = {"GIT_INDEX_FILE": str(place / ".git/sham.index")}

    def git(*words: str, text: str | None = None) -> str:
        ran = subprocess.run(
            ["git", *words],
            cwd=place,
            env=environment() | index,
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.strip()

    git("read-tree", rev)
    for path, content in changes.items():
        blob = git("hash-object", "-w", "--stdin", text=content)
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    made = git("commit-tree", git("write-tree"), "-p", f"{rev}^", "-m", "a sham")
    ref = "refs/exps/aa/bb/sham-other-s1"
    git("update-ref", ref, made)
    try:
        yield
    finally:
        git("update-ref", "-d", ref)


def kept(place: Path, name: str, path: str) -> str:
    return run_git(place, "show", f"{find_revisions(place, name)[0]}:{path}").decode()


def lock_with(lock: str, old: str, new: str) -> str:
    """A lock that vouches for other bytes: the hash of one content in place of another's."""
    before, after = (hashlib.md5(x.encode(), usedforsecurity=False).hexdigest() for x in (old, new))
    assert before in lock
    return lock.replace(before, after)


def refusal(place: Path, name: str = "sham") -> str:
    with pytest.raises(InputError) as caught:
        find_row(place, *trial_of(place, name, "other", 1))
    return str(caught.value)


def test_a_finished_ablation_says_what_follows_and_what_does_not(place: Path) -> None:
    report = place / "reports/ablations/width"
    found = json.loads((report / "metrics.json").read_text())
    assert set(found["arms"]) == {"plain", "other"}
    assert len(found["experiments"]) == 2
    other = found["arms"]["other"]
    assert other["difference_as_run"]["difference"] == pytest.approx(-0.5, abs=0.01)
    at_equal = {axis: x["judgement"] for axis, x in other["at_equal"].items()}
    assert (at_equal["steps"], at_equal["flops"]) == ("undecided", "not_measured")
    assert other["judgement"] == "not_measured", "twice the operations, and no such baseline"
    assert other["at_equal"]["steps"]["difference"]["high"] < 0
    assert "One seed tells nothing of the next" in other["conclusion"]
    assert other["costs"]["seconds"] > 0
    assert other["also"]["eval_loss_parity.gap_percent"] > 0
    assert found["arms"]["plain"]["judgement"] == "not_judged"
    page = (report / "table.md").read_text()
    assert "That this holds at any other size." in page
    assert other["conclusion"] in page
    assert "profile tiny with pretrain.learning_rate=0.001, 1 seed and 6 held-out" in page
    assert (report / "arms.csv").read_text().count("\n") == 3
    assert (report / "arms.svg").read_text().startswith("<svg")


def test_running_again_runs_nothing_and_writes_the_same_bytes(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = place / "reports/ablations/width"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    spec = read_spec(place, "width")
    with caplog.at_level("INFO"):
        rows = run_programme(place, spec, validate=door.validate_params, track=untracked)
    assert "2 of 2 experiments are there" in caplog.text
    measure_seconds(place, spec, rows[0], untracked)
    tabulate(place, spec)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_experiments_run_from_the_params_of_another_profile(place: Path) -> None:
    """The working tree is at another profile, and says nothing of what an arm is."""
    assert read_yaml(place / "params.yaml")["profile"] == "laptop"
    spec, trial = trial_of(place, "width", "other", 1)
    (rev,) = find_revisions(place, trial.name)
    with unpacked(place, trial.name, rev) as experiment:
        assert experiment.params == trial.params
        assert experiment.params["profile"] == "tiny"
    assert find_row(place, spec, trial) is not None


def test_two_params_changed_are_refused_and_both_are_named(place: Path) -> None:
    _, trial = trial_of(place, "idle", "other", 1)
    run_by_hand(place, trial, "model.ffn_width=32")
    told = refusal(place, "idle")
    assert "expected the values of arm other with seed 1" in told
    assert "model.ffn_width: 16 -> 32" in told


def test_an_experiment_on_another_manifest_is_refused(place: Path) -> None:
    spec, trial = trial_of(place, "width", "other", 1)
    assert spec.fixed is not None
    fixed = spec.fixed.model_copy(update={"data_manifest_sha256": "0" * 64})
    with pytest.raises(InputError, match=r"expected the frozen data .manifest 0000"):
        find_row(place, spec.model_copy(update={"fixed": fixed}), trial)


def test_other_data_and_other_code_under_the_same_params_are_refused(place: Path) -> None:
    """Both really happen: a text and a stage are edited, and an experiment is run by hand."""
    text, stage = place / "texts/manifest.json", place / "stages/pretrain.py"
    plain = {file: file.read_text() for file in (text, stage)}
    arms = {text: ("plain", "the frozen data"), stage: ("other", "with the frozen code")}
    try:
        for file, (arm, expected) in arms.items():
            spec, trial = trial_of(place, "edit", arm, 1)
            added = "x = 1\n" if file == stage else "\n"
            file.write_text(plain[file] + added)
            if file == stage:
                with pytest.raises(InputError, match=r"stages/pretrain.py: expected the frozen"):
                    refuse_unready(place, spec)
            run_by_hand(place, trial)
            file.write_text(plain[file])
            with pytest.raises(InputError, match=expected):
                find_row(place, spec, trial)
    finally:
        for file, content in plain.items():
            file.write_text(content)


@pytest.fixture(scope="module")
def torn(place: Path) -> Spec:
    """An ablation of which the second arm was killed in its training."""
    spec, trial = trial_of(place, "torn", "other", 1)
    flag = place.parent / "hangs"
    words = as_overrides(trial.params, read_yaml(place / "params.yaml"))
    options = [word for change in words for word in ("-S", change)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "exp", "run", "--temp", "--name", trial.name, *options],
        cwd=place,
        env=environment() | {"HANGS": str(flag)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    until = time.monotonic() + LIMIT_S
    while not flag.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=LIMIT_S)
    return spec


def test_a_killed_arm_is_no_result_and_the_programme_goes_on_with_it(
    place: Path, torn: Spec
) -> None:
    """And its parameter reaches no training here, so that both arms end with one model."""
    plain, other = find_trials(find_arms(place, torn), torn)
    assert find_row(place, torn, other) is None
    with pytest.raises(InputError, match="arm other, seed 1: expected a finished experiment"):
        collect(place, torn, [other])
    with pytest.raises(InputError, match=r"torn-other-s1: expected a model of its own.*torn-plain"):
        run_programme(place, torn, validate=door.validate_params, track=untracked)
    assert len(collect(place, torn, [plain])) == len(collect(place, torn, [other])) == 1


def test_a_training_that_ended_early_is_refused(place: Path) -> None:
    path, report = "dvc.lock", "reports/pretrain/diffusion/metrics.json"
    old = kept(place, "width-other-s1", report)
    new = json.dumps(json.loads(old) | {"steps": 7})
    lock = lock_with(kept(place, "width-other-s1", path), old, new)
    with sham(place, {report: new, path: lock}):
        assert "expected a training of 20 steps, got 7" in refusal(place)


def test_a_row_with_the_metrics_of_the_baseline_is_refused(place: Path) -> None:
    """First with its own lock, which does not vouch for them; then with the baseline's whole."""
    report = "reports/eval_loss_parity/metrics.json"
    ghost = kept(place, "width-plain-s1", report)
    with sham(place, {report: ghost}):
        assert "the report of eval_loss_parity that its dvc.lock records" in refusal(place)
    lock = lock_with(
        kept(place, "width-other-s1", "dvc.lock"), kept(place, "width-other-s1", report), ghost
    )
    with sham(place, {report: ghost, "dvc.lock": lock}):
        assert "made from another model than that of pretrain" in refusal(place)
    whole = {path: kept(place, "width-plain-s1", path) for path in (
        report, "dvc.lock", "reports/pretrain/diffusion/metrics.json",
        "reports/pretrain/autoregressive/metrics.json")}  # fmt: skip
    with sham(place, whole):
        assert "made with other values of `model`" in refusal(place)
    with sham(place, {}):
        row = find_row(place, *trial_of(place, "sham", "other", 1))
        assert row is not None, "unchanged, it is what it says"


def test_a_missing_seed_is_refused_by_name_and_nothing_is_written(place: Path) -> None:
    spec = spec_of(place, "width", seeds=[1, 2])
    before = (place / "reports/ablations/width/metrics.json").read_bytes()
    with pytest.raises(InputError, match="seed 2: expected a finished experiment width-plain-s2"):
        tabulate(place, spec)
    assert (place / "reports/ablations/width/metrics.json").read_bytes() == before


def test_a_file_that_was_changed_after_the_run_has_no_experiments(place: Path) -> None:
    file = place / "docs/ablations/width.yaml"
    plain = file.read_text()
    file.write_text(plain.replace("paired_interval_excludes: 0.1", "paired_interval_excludes: 0"))
    try:
        assert find_row(place, *trial_of(place, "width", "other", 1)) is None
        with pytest.raises(InputError, match="expected the file as it is committed, got another"):
            refuse_unready(place, read_spec(place, "width"))
    finally:
        file.write_text(plain)
    refuse_unready(place, read_spec(place, "width"))


def test_what_is_not_frozen_is_refused_in_one_line(place: Path) -> None:
    file = place / "docs/ablations/bare.yaml"
    file.write_text(ABLATION.format(id="bare", varies="model.ffn_width", value=32))
    try:
        ran = ablate(place, "bare")
        assert ran.returncode == 2
        assert re.fullmatch(r"\S*bare.yaml: expected what is held fixed.*freeze.*\n", ran.stderr)
    finally:
        file.unlink()


def test_a_value_that_a_stage_would_refuse_stops_before_the_first_arm(place: Path) -> None:
    spec = spec_of(place, "width", arms={"plain": {}, "other": {"model.ffn_width": -1}})
    with pytest.raises(InputError, match=r"model.ffn_width"):
        run_programme(place, spec, validate=door.validate_params, track=untracked)
