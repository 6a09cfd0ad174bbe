"""Does dvc.yaml declare what the stages read and write, and do names agree?"""

import ast
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canvaslm.code_fingerprint import fingerprint
from canvaslm.params import read_yaml

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {  # stages/ that no pipeline runs
    "door",
    "ablate",
    "check_floor",
    "clear_runs",
    "compose_profile",
    "doctor",
    "generate",
    "list_knobs",
    "mend",
    "print_verdicts",
    "take_snapshot",
    "write_performance",
}
SHARED_SECTIONS = {"profile", "layout", "model", "diffusion", "generate"}
PIPELINE: dict[str, Any] = read_yaml(ROOT / "dvc.yaml")["stages"]


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "stages" / f"{name}.py").read_text())


def sections_read(tree: ast.Module) -> set[str]:
    """Sections that a stage names: load_section(_, "x", _) and read_yaml(params)["x"]."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load_section"):
            name = node.args[1]
            assert isinstance(name, ast.Constant), ast.unparse(node)
            found.add(str(name.value))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith(
            "read_yaml(params"
        ):
            assert isinstance(node.slice, ast.Constant), ast.unparse(node)
            found.add(str(node.slice.value))
    return found


def listed(stage: dict[str, Any], *keys: str) -> set[str]:
    entries = [entry for key in keys for entry in stage.get(key, [])]
    return {next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries}


def undeclared(name: str, stage: dict[str, Any]) -> Iterator[str]:
    """Sections that a stage reads and dvc.yaml does not say, and the reverse."""
    declared, read = listed(stage, "params"), sections_read(tree_of(name))
    yield from (f"params: {section} is read, not declared" for section in read - declared)
    yield from (f"params: {section} is declared, not read" for section in declared - read)


@pytest.mark.parametrize("name", PIPELINE)
def test_a_stage_declares_the_sections_that_it_reads(name: str) -> None:
    assert list(undeclared(name, PIPELINE[name])) == []


@pytest.mark.parametrize("name", PIPELINE)
def test_a_section_too_few_or_too_many_is_noticed(name: str) -> None:
    sections = PIPELINE[name].get("params", [])
    for section in sections:
        without = [other for other in sections if other != section]
        assert list(undeclared(name, PIPELINE[name] | {"params": without})), section
    assert list(undeclared(name, PIPELINE[name] | {"params": [*sections, "other"]}))


def _defaults(name: str) -> dict[str, str]:
    """The paths that a stage's options have when nothing is said."""
    (function,) = (
        node
        for node in tree_of(name).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    plain = function.args.args
    pairs = zip(plain[::-1], function.args.defaults[::-1], strict=False)
    return {
        argument.arg: ast.literal_eval(default.args[0])
        for argument, default in pairs
        if isinstance(default, ast.Call) and default.args
    }


@pytest.mark.parametrize("name", PIPELINE)
def test_a_stage_started_by_hand_looks_where_the_pipeline_does(name: str) -> None:
    """Its defaults are what dvc.yaml declares, to which its command adds nothing else."""
    known = listed(PIPELINE[name], "deps", "outs", "metrics")
    for option, path in _defaults(name).items():
        if option not in {"params", "reports"}:
            assert any(
                f"{entry}/".startswith(f"{path}/") or path.startswith(f"{entry}/")
                for entry in known
            ), option


def test_one_word_names_stage_file_section_report_and_test() -> None:
    files = {file.stem for file in (ROOT / "stages").glob("*.py")}
    assert files - OUTSIDE == set(PIPELINE)
    sections = set(read_yaml(ROOT / "params.yaml")) - SHARED_SECTIONS
    assert sections == set(PIPELINE) - {"fingerprint_code"}
    for name, stage in PIPELINE.items():
        assert stage["cmd"].split()[:2] == ["python", f"stages/{name}.py"]
        for metrics in listed(stage, "metrics"):
            assert metrics.startswith(f"reports/{name}/"), metrics
            assert metrics.endswith("/metrics.json"), metrics
        assert (ROOT / "tests" / "stages" / f"test_{name}.py").is_file(), name


def test_outs_are_plain_and_metrics_stand_in_git() -> None:
    for name, stage in PIPELINE.items():
        assert all(isinstance(out, str) for out in stage.get("outs", [])), name
        for metrics in stage.get("metrics", []):
            assert list(metrics.values()) == [{"cache": False}], name


def test_figures_that_a_clock_made_are_no_outs() -> None:
    assert not [
        out for stage in PIPELINE.values() for out in listed(stage, "outs") if "timing" in out
    ]


def test_only_the_pair_of_objectives_is_a_matrix() -> None:
    matrices = {name: stage["matrix"] for name, stage in PIPELINE.items() if "matrix" in stage}
    pair = {"objective": ["diffusion", "autoregressive"]}
    assert matrices == {"pretrain": pair, "audit_run": pair}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("src", "stages"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    return tmp_path


def digests(checkout: Path, *names: str) -> list[str]:
    return [fingerprint(checkout / "stages" / f"{x}.py", checkout)["digest"] for x in names]


@pytest.mark.parametrize("name", sorted(set(PIPELINE) - {"fingerprint_code"}))
def test_an_edit_of_an_imported_module_reruns_the_stage_and_a_comment_does_not(
    checkout: Path, name: str
) -> None:
    (before,) = digests(checkout, name)
    reached = fingerprint(checkout / "stages" / f"{name}.py", checkout)["files"]
    module = checkout / max(file for file in reached if re.match(r"src/.*[a-z]\.py$", file))
    text = module.read_text()
    module.write_text(f"{text}\n# a comment\n")
    assert digests(checkout, name) == [before]
    module.write_text(f"{text}\nadded = 1\n")
    assert digests(checkout, name) != [before]


def test_an_edit_of_the_sampler_reruns_what_decodes_and_no_training(checkout: Path) -> None:
    stages = ("eval_speedup", "eval_samples", "pretrain", "pack_shards")
    before = digests(checkout, *stages)
    sampler = checkout / "src/canvaslm/sampling/sampler.py"
    sampler.write_text(f"{sampler.read_text()}\nadded = 1\n")
    after = digests(checkout, *stages)
    assert [old != new for old, new in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
