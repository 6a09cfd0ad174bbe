from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from canvaslm.ablation.arms import as_overrides, find_arms, find_trials
from canvaslm.ablation.spec import BOUND, read_spec, with_changes
from canvaslm.errors import InputError
from canvaslm.params import read_yaml

ROOT = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {
    "id": "context",
    "question": "Which context?",
    "hypothesis": "The clean one.",
    "profile": "ci",
    "overrides": {"pretrain.steps": 40},
    "varies": "diffusion.context",
    "follows": {"model.clean_mask": "one stream is block-causal"},
    "arms": {"clean": {}, "noisy": {"diffusion.context": "noisy", "model.clean_mask": "block"}},
    "baseline": "clean",
    "reference_lengths": {"half": {"pretrain.steps": 20}},
    "seeds": [1, 2, 3],
    "decision": {"paired_interval_excludes": 0.02, "confidence": 0.95},
    "timing": {"steps": 8, "rounds": 3, "warmup_rounds": 1},
    "does_not_establish": ["Anything else."],
}


def lay(root: Path, **changes: Any) -> Path:
    """A repository of nothing but profiles and one ablation."""
    (root / "docs/ablations").mkdir(parents=True, exist_ok=True)
    if not (root / "configs").exists():
        (root / "configs").symlink_to(ROOT / "configs")
    with (root / "docs/ablations/context.yaml").open("w") as file:
        YAML().dump(PLAIN | changes, file)
    return root


def test_what_is_not_said_is_the_bound_paired_by_document(tmp_path: Path) -> None:
    spec = read_spec(lay(tmp_path), "context")
    assert spec.measure == BOUND
    assert (spec.targets, spec.guarded) == (["eval_loss_parity"], ["eval_loss_parity", "pretrain"])


def test_other_reports_bring_their_own_stage_and_code(tmp_path: Path) -> None:
    file = "reports/eval_speedup/metrics.json"
    also = [{"file": file, "key": "rows.fixed_16.tokens_per_second", "better": "higher"}]
    also += [{"file": "reports/pretrain/diffusion/metrics.json", "key": "x", "better": "lower"}]
    spec = read_spec(lay(tmp_path, also=also), "context")
    assert spec.targets == ["eval_loss_parity", "eval_speedup", "pretrain@diffusion"]
    assert spec.guarded == ["eval_loss_parity", "eval_speedup", "pretrain"]


def test_arms_differ_from_the_profile_by_what_is_stated_and_nothing_else(tmp_path: Path) -> None:
    spec = read_spec(lay(tmp_path), "context")
    arms = find_arms(tmp_path, spec)
    profile = as_overrides(arms["clean"].params, read_yaml(ROOT / "params.yaml"))
    assert "profile=ci" in profile
    assert "pretrain.steps=40" in profile
    clean = arms["clean"].params
    assert as_overrides(arms["noisy"].params, clean) == [
        "diffusion.context=noisy",
        "model.clean_mask=block",
    ]
    assert as_overrides(arms["half"].params, clean) == ["pretrain.steps=20"]
    trials = find_trials(arms, spec)
    assert [trial.name for trial in trials[:4]] == [
        "context-clean-s1",
        "context-noisy-s1",
        "context-half-s1",
        "context-clean-s2",
    ]
    assert [trial.params["pretrain"]["seed"] for trial in trials] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"id": "other"}, r"context.yaml:id: expected 'context', got 'other'"),
        ({"baseline": "dirty"}, "baseline: expected one of clean, noisy"),
        ({"seeds": [1, 1]}, "seeds that differ"),
        ({"arms": {"clean": {}, "noisy": {"diffusion.context": "noisy", "model.bias": False}}},
         r"arms.noisy: expected values of diffusion.context, model.clean_mask alone.*model.bias"),
        ({"arms": {"clean": {}, "noisy": {"model.clean_mask": "block"}}},
         r"arms.noisy: expected a value of diffusion.context, got none"),
        ({"arms": {"clean": {}, "Noisy!": {"diffusion.context": "noisy"}}}, "small letters"),
        ({"overrides": {"diffusion.context": "clean"}}, r"overrides.diffusion.context.*`varies`"),
        ({"overrides": {"pretrain.seed": 1}}, r"overrides.pretrain.seed.*`seeds`"),
        ({"varies": "pretrain.seed", "arms": {"clean": {}, "noisy": {"pretrain.seed": 3}}},
         "of which `seeds` has the values"),
        ({"reference_lengths": {"half": {"pretrain.steps": 20, "model.width": 8}}},
         r"reference_lengths.half: .* got model.width"),
        ({"reference_lengths": {"half": {"pretrain.warmup_steps": 1}}},
         "a value of pretrain.steps"),
        ({"reference_lengths": {"noisy": {"pretrain.steps": 20}}}, "names that differ"),
        ({"seed": [1]}, r"a known key, got 'seed'"),
        ({"does_not_establish": []}, "does_not_establish"),
        ({"decision": {"paired_interval_excludes": 0.02, "confidence": 95}}, "confidence"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused_where_it_does_not(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        read_spec(lay(tmp_path, **changes), "context")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"overrides": {"pretrain.stesp": 3}}, "did you mean 'pretrain.steps'"),
        ({"overrides": {"profile": "ci"}}, "a key of params.yaml"),
        ({"follows": {"model.clean_maks": "x", "model.clean_mask": "y"}}, "model.clean_mask'"),
        ({"arms": {"clean": {}, "noisy": {"diffusion.context": "clean"}}}, "got those of clean"),
        ({"profile": "huge"}, "expected a profile"),
    ],
)
def test_keys_and_profiles_that_are_none_and_arms_that_are_one_are_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    spec = read_spec(lay(tmp_path, **changes), "context")
    with pytest.raises(InputError, match=told):
        find_arms(tmp_path, spec)


def test_an_ablation_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are context"):
        read_spec(lay(tmp_path), "contxt")


@pytest.mark.parametrize(
    ("key", "value"),
    [("pretrain.learning_rate", 1e-05), ("pretrain.learning_rate", 3.0), ("pretrain.seed", 7),
     ("model.bias", False), ("collect_documents.max_documents", 3), ("eval_speedup.evidence", "x"),
     ("eval_loss_parity.max_windows", None), ("fetch_corpus.pattern", "**/*.txt"),
     ("fetch_corpus.text_field", "true"), ("train_tokenizer.end_of_text", "<|end, of|>"),
     ("docs_gate.roots", ["a", "b c", 3])],
)  # fmt: skip
def test_dvc_reads_every_value_as_it_was_meant(tmp_path: Path, key: str, value: Any) -> None:
    before = read_yaml(ROOT / "params.yaml")
    wanted = with_changes(before, {key: value}, where="here")
    file = tmp_path / "params.yaml"
    file.write_bytes((ROOT / "params.yaml").read_bytes())
    apply_overrides(file, as_overrides(wanted, before))
    assert read_yaml(file) == wanted


def test_params_of_other_keys_are_refused(tmp_path: Path) -> None:
    params = read_yaml(ROOT / "params.yaml")
    fewer = params | {"pretrain": {"seed": 1}}
    with pytest.raises(InputError, match="in one of them only"):
        as_overrides(params, fewer)


def test_every_ablation_of_the_project_is_one() -> None:
    for file in (ROOT / "docs/ablations").glob("*.yaml"):
        find_arms(ROOT, read_spec(ROOT, file.stem))
