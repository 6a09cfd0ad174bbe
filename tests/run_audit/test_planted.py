"""Does the audit name a fault that was planted, by the right check and before all others?

Each fault is a change of the text of a copy of the sources. The copy trains a run and audits it,
so that the fault is in both, as it would be.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from canvaslm.corpus.shards import PackParams, pack_shards
from canvaslm.corpus.tokenizer import Tokenizer, TokenizerParams, train_tokenizer
from canvaslm.params import read_yaml
from canvaslm.reporting.progress import untracked
from shapes import PLAIN

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "src/canvaslm"
OBJECTIVES = ("diffusion", "autoregressive")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # one fixture trains all the copies
VALUES: dict[str, dict[str, Any]] = {
    "layout": {"canvas_tokens": 4, "canvases_per_window": 4, "vocab_size": 280},
    "model": {"width": 16, "n_layers": 2, "n_heads": 2, "head_width": 8, "ffn_width": 32,
              "time_width": 8},
    "diffusion": {"train_times": 4},
    "pretrain": {"device": "cpu", "steps": 8, "windows_per_step": 4, "micro_batch_windows": 2,
                 "learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 2, "log_every": 1,
                 "save_every": 4, "vocab_chunk": 280, "loader_workers": 0, "trace_steps": 0},
    "audit_run": {"device": "cpu", "n_windows": 4, "max_held_out_windows": 8,
                  "overfit_steps": 80, "overfit_learning_rate": 0.03},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of the text of one file, and the check that has to name it.

    Attributes:
        file: below the library.
        right: the text as it is, which stands there once.
        wrong: what it becomes.
        check: the name of the check, by objective; an objective that is not there cannot have it.
        more: further changes: file, right, wrong.
    """

    file: str
    right: str
    wrong: str
    check: dict[str, str]
    more: tuple[tuple[str, str, str], ...] = ()


def both(check: str) -> dict[str, str]:
    return dict.fromkeys(OBJECTIVES, check)


