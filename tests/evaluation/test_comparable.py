from typing import Any

import pytest

from canvaslm.evaluation.comparable import RECIPE, why_incomparable

BOUND: dict[str, Any] = {
    "kind": "upper_bound",
    "estimator": "negative ELBO",
    "noise_levels": "times 1..16 of 16",
    "draws_per_level": 1,
    "self_conditioning": "off",
    "seed": 1,
    "n_tokens": 100,
    "n_text_bytes": 250,
    "tokens_sha256": "ab",
}
EXACT = BOUND | {"kind": "exact", "estimator": "likelihood", "noise_levels": "none"}


def test_a_bound_compares_with_a_likelihood_and_with_its_like_under_another_seed() -> None:
    assert why_incomparable(EXACT, BOUND) == ""
    assert why_incomparable(BOUND, BOUND | {"seed": 2}) == ""


@pytest.mark.parametrize("key", ["n_tokens", "n_text_bytes", "tokens_sha256"])
@pytest.mark.parametrize("other", [EXACT, BOUND], ids=["exact", "bound"])
def test_scores_of_other_tokens_never_compare(other: dict[str, Any], key: str) -> None:
    assert f"{key} differs" in why_incomparable(other, BOUND | {key: "another"})


@pytest.mark.parametrize("key", ["estimator", "noise_levels", "draws_per_level",
                                 "self_conditioning"])  # fmt: skip
def test_bounds_of_other_estimators_never_compare(key: str) -> None:
    assert f"{key} differs" in why_incomparable(BOUND, BOUND | {key: "another"})


def test_a_diagnostic_compares_with_no_bound() -> None:
    plain = BOUND | {"estimator": "plain cross-entropy at random times"}
    assert "estimator differs" in why_incomparable(BOUND, plain)


@pytest.mark.parametrize("key", RECIPE)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_score_that_does_not_say_all_of_its_recipe_compares_with_nothing(
    key: str, is_first: bool
) -> None:
    without = {name: value for name, value in BOUND.items() if name != key}
    pair = (without, BOUND) if is_first else (BOUND, without)
    assert why_incomparable(*pair) == f"a score does not say its {key}"
