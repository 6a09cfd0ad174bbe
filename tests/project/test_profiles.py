"""Does every profile make a params file that all stages accept?"""

from pathlib import Path

import pytest

import door
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams, count_parameters
from canvaslm.params import load_section, read_yaml
from canvaslm.profiles import composed_profile
from canvaslm.training.plan import PretrainParams

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml") if file.stem != "base")


def compose_into(folder: Path, profile: str, configs: Path = ROOT / "configs") -> Path:
    file = folder / "params.yaml"
    file.write_text(composed_profile(profile, configs))
    return file


def test_the_profiles_are_the_five_that_the_docs_name() -> None:
    assert PROFILES == ["ablation", "ci", "cpu_small", "gpu_343m", "laptop", "markov"]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_section_of_a_profile_fits_its_model(tmp_path: Path, profile: str) -> None:
    door.validate_params(compose_into(tmp_path, profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_changes_only_values_and_keeps_every_key(tmp_path: Path, profile: str) -> None:
    composed = read_yaml(compose_into(tmp_path, profile))
    base = read_yaml(ROOT / "configs" / "base.yaml")
    overrides = read_yaml(ROOT / "configs" / f"{profile}.yaml")
    assert list(composed) == list(base)
    for section, values in base.items():
        if isinstance(values, dict):
            assert list(composed[section]) == list(values)
            assert composed[section] == values | overrides.get(section, {})
    assert composed["profile"] == profile
    assert (tmp_path / "params.yaml").read_text().startswith(f"profile: {profile}\n")


def test_the_production_profile_has_the_parameters_that_it_says(tmp_path: Path) -> None:
    file = compose_into(tmp_path, "gpu_343m")
    layout = load_section(file, "layout", Layout)
    model = load_section(file, "model", ModelParams)
    assert (layout.canvas_tokens, layout.window_tokens) == (256, 4096)
    assert count_parameters(model, layout) == 343_516_160


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("profile: mine\npretrain:\n  stesp: 3\n", "steps"),
        ("profile: mine\npretrian:\n  steps: 3\n", "pretrain"),
        ("profile: mine\npretrain: 3\n", "a mapping"),
        ("profile: mine\nlayout:\n  vocab_size:\n    big: 3\n", "a single value"),
        ("profile: another\n", "the name of its file"),
    ],
)
def test_an_override_that_fits_no_key_is_refused(tmp_path: Path, overrides: str, told: str) -> None:
    (tmp_path / "base.yaml").write_text((ROOT / "configs" / "base.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(overrides)
    with pytest.raises(InputError, match=told):
        composed_profile("mine", tmp_path)


def test_a_profile_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match="ablation, ci, cpu_small, gpu_343m, laptop, markov"):
        composed_profile("huge", ROOT / "configs")


@pytest.mark.parametrize(
    "written", ["0.00000001", "1e16", "1.5e-7", "on", "no", '"010"', "null", "[a, 3, 0.5]", "true",
                '"true"', "''", "~", '"1e-5"', "'*.txt'", "<|x|>"],
)  # fmt: skip
def test_a_value_is_read_back_as_it_was_whatever_it_looks_like(
    tmp_path: Path, written: str
) -> None:
    (tmp_path / "base.yaml").write_text(f"profile: x\nroom:\n  knob: {written}\n  other: 1\n")
    (tmp_path / "mine.yaml").write_text("profile: mine\nroom:\n  other: 2\n")
    before = read_yaml(tmp_path / "base.yaml")
    after = read_yaml(compose_into(tmp_path, "mine", tmp_path))
    assert after["room"] == before["room"] | {"other": 2}
    assert type(after["room"]["knob"]) is type(before["room"]["knob"])


def test_the_production_run_reads_7995392000_tokens(tmp_path: Path) -> None:
    file = compose_into(tmp_path, "gpu_343m")
    layout = load_section(file, "layout", Layout)
    plan = load_section(file, "pretrain", PretrainParams)
    assert plan.steps * plan.windows_per_step * layout.window_tokens == 7_995_392_000
