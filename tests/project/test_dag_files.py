"""Does dvc.yaml declare the files that each stage opens, and no others?

Every stage runs, small, in a copy of the checkout, under an audit hook that hears of each file.
"""

import copy
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from canvaslm.code_fingerprint import fingerprint
from canvaslm.params import read_yaml
from canvaslm.profiles import composed_profile

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "dvc.yaml")
SMALL: dict[str, dict[str, Any]] = {
    "layout": {"canvas_tokens": 4, "canvases_per_window": 8, "vocab_size": 280},
    "model": {"width": 16, "n_layers": 1, "n_heads": 2, "head_width": 8, "ffn_width": 16},
    "diffusion": {"train_times": 4},
    "fetch_corpus": {"source": "files", "path": "texts", "pattern": "*.txt"},
    "collect_documents": {"val_share": 0.4},
    "pack_shards": {"n_threads": 1},
    "audit_windows": {"max_shared_ngram_share": 1.0},
    "pretrain": {"device": "cpu", "steps": 2, "windows_per_step": 2, "micro_batch_windows": 2,
                 "warmup_steps": 1, "decay_steps": 0, "log_every": 1, "save_every": 1},
    "audit_run": {"device": "cpu", "n_windows": 2, "max_held_out_windows": 2},
    "eval_bound": {"device": "cpu", "n_times": [2, 4], "continuous_passes": 2, "max_windows": 2,
                   "batch_windows": 2, "proof_windows": 1},
    "eval_loss_parity": {"device": "cpu", "n_times": 4, "max_windows": 2, "batch_windows": 2},
    "eval_samples": {"device": "cpu", "n_prompts": 2, "batch_rows": 2, "prompt_tokens": 8,
                     "new_tokens": 8, "denoise_steps": [2], "reference_steps": 4},
    "eval_speedup": {"device": "cpu", "n_prompts": 2, "batch_rows": 2, "prompt_tokens": 8,
                     "new_tokens": 8, "short_new_tokens": 4, "rounds": 1, "warmup_rounds": 1},
}  # fmt: skip
# Opened, and neither dep nor out.
NOT_DECLARED = {
    r"params\.yaml": "declared by section, in `params`",
    r"dvc\.yaml": "DVC takes it for no dep; a stage that is new there has a new file in stages/",
    r"\.work/.*": "the state of a run outlives it; it decides how fast outs come, not which",
    r"reports/(.*/)?timing\.csv": "seconds differ from run to run, and nothing reads them",
    r"reports/pretrain/(.*/)?machine\.json": "a run is the same on any machine; a note for people",
}
# A dep that is not opened: what stands in it is passed before the stage may start.
_RUN_AUDITS = {f"reports/audit_run/{x}/metrics.json" for x in ("autoregressive", "diffusion")}
ONLY_WAITED_FOR: dict[str, set[str]] = {
    "pretrain": {"reports/audit_windows/metrics.json"},
    "eval_bound": _RUN_AUDITS,
    "eval_loss_parity": _RUN_AUDITS,
    "eval_samples": _RUN_AUDITS,
    "eval_speedup": _RUN_AUDITS,
}


