"""Is a run looked at whole, without being touched, and is what is not there told as such?"""

import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from canvaslm.doctor.examination import PROBES, examine
from canvaslm.doctor.patient import Places
from canvaslm.doctor.probe import Finding
from canvaslm.doctor.table import HEADING, conclude, lay_out, lay_out_cells
from canvaslm.errors import GateClosedError, InputError

BOTH = ("diffusion", "autoregressive")


def look(places: Places) -> list[Finding]:
    """All findings but the last, that of the pages, which takes a while."""
    n_all = len(PROBES) + sum(probe.twin and not probe.is_shared for probe in PROBES)
    return list(itertools.islice(examine(places, BOTH, lambda text: None), n_all - 1))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("project", ["default", "plain"], indirect=True)
def test_a_clean_run_passes_every_probe_and_no_byte_of_it_changes(
    with_fingerprint: Places,
) -> None:
    folder, told = with_fingerprint.params.parent, []
    before = digests(folder)
    findings = list(examine(with_fingerprint, BOTH, told.append))
    assert [finding for finding in findings if finding.verdict != "pass"] == []
    assert digests(folder) == before
    assert told[0] == f"1/{len(findings)} {PROBES[0].section}"
    assert findings[-1].probe == PROBES[-1].name == "docs_cite_what_exists"
    assert {finding.probe for finding in findings} == {probe.name for probe in PROBES}
    assert conclude(findings) == f"nothing fails: {len(findings)} pass, 0 not measured"


def test_what_was_never_made_is_not_measured_with_the_command_that_makes_it(
    project: Places,
) -> None:
    folder = project.params.parent
    for name in ("work", "checkpoints", "reports"):
        shutil.rmtree(folder / name)
    trained = {f.probe: f for f in look(project) if f.objective == "diffusion"}
    assert {f.verdict for f in trained.values()} == {"pass", "not_measured"}
    assert trained["run_is_whole"].next_step == "dvc repro pretrain@diffusion"
    assert trained["resume_changes_no_bit"].measured == "rests on run_is_whole, which did not pass"
    assert trained["fresh_guess_adds_nothing"].verdict == "pass"
    shutil.rmtree(folder / "data")
    findings = look(project)
    assert {f.verdict for f in findings} == {"pass", "not_measured"}
    shards = next(f for f in findings if f.probe == "shards_are_whole")
    assert shards.next_step == "dvc repro audit_windows"


def test_a_run_that_has_not_ended_is_looked_at_from_its_newest_whole_checkpoint(
    project: Places,
) -> None:
    shutil.rmtree(project.checkpoints)
    shutil.rmtree(project.reports / "pretrain")
    findings = look(project)
    assert [f for f in findings if f.verdict == "fail"] == []
    loss = [f for f in findings if f.probe == "chunked_loss_is_the_loss"]
    assert all("step_00000005" in f.looked_at for f in loss)


def test_a_run_of_other_settings_is_found_by_what_it_has_in_common(
    project: Places, change_params: Callable[..., None]
) -> None:
    shutil.rmtree(project.checkpoints)
    change_params(project, "pretrain", seed=2)
    found = {f.probe: f for f in look(project) if f.objective == "autoregressive"}
    assert found["run_is_whole"].verdict == "pass"
    assert found["run_is_of_these_inputs"].verdict == "fail"
    assert "1 keys differ: pretrain.seed: 1 -> 2" in found["run_is_of_these_inputs"].measured


