"""Do all benches measure under the same conditions, and write what they found?"""

import argparse
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import harness

from canvaslm.reporting.benches import read_bench

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def begun(tmp_path: Path, *words: str) -> argparse.Namespace:
    options = harness.parser("Is it fast?", "example").parse_args(
        ["--tiny", "--out", str(tmp_path / "example.json"), *words]
    )
    harness.begin(options)
    return options


def test_what_was_found_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = begun(tmp_path, "--rounds", "3")
    rows = [{"form": "ours", "median_s": 0.5}, {"form": "theirs", "median_s": None}]
    harness.finish(
        options,
        rows=rows,
        ratios={"example/ours": 1.25, "example/theirs": None},
        not_measured={"example/theirs": "it was asleep"},
        fallbacks=["flex attention, to a mask"],
    )
    written = read_bench(tmp_path / "example.json")
    assert written.rows == rows
    assert written.ratios == {"example/ours": 1.25, "example/theirs": None}
    assert (written.rounds, written.tiny, written.threads) == (3, True, 1)
    assert written.machine["threads"] == 1
    assert written.versions["torch"] == torch.__version__
    assert "flex attention, to a mask" in written.fallbacks
    shown = capsys.readouterr().out
    for text in ("ours", "1.25", "it was asleep", "flex attention", "figures mean nothing"):
        assert text in shown


def test_a_ratio_without_a_figure_or_a_reason_is_not_written(tmp_path: Path) -> None:
    options = begun(tmp_path)
    with pytest.raises(ValidationError, match="a reason in not_measured for example/theirs"):
        harness.finish(options, rows=[], ratios={"example/theirs": None})
    assert not (tmp_path / "example.json").exists()


def test_an_absent_peer_is_not_measured_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = begun(tmp_path)
    assert harness.peer("no_such_peer.models") is None
    harness.finish(options, rows=[], ratios={"example/over_no_such_peer": None})
    written = read_bench(tmp_path / "example.json")
    assert "canvaslm[bench]" in written.not_measured["no_such_peer"]
    assert "not measured: no_such_peer" in " ".join(capsys.readouterr().out.split())


def test_a_peer_that_refuses_the_machine_is_not_measured_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peer_that_refuses.py").write_text("raise RuntimeError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = begun(tmp_path)
    assert harness.peer("peer_that_refuses") is None
    harness.finish(options, rows=[], ratios={})
    assert "no driver" in read_bench(options.out).not_measured["peer_that_refuses"]


def test_a_peer_that_is_there_is_named_with_its_version(tmp_path: Path) -> None:
    options = begun(tmp_path)
    assert harness.peer("safetensors.torch") is not None
    harness.finish(options, rows=[], ratios={})
    assert read_bench(options.out).versions["safetensors"]


def test_what_another_bench_noted_is_forgotten_at_the_beginning(tmp_path: Path) -> None:
    begun(tmp_path)
    harness.peer("no_such_peer")
    harness.peer("safetensors")
    options = begun(tmp_path)
    harness.finish(options, rows=[], ratios={})
    written = read_bench(options.out)
    assert (written.not_measured, set(written.versions)) == ({}, {"torch"})


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ((), "reports/bench/example.json"),
        (("--threads", "2"), "reports/bench/example_threads2.json"),
        (("--tiny",), "reports/bench/tiny/example.json"),
    ],
)
def test_each_kind_of_run_has_a_file_of_its_own(words: tuple[str, ...], file: str) -> None:
    options = harness.parser("Is it fast?", "example").parse_args(words)
    harness.begin(options)
    assert options.out == Path(file)
    assert torch.get_num_threads() == options.threads


@pytest.mark.parametrize("words", [("--threads", "0"), ("--rounds", "-1")])
def test_no_threads_and_no_rounds_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        harness.parser("Is it fast?", "example").parse_args(words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_computes_and_counts(dtype: torch.dtype) -> None:
    run, flops = harness.product_run(dtype, size=64)
    first, second = run(), run()
    assert isinstance(first, torch.Tensor)
    assert first is second, "a new buffer would be timed with the product"
    assert (first.shape, first.dtype, flops) == ((64, 64), dtype, 2 * 64**3)
    assert first.isfinite().all()
    assert first.abs().sum() > 0


def test_progress_is_drawn_by_no_thread_and_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    n_threads = threading.active_count()
    seen = []
    for item in harness.track("abc", total=3, label="shapes"):
        assert threading.active_count() == n_threads
        seen.append(item)
    assert seen == ["a", "b", "c"]
    told = capsys.readouterr()
    assert told.out == ""
    assert "3/3" in told.err


@pytest.mark.slow
def test_memory_of_a_fresh_process_counts_the_work_and_not_what_was_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work_in_memory.py").write_text(
        "import torch\n"
        "def prepare(n_bytes):\n"
        "    kept, freed = torch.ones(2 * n_bytes, dtype=torch.int8), torch.ones(4 * n_bytes)\n"
        "    return lambda: torch.ones(n_bytes, dtype=torch.int8)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    n_bytes = 30_000_000
    found = harness.fresh_peak_bytes("work_in_memory:prepare", {"n_bytes": n_bytes})
    # The last page of the work may have been there before.
    assert found is None or 0.99 * n_bytes < found < 1.2 * n_bytes


@pytest.mark.slow
def test_work_that_fails_in_a_fresh_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work_that_fails.py").write_text("def prepare():\n    return lambda: 1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        harness.fresh_peak_bytes("work_that_fails:prepare", {})


@pytest.mark.parametrize("name", ["loss", "step"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "w526"], "--only: expected"),
        (["--tiny", "--only", "w256"], "--only: expected full sizes, got --tiny"),
        (["--out", "/"], "/: expected a file to write, got a directory"),
        (["--threads", "1000000000000"], "a number from 1 to 1000 is expected"),
    ],
)
def test_what_a_bench_cannot_do_is_told_before_it_measures(
    name: str, words: list[str], told: str, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / f"bench/{name}.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, list(tmp_path.iterdir())) == (2, [])
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_bench_measures_the_checkout_that_it_lies_in() -> None:
    """Whichever checkout the environment was installed from."""
    for file in (ROOT / "bench").glob("*.py"):
        lines = file.read_text().splitlines()
        ours, first = _lines_with(lines, "canvaslm"), _lines_with(lines, "harness")
        assert not (ours and first) or first[0] < ours[0], file


def _lines_with(lines: list[str], module: str) -> list[int]:
    starts = f"from {module}", f"import {module}"
    return [n for n, line in enumerate(lines) if line.startswith(starts)]


def test_ctrl_c_ends_a_bench_with_one_line() -> None:
    code = (
        "import argparse, harness;"
        "harness.begin(harness.parser(None, 'example').parse_args(['--tiny']));"
        "raise KeyboardInterrupt"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "bench",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert ran.stderr == "stopped; nothing was written\n"