FAULTS = {
    "the denoiser's targets are shifted by one": Fault(
        file="objective/denoising.py",
        right="                clean=windows,\n",
        wrong="                clean=windows.roll(-1, dims=1),\n",
        check={"diffusion": "targets_are_clean_tokens"},
    ),
    "the twin's targets are shifted by one": Fault(
        file="objective/next_token.py",
        right="hidden, model.head_weight, windows, vocab_chunk",
        wrong="hidden, model.head_weight, windows.roll(-1, dims=1), vocab_chunk",
        check={"autoregressive": "targets_are_next_tokens"},
    ),
    "a noisy canvas sees its own clean copy": Fault(
        file="model/sliced.py",
        right="= self._own[:, :, block.first : block.last]\n",
        wrong="= self._clean[:, :, block.before : block.end]\n",
        check={"diffusion": "own_clean_copy_is_unseen"},
    ),
    "the head is untied after a load": Fault(
        file="model/backbone.py",
        right="return self.embedding.weight[: self.layout.vocab_size]",
        wrong='return getattr(self, "cut", self.embedding.weight)[: self.layout.vocab_size]',
        more=(
            (
                "checkpoint.py",
                "    return model.eval()\n",
                "    model.cut = model.embedding.weight.detach().clone()\n"
                "    return model.eval()\n",
            ),
        ),
        check=both("head_is_tied"),
    ),
    "the learning rate that is applied is 0": Fault(
        file="training/optimizer.py",
        right='group["lr"] = learning_rate',
        wrong='group["lr"] = 0.0',
        check=both("learning_rate_is_applied"),
    ),
    "a parameter is frozen": Fault(
        file="training/learner.py",
        right="        self.model.to(device).train()\n",
        wrong="        self.model.to(device).train()\n"
        "        self.model.blocks[1].feed_forward.up.weight.requires_grad_(False)\n",
        check=both("gradients_reach_every_parameter"),
    ),
    "validation windows are trained on": Fault(
        file="training/job.py",
        right='Windows(shards, "train", ',
        wrong='Windows(shards, "val", ',
        check=both("no_held_out_window_consumed"),
    ),
    "the optimiser's state is lost on resume": Fault(
        file="checkpoint.py",
        right="    _copy_into(targets[1], moments)\n",
        wrong="",
        check=both("optimizer_state_survives"),
    ),
    "the loss is taken of probabilities": Fault(
        file="loss.py",
        right="    flat, words, places = _counted(hidden, targets)\n",
        wrong="    shares = functional.linear(hidden, weight).softmax(-1).flatten(0, -2)\n"
        "    nats = functional.cross_entropy(\n"
        '        shares, targets.flatten(), ignore_index=IGNORED, reduction="none"\n'
        "    )\n"
        "    return _reduce(nats.view_as(targets), targets, reduction)\n"
        "    flat, words, places = _counted(hidden, targets)\n",
        check=both("loss_is_cross_entropy"),
    ),
    "the schedule is stepped for each micro-batch": Fault(
        file="training/learner.py",
        right="rate = learning_rate(step, self._params)",
        wrong="rate = learning_rate(\n"
        "            min(step * -(-len(windows) // self._params.micro_batch_windows),\n"
        "                self._params.steps - 1),\n"
        "            self._params,\n"
        "        )",
        check=both("learning_rate_follows_schedule"),
    ),
}
CLEAN: dict[str, dict[str, dict[str, Any]]] = {"the default recipe": {}, "the plain recipe": PLAIN}
CASES = [(name, objective) for name, fault in FAULTS.items() for objective in fault.check]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and a tokenizer: what a run is made from."""
    place = tmp_path_factory.mktemp("inputs")
    rng, words = np.random.default_rng(0), ["canvas", "window", "shard", "noise", "clean", "token"]
    texts = [f"{n} " + " ".join(rng.choice(words, size=80)) for n in range(8)]
    for split, part in (("train", texts[:6]), ("val", texts[6:])):
        rows = [
            {
                "doc_id": number,
                "source": f"{split}:{number}",
                "text": text,
                "n_bytes": len(text.encode()),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
            for number, text in enumerate(part)
        ]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{split}.parquet")
    knobs = TokenizerParams(source="train", end_of_text="<|endoftext|>", min_frequency=1)
    tokenizer = place / "data" / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_bytes(train_tokenizer(texts[:6], knobs, VALUES["layout"]["vocab_size"]))
    pack = PackParams(shard_tokens=10_000, n_threads=1)
    shards = place / "data" / "shards"
    pack_shards(place, Tokenizer.load(tokenizer), pack, shards, track=untracked)
    return place


def copy_checkout(inputs: Path, place: Path, recipe: dict[str, dict[str, Any]]) -> Path:
    """A copy of the sources with what a run is made from."""
    for name in ("src", "stages"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.copy(ROOT / "constraints.txt", place)
    values = read_yaml(ROOT / "configs" / "base.yaml")
    for section, changes in (*VALUES.items(), *recipe.items()):
        values[section] |= changes
    with (place / "params.yaml").open("w") as file:
        YAML().dump(values, file)
    (place / "data").symlink_to(inputs / "data")
    report = place / "reports" / "collect_documents" / "metrics.json"
    report.parent.mkdir(parents=True)
    report.write_text("{}")
    return place


def plant(fault: Fault, place: Path) -> None:
    """Change the text of a copy; a text that is not there just once is no fault of ours."""
    for name, right, wrong in ((fault.file, fault.right, fault.wrong), *fault.more):
        file = place / LIBRARY / name
        text = file.read_text()
        assert text.count(right) == 1, f"{name} has changed: {right!r} stands {text.count(right)}×"
        file.write_text(text.replace(right, wrong))


@pytest.fixture(scope="session")
def audits(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """What each copy found: the report of its audit, and the exit status."""
    root = tmp_path_factory.mktemp("copies").resolve()
    cases: dict[str, tuple[str, list[list[str]]]] = {}
    for number, name in enumerate([*CLEAN, *FAULTS]):
        place = copy_checkout(inputs, root / str(number), CLEAN.get(name, {}))
        if name in FAULTS:
            plant(FAULTS[name], place)
        objectives = tuple(FAULTS[name].check) if name in FAULTS else OBJECTIVES
        lines = [
            [f"stages/{stage}.py", f"--objective={objective}"]
            for objective in objectives
            for stage in ("pretrain", "audit_run")
        ]
        cases[name] = (str(place), lines)
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_copies.py")), json.dumps(cases)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr

    def read(name: str, objective: str) -> dict[str, Any]:
        folder, lines = cases[name]
        told = (Path(folder) / "told.txt").read_text()
        statuses = json.loads((Path(folder) / "status.json").read_text())
        done = dict(zip((" ".join(line) for line in lines), statuses, strict=False))
        assert done.get(f"stages/pretrain.py --objective={objective}") == 0, told
        report = Path(folder) / "reports" / "audit_run" / objective / "metrics.json"
        assert report.is_file(), told
        status = done[f"stages/audit_run.py --objective={objective}"]
        return json.loads(report.read_text()) | {"status": status}

    return read


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_passes_all_checks(
    audits: Callable[[str, str], dict[str, Any]], name: str, objective: str
) -> None:
    found = audits(name, objective)
    assert [check for check in found["checks"] if check["verdict"] == "fail"] == []
    assert (found["status"], found["verdict"]) == (0, "pass")


@pytest.mark.parametrize(("name", "objective"), CASES)
def test_a_planted_fault_is_named_first_and_by_the_right_check(
    audits: Callable[[str, str], dict[str, Any]], name: str, objective: str
) -> None:
    found = audits(name, objective)
    failed = {x["name"]: x["measured"] for x in found["checks"] if x["verdict"] == "fail"}
    assert found["first_failure"] == FAULTS[name].check[objective], failed
    assert found["status"] == 1