def test_the_first_failure_is_named_and_what_rests_on_it_is_not_carried_out(
    project: Places,
) -> None:
    (project.shards / "manifest.json").write_text("{")
    findings = look(project)
    rest = {f.probe for f in findings if f.verdict == "not_measured"}
    assert {"ids_are_in_range", "windows_fit", "shapes_agree", "run_is_whole"} <= rest
    with pytest.raises(GateClosedError) as closed:
        conclude(findings)
    assert "No shards, or an incomplete dataset: shards_are_whole" in str(closed.value)
    twin = next(f for f in findings if f.objective == "autoregressive")
    with pytest.raises(GateClosedError, match=r"No window fits \(autoregressive\): windows_fit"):
        conclude([dataclasses.replace(twin, verdict="fail")])
    assert "docs/guides/debugging.md#no-shards-or-an-incomplete-dataset" in str(closed.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"identity": 1}'])
@pytest.mark.parametrize(
    "place",
    [
        "checkpoints/diffusion/state.json",
        "checkpoints/diffusion/model.safetensors",
        "reports/pretrain/diffusion/metrics.json",
        "reports/pretrain/diffusion/loss.csv",
        "reports/code/pretrain.json",
        "data/shards/manifest.json",
        "data/tokenizer/tokenizer.json",
        "params.yaml",
        "work/steps.csv",
        "work/checkpoints/step_00000005/state.json",
    ],
)
def test_a_damaged_file_is_told_in_words_of_the_user(
    project: Places, place: str, content: bytes
) -> None:
    folder = project.params.parent
    path = folder / place
    if place.startswith("work/"):
        (path,) = (x for x in _runs_of_the_denoiser(project, place.removeprefix("work/")))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    before_arithmetic = [probe.name for probe in PROBES].index("equal_runs_agree")
    findings = []
    for finding in examine(project, ("diffusion",), lambda text: None):
        findings.append(finding)
        if finding.verdict == "fail" or len(findings) == before_arithmetic:
            break
    failed = [f for f in findings if f.verdict == "fail"]
    assert failed, findings
    assert not any("Error:" in f.measured for f in failed), failed
    assert all("\n" not in f.measured for f in failed)


def _runs_of_the_denoiser(places: Places, name: str) -> list[Path]:
    return [
        folder / name
        for folder in places.work.iterdir()
        if '"objective": "diffusion"'
        in (folder / "checkpoints" / "step_00000005" / "state.json").read_text()
    ]


def test_without_a_params_file_nothing_can_be_said(project: Places) -> None:
    project.params.unlink()
    with pytest.raises(InputError, match="make profile"):
        look(project)


def test_the_last_line_is_short_whatever_was_measured_and_ends_at_the_section() -> None:
    """The row above it holds all of it."""
    finding = Finding(
        probe="audit_passes",
        symptom="A training or an audit closed its gate",
        anchor="docs/guides/debugging.md#a-training-or-an-audit-closed-its-gate",
        objective="diffusion",
        looked_at="a report",
        measured="many words " * 100,
        verdict="fail",
        next_step="many tests " * 100,
    )
    with pytest.raises(GateClosedError) as closed:
        conclude([finding])
    assert len(str(closed.value)) < 560
    assert str(closed.value).endswith(f"read {finding.anchor}")


@pytest.mark.parametrize("width", [40, 100, 160])
def test_a_row_is_wrapped_in_its_cells_and_loses_no_word(width: int) -> None:
    finding = Finding(
        probe="windows_fit",
        symptom="No window fits, whatever the size of the window is",
        anchor="docs/guides/debugging.md#no-window-fits",
        objective="diffusion",
        looked_at="data/shards: both splits of it",
        measured="nothing is there yet of all that this would look at",
        verdict="not_measured",
        next_step="dvc repro audit_windows",
    )
    row = lay_out(finding, width=width)
    for text in (finding.symptom, finding.looked_at, finding.measured, finding.next_step):
        assert all(word in row for word in text.replace("/", " ").split())
    heading = lay_out_cells(HEADING, width=width)
    starts = [heading.index(name) for name in HEADING]
    assert row.splitlines()[0][starts[0] :].startswith("not_measured")
    assert row.splitlines()[0][starts[2] :].startswith("diffusion")
    if width > 100:
        assert max(map(len, row.splitlines())) <= width
