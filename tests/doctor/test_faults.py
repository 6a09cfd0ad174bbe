"""Does each probe fail on a fault that was planted for it, and is it named before all others?"""

import csv
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import canvaslm.checkpoint
import canvaslm.model.backbone
import canvaslm.run_audit.rehearsal
from canvaslm.corpus.fetch import hash_file
from canvaslm.doctor.examination import PROBES, examine
from canvaslm.doctor.outcomes import _course
from canvaslm.doctor.patient import Places
from canvaslm.doctor.probe import Finding
from canvaslm.doctor.table import conclude
from canvaslm.errors import GateClosedError
from canvaslm.model.kv_cache import KVCache
from canvaslm.model.self_conditioning import SelfConditioning
from canvaslm.reporting.files import write_json
from canvaslm.sampling.sampler import CanvasSampler
from canvaslm.scores import Scores

Change = Callable[..., None]
Patch = pytest.MonkeyPatch
HELD: list[int] = []


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    while HELD:
        os.close(HELD.pop())


def first_failure(places: Places, objective: Any = "diffusion") -> Finding:
    """The first finding that failed; what comes after it is not carried out."""
    findings = examine(places, (objective,), announce=lambda text: None)
    return next(finding for finding in findings if finding.verdict == "fail")


def misspell_a_knob(places: Places, change: Change, patch: Patch) -> None:
    change(places, "pretrain", lerning_rate=0.1)


def cut_a_shard(places: Places, change: Change, patch: Patch) -> None:
    shard = places.shards / "train" / "shard_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])


def flip_a_bit_of_a_shard(places: Places, change: Change, patch: Patch) -> None:
    shard = places.shards / "val" / "shard_00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)


def lose_the_manifest(places: Places, change: Change, patch: Patch) -> None:
    (places.shards / "manifest.json").unlink()


def pack_an_id_beyond_the_vocabulary(places: Places, change: Change, patch: Patch) -> None:
    """As a packer does that has another tokenizer: the manifest fits the bytes."""
    shard, manifest = places.shards / "train" / "shard_00000.bin", places.shards / "manifest.json"
    ids = np.fromfile(shard, dtype="<u2")
    ids[3] = 300
    ids.tofile(shard)
    content = json.loads(manifest.read_text())
    content["splits"]["train"][0]["sha256"] = hash_file(shard)
    write_json(manifest, content)


def ask_for_longer_windows_than_there_is_text(places: Places, change: Change, patch: Patch) -> None:
    change(places, "layout", canvases_per_window=1000)


def edit_the_code(places: Places, change: Change, patch: Patch) -> None:
    """The fingerprint is of the code before."""
    before = {"stage": "pretrain", "files": {}, "packages": {}, "digest": "0" * 64}
    write_json(places.reports / "code" / "pretrain.json", before)


def widen_the_params(places: Places, change: Change, patch: Patch) -> None:
    change(places, "model", width=32)


def take_the_memory_away(places: Places, change: Change, patch: Patch) -> None:
    patch.setattr("canvaslm.training.memory.available_bytes", lambda device: 1 << 20)


