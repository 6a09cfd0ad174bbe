"""Are the values in params.yaml read as they are meant, and is a slip refused before work?"""

import importlib
import sys
from pathlib import Path
from typing import Literal, get_args

import pytest

import door
from canvaslm.errors import InputError
from canvaslm.params import Params, Switch, describe_knobs, load_section, read_yaml
from canvaslm.profiles import composed_profile

ROOT = Path(__file__).resolve().parents[2]
STAGES = sorted(
    file.stem for file in (ROOT / "stages").glob("*.py") if "params: PARAMS" in file.read_text()
)


class Knobs(Params):
    """A section with one knob of each type."""

    rate: float
    steps: int
    name: str
    compile: Switch


def knobs(tmp_path: Path, **changed: str) -> Knobs:
    values = {"rate": "0.5", "steps": "3", "name": "plain", "compile": "true"} | changed
    lines = "".join(f"  {key}: {value}\n" for key, value in values.items())
    file = tmp_path / "params.yaml"
    file.write_text(f"pretrain:\n{lines}")
    return load_section(file, "pretrain", Knobs)


def run_stage(name: str, params: Path, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a stage as its command does and return its exit status."""
    module = importlib.import_module(name)
    options = ["--objective", "diffusion"] if name in {"pretrain", "audit_run"} else []
    monkeypatch.setattr(sys, "argv", [f"stages/{name}.py", *options, "--params", str(params)])
    with pytest.raises(SystemExit) as left:
        door.main(getattr(module, name))
    return left.value.code


def test_the_committed_params_are_what_their_profile_composes_to() -> None:
    committed = (ROOT / "params.yaml").read_text()
    profile = read_yaml(ROOT / "params.yaml")["profile"]
    assert committed == composed_profile(profile, ROOT / "configs")
    assert committed.splitlines()[0] == f"profile: {profile}"


@pytest.mark.parametrize(
    ("written", "meant"), [("1e-4", 1e-4), ("3e-05", 3e-05), ("3e4", 3e4), ("1.0e-4", 1e-4)]
)
def test_a_number_with_an_exponent_is_a_number(tmp_path: Path, written: str, meant: float) -> None:
    assert knobs(tmp_path, rate=written).rate == meant


def test_a_leading_zero_means_nothing_and_on_is_text(tmp_path: Path) -> None:
    assert knobs(tmp_path, steps="010").steps == 10
    assert knobs(tmp_path, name="on").name == "on"


# BR-71
SWITCHED = {
    False: ["False", "false", "FALSE", "0", "no", "No", '"false"', '"0"', '"no"', '"False"'],
    True: ["True", "true", "TRUE", "1", "yes", "YES", '"true"', '"1"', '"yes"', '"True"'],
}


@pytest.mark.parametrize(
    ("written", "meant"), [(text, meant) for meant, texts in SWITCHED.items() for text in texts]
)
def test_a_switch_is_read_as_it_is_written(tmp_path: Path, written: str, meant: bool) -> None:
    assert knobs(tmp_path, compile=written).compile is meant


@pytest.mark.parametrize(
    "written", ["on", "off", "maybe", "null", "2", "-1", "0.0", "1.0", '""', '" true"', "[]", "{}"]
)
def test_what_is_no_switch_is_refused_in_one_line_and_never_true(
    tmp_path: Path, written: str
) -> None:
    with pytest.raises(InputError, match=r"pretrain\.compile: expected true .* or false") as caught:
        knobs(tmp_path, compile=written)
    assert "\n" not in str(caught.value)


def test_every_knob_that_is_on_or_off_is_a_switch() -> None:
    found = []
    for section, place in door.SECTIONS.items():
        module, _, name = place.partition(":")
        model = getattr(importlib.import_module(module), name)
        for knob, field in model.model_fields.items():
            if "bool" in str(field.annotation):
                assert field.metadata[:1] == list(get_args(Switch)[1:]), f"{section}.{knob}"
                found.append(f"{section}.{knob}")
    assert set(found) >= {"model.bias", "model.qk_norm", "pretrain.compile"}
    assert [row["type"] for row in describe_knobs(Knobs)][-1] == "true | false"


@pytest.mark.parametrize(
    ("key", "written"),
    [("steps", "3.0"), ("steps", '"3"'), ("steps", "true"), ("rate", "fast"), ("rate", ".nan"),
     ("rate", ".inf"), ("name", "3")],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_its_key(
    tmp_path: Path, key: str, written: str
) -> None:
    with pytest.raises(InputError) as caught:
        knobs(tmp_path, **{key: written})
    assert caught.value.where.endswith(f"params.yaml:pretrain.{key}")


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("learning_rate:", "leraning_rate:", ("pretrain.leraning_rate", "'learning_rate'")),
        ("eval_speedup:", "eval_spedup:", ("eval_spedup", "'eval_speedup'")),
        ("compile: false", "compile: maybe", ("pretrain.compile", "'maybe'")),
    ],
)
def test_every_stage_refuses_a_slip_anywhere_before_work(
    name: str,
    old: str,
    new: str,
    told: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "params.yaml").read_text()
    assert f" {old}" in text or f"\n{old}" in text
    params = tmp_path / "params.yaml"
    params.write_text(text.replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    assert run_stage(name, params, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in told)
    assert [file.name for file in tmp_path.iterdir()] == ["params.yaml"]


@pytest.mark.parametrize("words", [["--quiet", "False"], ["--quiet=False"], ["--quiet", "maybe"]])
def test_a_flag_on_the_command_line_takes_no_value(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(quiet: bool = False) -> None:
        raise AssertionError(f"ran with quiet={quiet}")

    monkeypatch.setattr(sys, "argv", ["stages/probe.py", *words])
    with pytest.raises(SystemExit) as left:
        door.main(probe)
    assert left.value.code == 2


@pytest.mark.parametrize("words", [["--dry-run", "False"], ["--dry-run=False"]])
def test_a_rehearsal_is_never_a_run_for_a_value_behind_its_flag(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stages/pretrain.py", "--objective", "diffusion", *words])
    with pytest.raises(SystemExit) as left:
        door.main(importlib.import_module("pretrain").pretrain)
    assert left.value.code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("word", "meant"), [("--quiet", True), ("--no-quiet", False)])
def test_a_flag_is_said_or_denied(
    word: Literal["--quiet", "--no-quiet"], meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def probe(quiet: bool = not meant) -> None:
        seen.append(quiet)

    monkeypatch.setattr(sys, "argv", ["stages/probe.py", word])
    with pytest.raises(SystemExit) as left:
        door.main(probe)
    assert (left.value.code, seen) == (0, [meant])