def _instances() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each stage, and each item of a matrix, with all that stands in ${} filled in."""
    for name, stage in read_yaml(ROOT / "dvc.yaml")["stages"].items():
        for item in stage.get("matrix", {}).get("objective", [None]):
            text = json.dumps(stage).replace("${item.objective}", str(item))
            text = text.replace("${fetch_corpus.path}", SMALL["fetch_corpus"]["path"])
            yield f"{name}@{item}" if item else name, json.loads(text)


STAGES = dict(_instances())
Opened = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkout").resolve()
    folders = ("src", "stages", "tests", "configs", "docs", "bench", "requirements")
    for name in (*folders, "reports/ablations"):
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, place / name, ignore=skip)
    for name in COPIED:
        shutil.copy(ROOT / name, place)
    (place / "params.yaml").write_text(composed_profile("ci", ROOT / "configs"))
    values = read_yaml(place / "params.yaml")
    for section, knobs in SMALL.items():
        values[section] |= knobs
    with (place / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    (place / "texts").mkdir()
    for n in range(12):
        words = " ".join(f"Text {n} says {n * k} and {k}." for k in range(80))
        (place / "texts" / f"{n:02}.txt").write_text(words)
    return place


@pytest.fixture(scope="module")
def opened(checkout: Path) -> Opened:
    """What each stage opened, in the order of dvc.yaml."""
    lines = {name: stage["cmd"].split()[1:] for name, stage in STAGES.items()}
    watcher = str(Path(__file__).with_name("watch_stages.py"))
    ran = subprocess.run(
        [sys.executable, watcher, str(checkout), json.dumps(lines)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: Opened = json.loads(ran.stdout)
    for name, seen in found.items():
        wrong = 1 if name == "docs_gate" and seen["status"] == 1 else 0  # a page may be in work
        assert seen["status"] == wrong, (name, ran.stderr[-2000:])
    return found


def declared(stage: dict[str, Any], *keys: str) -> set[str]:
    entries = itertools.chain.from_iterable(stage.get(key, []) for key in keys)
    return {entry if isinstance(entry, str) else next(iter(entry)) for entry in entries}


@functools.cache
def reached(script: str, checkout: Path) -> frozenset[str]:
    """The code that a stage can reach."""
    return frozenset(fingerprint(checkout / "stages" / f"{script}.py", checkout)["files"])


def stands_for(name: str, file: str, checkout: Path) -> str:
    """The file that dvc.yaml declares where a stage reads this one.

    Code is depended on through digests, so that a comment reruns nothing: of the code that the
    stage can reach in its own fingerprint, of any other in the digests of all sources. The audit of
    a run digests what trained it, as that stage's fingerprint says. A user's files are read where
    they lie, as the list of them and their hashes says.
    """
    script = name.partition("@")[0]
    if name == "collect_documents" and file.startswith("texts/"):
        return "data/raw/inputs.json"
    if name == "fingerprint_code" or not re.match(r"(src|stages|tests|constraints)\b", file):
        return file
    if file in reached(script, checkout) or file == "constraints.txt":
        return f"reports/code/{script}.json"
    if script == "audit_run" and file in reached("pretrain", checkout):
        return "reports/code/pretrain.json"
    return "reports/sources.json"


def disagreements(
    name: str, stage: dict[str, Any], seen: dict[str, Any], checkout: Path
) -> Iterator[str]:
    """What a stage opens and dvc.yaml does not say, and the reverse."""
    script = name.partition("@")[0]
    files = {stands_for(name, file, checkout) for file in seen["opened"]}
    if name != "fingerprint_code":
        files.add(f"reports/code/{script}.json")
    files = {file for file in files if not any(re.fullmatch(x, file) for x in NOT_DECLARED)}
    entries = declared(stage, "deps", "outs", "metrics")
    for file in sorted(files):
        if not any(file == entry or file.startswith(f"{entry}/") for entry in entries):
            yield f"{file} is opened, not declared"
    waited_for = ONLY_WAITED_FOR.get(script, set())
    files |= waited_for
    for entry in sorted(entries):
        if not any(file == entry or file.startswith(f"{entry}/") for file in files):
            yield f"{entry} is declared, not opened"
    yield from (f"{x} is not waited for" for x in sorted(waited_for - declared(stage, "deps")))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_declares_the_files_that_it_opens_and_no_others(
    name: str, opened: Opened, checkout: Path
) -> None:
    assert list(disagreements(name, STAGES[name], opened[name], checkout)) == []


@pytest.mark.parametrize("name", STAGES)
def test_every_entry_that_is_dropped_is_missed(name: str, opened: Opened, checkout: Path) -> None:
    for key in ("deps", "outs", "metrics"):
        for entry in STAGES[name].get(key, []):
            without = copy.deepcopy(STAGES[name])
            without[key].remove(entry)
            assert list(disagreements(name, without, opened[name], checkout)), entry


@pytest.mark.parametrize("name", STAGES)
def test_an_entry_that_is_of_no_use_is_noticed(name: str, opened: Opened, checkout: Path) -> None:
    for key, entry in (("deps", "data/nothing"), ("outs", "reports/nothing.json")):
        more = STAGES[name] | {key: [*STAGES[name].get(key, []), entry]}
        found = list(disagreements(name, more, opened[name], checkout))
        assert found == [f"{entry} is declared, not opened"]