def hold_the_lock(places: Places, change: Change, patch: Patch) -> None:
    for lock in places.work.glob("*/lock"):
        lock.write_text("process 4711 started at 2024-05-01T00:00:00Z\n")
        HELD.append(os.open(lock, os.O_RDWR))
        fcntl.flock(HELD[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)


def flip_a_bit_of_a_checkpoint(places: Places, change: Change, patch: Patch) -> None:
    for file in places.work.glob("*/checkpoints/step_00000004/model.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def leave_half_a_final_checkpoint(places: Places, change: Change, patch: Patch) -> None:
    (places.checkpoints / "diffusion" / "optimizer.safetensors").unlink()


def damage_the_state_of_the_final_checkpoint(places: Places, change: Change, patch: Patch) -> None:
    state = places.checkpoints / "diffusion" / "state.json"
    state.write_text(state.read_text().replace('"step": 5', '"step": 6'))


def lose_a_step_of_the_log(places: Places, change: Change, patch: Patch) -> None:
    for log in places.work.glob("*/steps.csv"):
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join([*lines[:2], *lines[3:]]))


def cut_the_report_of_the_loss(places: Places, change: Change, patch: Patch) -> None:
    curve = places.reports / "pretrain" / "diffusion" / "loss.csv"
    curve.write_text("".join(curve.read_text().splitlines(keepends=True)[:-1]))


def have_gone_back(places: Places, change: Change, patch: Patch) -> None:
    report = places.reports / "pretrain" / "diffusion"
    metrics = json.loads((report / "metrics.json").read_text())
    write_json(report / "metrics.json", metrics | {"bad_steps": 5, "rollbacks": 1})
    states = places.work.glob("*/checkpoints/step_*/state.json")
    run = {
        path.parts[-4] for path in states if '"objective": "diffusion"' in path.read_text()
    }.pop()
    words = "the output of blocks.0 in the noisy stream"
    trace = {"run": run, "step": 3, "first_place": words}
    write_json(report / "nonfinite" / "trace.json", trace)


def be_stopped_by_the_gate(places: Places, change: Change, patch: Patch) -> None:
    """No bad step is counted in what is left, and the report says that the gate closed."""
    report = places.reports / "pretrain" / "diffusion" / "metrics.json"
    closed = {"verdict": "fail", "verdict_reason": "went back 4 times"}
    write_json(report, json.loads(report.read_text()) | closed)


def diverge(places: Places, change: Change, patch: Patch) -> None:
    """The rows fall, from 30 nats to 9; ln 280 is 5.6."""
    curve = places.reports / "pretrain" / "diffusion" / "loss.csv"
    rows = list(csv.DictReader(curve.read_text().splitlines()))
    with curve.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(row | {"loss_nats": str(max(30 - 12 * number, 9))})


def fail_the_audit(places: Places, change: Change, patch: Patch) -> None:
    report = places.reports / "audit_run" / "diffusion" / "metrics.json"
    check = {"verdict": "fail", "first_test": "look at the head"}
    closed = {"verdict": "fail", "verdict_reason": "head_is_tied: two tensors", "checks": [check]}
    write_json(report, json.loads(report.read_text()) | closed)


def draw_from_no_stream(places: Places, change: Change, patch: Patch) -> None:
    """Weights that a global generator makes a little different each time."""
    plain = canvaslm.run_audit.rehearsal.fresh_learner

    def fresh_learner(subject: Any) -> Any:
        learner = plain(subject)
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.add_(torch.rand_like(parameter), alpha=1e-6)
        return learner

    patch.setattr("canvaslm.doctor.arithmetic.fresh_learner", fresh_learner)


def change_a_knob_after_the_training(places: Places, change: Change, patch: Patch) -> None:
    change(places, "pretrain", weight_decay=0.05)


def lose_the_optimiser_on_resume(places: Places, change: Change, patch: Patch) -> None:
    plain = canvaslm.checkpoint._copy_into

    def copy_into(targets: dict[str, Any], stored: dict[str, Any]) -> None:
        plain({name: x for name, x in targets.items() if "exp_avg" not in name}, stored)

    patch.setattr("canvaslm.checkpoint._copy_into", copy_into)


def stretch_the_logits_of_a_chunk(places: Places, change: Change, patch: Patch) -> None:
    plain = Scores._scores
    patch.setattr(Scores, "_scores", lambda *arguments: plain(*arguments).mul_(1.01))


def add_the_guess_itself(places: Places, change: Change, patch: Patch) -> None:
    def forward(self: SelfConditioning, guess: Any, has_guess: Any) -> Any:
        return self.projection(guess) + guess

    patch.setattr(SelfConditioning, "forward", forward)


def let_a_canvas_read_its_answer(places: Places, change: Change, patch: Patch) -> None:
    """As ``>=`` for ``>`` does, where the clean copy is that of the canvas itself."""
    plain = canvaslm.model.backbone.canvas_attention

    def attend(*args: Any, canvas_tokens: int, start: int) -> Any:
        ahead = canvas_tokens if start == 0 else 0
        return plain(*args, canvas_tokens=canvas_tokens, start=start + ahead)

    patch.setattr("canvaslm.model.backbone.canvas_attention", attend)


def read_other_values_from_the_cache(places: Places, change: Change, patch: Patch) -> None:
    plain = KVCache.append

    def append(self: KVCache, layer: int, keys: Any, values: Any) -> Any:
        keys, values = plain(self, layer, keys, values)
        return keys, -values

    patch.setattr(KVCache, "append", append)


def decode_at_one_time_only(places: Places, change: Change, patch: Patch) -> None:
    plain = CanvasSampler._look
    patch.setattr(
        CanvasSampler, "_look", lambda self, state, cache, step: plain(self, state, cache, 0)
    )


def decode_without_a_guess(places: Places, change: Change, patch: Patch) -> None:
    patch.setattr(CanvasSampler, "_guess", lambda self, state: None)


def commit_another_canvas(places: Places, change: Change, patch: Patch) -> None:
    """What the cache is given is not what is told to be the text."""

    def commit(self: Any, live: Any, cache: Any, finished: Any, group: Any) -> None:
        self.model.encode((finished + 1) % 280, cache=cache)
        for row, ids in zip(live, finished.tolist(), strict=True):
            row.extend(ids, eot_id=self.eot_id, limit=group.limit)

    patch.setattr(CanvasSampler, "_commit", commit)


def cite_what_is_gone(places: Places, change: Change, patch: Patch) -> None:
    (places.root / "docs" / "gone.md").write_text("See `src/canvaslm/loss.py:gone`.\n")


FAULTS: dict[Callable[[Places, Change, Patch], None], tuple[str, str]] = {
    misspell_a_knob: ("params_are_valid", "lerning_rate"),
    cut_a_shard: ("shards_are_whole", "train/shard_00000.bin"),
    flip_a_bit_of_a_shard: ("shards_are_whole", "val/shard_00000.bin"),
    lose_the_manifest: ("shards_are_whole", "incomplete dataset"),
    pack_an_id_beyond_the_vocabulary: ("ids_are_in_range", "ids up to 300, vocabulary 280"),
    ask_for_longer_windows_than_there_is_text: ("windows_fit", "window of 4000 tokens"),
    edit_the_code: ("fingerprints_are_fresh", "pretrain"),
    widen_the_params: ("shapes_agree", "model.width: 16 -> 32"),
    take_the_memory_away: ("run_fits_into_memory", "0.00 GiB free"),
    hold_the_lock: ("nobody_trains_it", "process 4711"),
    flip_a_bit_of_a_checkpoint: ("run_is_whole", "step_00000004/model.safetensors"),
    leave_half_a_final_checkpoint: ("run_is_whole", "optimizer.safetensors"),
    damage_the_state_of_the_final_checkpoint: ("run_is_whole", "diffusion/state.json"),
    lose_a_step_of_the_log: ("run_is_whole", "steps.csv"),
    cut_the_report_of_the_loss: ("run_is_whole", "does not end at step 5"),
    have_gone_back: ("every_step_was_finite", "the output of blocks.0 in the noisy stream"),
    be_stopped_by_the_gate: ("training_kept_its_gate_open", "went back 4 times"),
    diverge: ("loss_is_plausible", "too high: "),
    fail_the_audit: ("audit_passes", "head_is_tied: two tensors"),
    draw_from_no_stream: ("equal_runs_agree", "parameters differ"),
    change_a_knob_after_the_training: ("run_is_of_these_inputs", "pretrain.weight_decay: 0.1 ->"),
    lose_the_optimiser_on_resume: ("resume_changes_no_bit", "optimizer_state_survives"),
    stretch_the_logits_of_a_chunk: ("chunked_loss_is_the_loss", "nats off by"),
    add_the_guess_itself: ("fresh_guess_adds_nothing", "values differ"),
    let_a_canvas_read_its_answer: ("answers_are_unseen", "own_clean_copy_is_unseen"),
    read_other_values_from_the_cache: ("cache_agrees_with_window", "cached_decoding_agrees"),
    decode_at_one_time_only: ("decoding_sees_what_training_sees", "time 1 instead of 0.667"),
    decode_without_a_guess: ("decoding_sees_what_training_sees", "no guess was given"),
    commit_another_canvas: ("decoding_sees_what_training_sees", "was read at position"),
    cite_what_is_gone: ("docs_cite_what_exists", "docs/gone.md:1"),
}


NEEDS_A_GUESS = (add_the_guess_itself, decode_without_a_guess)


@pytest.mark.parametrize(
    ("project", "plant"),
    [("plain" if plant in NEEDS_A_GUESS else "default", plant) for plant in FAULTS],
    ids=[plant.__name__ for plant in FAULTS],
    indirect=["project"],
)
def test_a_planted_fault_is_the_first_that_fails(
    project: Places,
    change_params: Change,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    plant: Callable[[Places, Change, Patch], None],
) -> None:
    probe, told = FAULTS[plant]
    if plant is cite_what_is_gone:
        shutil.copytree(project.root, tmp_path / "checkout")
        project = replace(project, root=tmp_path / "checkout")
    plant(project, change_params, monkeypatch)
    found = first_failure(project)
    assert (found.probe, found.verdict) == (probe, "fail"), found
    assert told in found.measured
    assert found.next_step
    with pytest.raises(GateClosedError, match=probe):
        conclude([found])


def test_after_a_closed_gate_nobody_is_told_that_nothing_was_trained_yet(
    project: Places, change_params: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no checkpoint left, the same command again would be stopped again."""
    be_stopped_by_the_gate(project, change_params, monkeypatch)
    shutil.rmtree(project.checkpoints)
    shutil.rmtree(project.work)
    findings = list(itertools.islice(examine(project, ("diffusion",), lambda text: None), 13))
    told = {finding.probe: finding for finding in findings}
    assert "stopped by its gate" in told["run_is_whole"].measured
    assert told["run_is_whole"].next_step == "see training_kept_its_gate_open"
    assert told["training_kept_its_gate_open"].verdict == "fail"


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([5, 4, 3, 3, 4, 5], "it rises: "),
        ([5, 5, 5, 5, 5, 5], "it does not fall: "),
        ([5, 4, 4, 3, 3, 3], ""),
        ([5, 6, 7], ""),
    ],
)
def test_the_course_of_a_loss_is_told(losses: list[float], told: str) -> None:
    rows = [{"step": str(50 * n), "loss_nats": str(x)} for n, x in enumerate(losses, start=1)]
    course, remedy = _course(rows)
    assert course.startswith(told)
    for rate in ("pretrain.learning_rate", "pretrain.muon_learning_rate"):
        assert bool(course) == bool(told) == (rate in remedy)


def test_a_trace_of_another_run_says_nothing_of_this_one(project: Places) -> None:
    """DVC puts back the reports of an earlier training, and not what it never knew of."""
    report = project.reports / "pretrain" / "diffusion" / "nonfinite" / "trace.json"
    write_json(report, {"run": "0123456789abcdef", "step": 1, "first_place": "elsewhere"})
    for found in examine(project, ("diffusion",), lambda text: None):
        if found.probe == "every_step_was_finite":
            assert found.verdict == "pass", found
            break
    else:
        pytest.fail("no probe looked")


def test_an_audit_of_another_model_says_nothing_of_this_one(project: Places) -> None:
    report = project.reports / "audit_run" / "diffusion" / "metrics.json"
    write_json(report, {"verdict": "fail", "trained_model_sha256": "0" * 64})
    findings = {x.probe: x for x in examine(project, ("diffusion",), lambda text: None)}
    assert findings["audit_passes"].verdict == "not_measured"
    assert "is about another model" in findings["audit_passes"].measured


def test_knobs_that_were_changed_after_the_training_are_trained_with_by_make_repro(
    project: Places, change_params: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_a_knob_after_the_training(project, change_params, monkeypatch)
    found = first_failure(project)
    assert "`make repro`" in found.next_step
    assert "--fork" not in found.next_step


def read_no_end_of_text_before_a_prompt(places: Places, change: Change, patch: Patch) -> None:
    plain = torch.nn.functional.pad
    patch.setattr(
        "canvaslm.sampling.autoregressive.functional.pad",
        lambda ids, widths, value: plain(ids, widths, value=7),
    )


def let_a_token_read_itself(places: Places, change: Change, patch: Patch) -> None:
    """As a mask that is off by one does: a token sees the one that follows it."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2] + 1).bool(),
            enable_gqa=True,
        )  # fmt: skip

    patch.setattr("canvaslm.model.backbone.causal_attention", attend)


TWIN_FAULTS: dict[Callable[[Places, Change, Patch], None], tuple[str, str]] = {
    flip_a_bit_of_a_checkpoint: ("run_is_whole", "step_00000004/model.safetensors"),
    lose_the_optimiser_on_resume: ("resume_changes_no_bit", "optimizer_state_survives"),
    let_a_token_read_itself: ("answers_are_unseen", "later_tokens_are_unseen"),
    read_no_end_of_text_before_a_prompt: (
        "decoding_sees_what_training_sees",
        "id 7 was read at position 0 for 279",
    ),
}


@pytest.mark.parametrize("plant", TWIN_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_twin_is_the_first_that_fails(
    project: Places,
    change_params: Change,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Places, Change, Patch], None],
) -> None:
    probe, told = TWIN_FAULTS[plant]
    plant(project, change_params, monkeypatch)
    found = first_failure(project, "autoregressive")
    assert (found.probe, found.objective) == (probe, "autoregressive"), found
    assert told in found.measured


def test_each_probe_has_a_fault_that_it_was_seen_to_find() -> None:
    assert {probe for probe, _ in FAULTS.values()} == {probe.name for probe in PROBES}
