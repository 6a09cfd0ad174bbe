import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import door
from canvaslm.reporting.files import write_json
from check_floor import check_floor

Run = Callable[..., int | str | None]


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A corpus whose held-out texts cost 1.2 nats per byte, half a token to a byte."""
    cost = {"train": 1.21, "val": 1.2}
    _write(tmp_path, "collect_documents", chain_nats_per_byte=cost, text_bytes={"val": 1000})
    _write(
        tmp_path,
        "eval_loss_parity",
        autoregressive={"nats_per_token": 2.42, "standard_error_nats": 0.01},
        diffusion={"bound_nats_per_token": 3.0, "standard_error_nats": 0.02},
        n_text_bytes=990,
        n_tokens=495,
    )
    return tmp_path


@pytest.fixture
def run(reports: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def ran(*more: str) -> int | str | None:
        options = ["--n-errors", "3", "--max-twin-ratio", "1.05", "--reports", str(reports)]
        monkeypatch.setattr(sys, "argv", ["stages/check_floor.py", *options, *more])
        with pytest.raises(SystemExit) as left:
            door.main(check_floor)
        return left.value.code

    return ran


def _write(folder: Path, report: str, **values: Any) -> None:
    path = folder / report / "metrics.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    for key, value in values.items():
        merged = isinstance(value, dict) and isinstance(old.get(key), dict)
        old[key] = old[key] | value if merged else value
    write_json(path, old)


def test_losses_above_the_floor_pass_and_are_told_per_byte(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    twin, bound = capsys.readouterr().out.splitlines()
    assert twin.startswith("twin: 1.2100 nats per byte, 1.0083 of the floor 1.2000, +0.0100 ± 0.00")
    assert bound.startswith("bound: 1.5000 nats per byte, 1.2500 of the floor 1.2000")


@pytest.mark.parametrize(
    ("model", "key", "margin"),
    [
        ("autoregressive", "nats_per_token", 0.03),
        ("diffusion", "bound_nats_per_token", 0.06),
    ],
)
def test_a_loss_below_the_floor_closes_the_gate_and_chance_does_not(
    run: Run, reports: Path, capsys: pytest.CaptureFixture[str], model: str, key: str, margin: float
) -> None:
    _write(reports, "eval_loss_parity", **{model: {key: 2.4 - 0.99 * margin}})
    assert run() == 0
    _write(reports, "eval_loss_parity", **{model: {key: 2.4 - 1.01 * margin}})
    assert run() == 1
    name = {"autoregressive": "twin", "diffusion": "bound"}[model]
    told = f"gate closed: {name} is more than 3 standard errors below the floor, which is a leak"
    assert capsys.readouterr().err.splitlines()[-1] == told


def test_a_twin_that_has_learned_too_little_closes_the_gate(
    run: Run, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(reports, "eval_loss_parity", autoregressive={"nats_per_token": 2.4 * 1.06})
    assert run() == 1
    assert "twin is more than 1.05 times the floor" in capsys.readouterr().err
    assert run("--max-twin-ratio", "1.07") == 0


@pytest.mark.parametrize(
    ("report", "values", "told"),
    [
        ("collect_documents", {"chain_nats_per_byte": "not_measured"}, "a corpus whose law is"),
        ("collect_documents", {"chain_nats_per_byte": {"val": -1.0}}, "greater than 0"),
        ("eval_loss_parity", {"autoregressive": {"nats_per_token": None}}, "nats_per_token"),
        ("eval_loss_parity", {"diffusion": {"standard_error_nats": None}}, "standard_error_nats"),
        ("eval_loss_parity", {"n_text_bytes": 900}, "max_windows: null"),
        ("eval_loss_parity", {"n_text_bytes": 1001}, "the 1000 bytes of held-out text"),
    ],
)
def test_reports_that_say_nothing_of_a_floor_are_bad_input(
    run: Run,
    reports: Path,
    capsys: pytest.CaptureFixture[str],
    report: str,
    values: dict[str, Any],
    told: str,
) -> None:
    _write(reports, report, **values)
    assert run() == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert told in shown[0]


@pytest.mark.parametrize("report", ["collect_documents", "eval_loss_parity"])
@pytest.mark.parametrize("content", [None, "{"])
def test_a_report_that_is_missing_or_damaged_is_bad_input(
    run: Run, reports: Path, report: str, content: str | None
) -> None:
    path = reports / report / "metrics.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert run() == 2


def test_limits_must_be_given(monkeypatch: pytest.MonkeyPatch, reports: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["stages/check_floor.py", "--reports", str(reports)])
    with pytest.raises(SystemExit) as left:
        door.main(check_floor)
    assert left.value.code == 2
