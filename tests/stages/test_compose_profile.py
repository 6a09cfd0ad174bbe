import sys
from pathlib import Path

import pytest

import door
from canvaslm.params import read_yaml
from compose_profile import compose_profile

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, **options: object) -> int | str | None:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["stages/compose_profile.py", *words])
    with pytest.raises(SystemExit) as left:
        door.main(compose_profile)
    return left.value.code


def test_the_params_file_is_the_profile_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "params.yaml"
    assert run(monkeypatch, name="ci", configs=ROOT / "configs", out=out) == 0
    assert read_yaml(out)["profile"] == "ci"


def test_a_value_that_no_stage_would_take_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text((ROOT / "configs" / "base.yaml").read_text())
    (tmp_path / "mine.yaml").write_text("profile: mine\npretrain:\n  steps: many\n")
    out = tmp_path / "params.yaml"
    assert run(monkeypatch, name="mine", configs=tmp_path, out=out) == 2
    assert "pretrain.steps" in capsys.readouterr().err


def test_an_unknown_profile_leaves_the_params_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "params.yaml"
    out.write_text("profile: old\n")
    assert run(monkeypatch, name="huge", configs=ROOT / "configs", out=out) == 2
    assert out.read_text() == "profile: old\n"
