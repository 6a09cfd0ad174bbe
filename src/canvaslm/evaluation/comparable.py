"""May two scores be held against each other?

One model has very different numbers under different estimators, so a score carries its recipe:
estimator, levels of noise, draws, seed, and which tokens it is of. An exact likelihood and an upper
bound on it may be compared, whatever the bound's estimator; two bounds only where the estimator and
its levels are the same. The seed is no obstacle: how far seeds differ is what the errors are for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from canvaslm.reporting.verdict import Verdict

_TOKENS = ("n_tokens", "n_text_bytes", "tokens_sha256")
_ESTIMATE = ("estimator", "noise_levels", "draws_per_level", "self_conditioning")
RECIPE = ("kind", "seed", *_TOKENS, *_ESTIMATE)  # what every score must say


def why_incomparable(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """What stands against comparing two rows of reports; empty where nothing does.

    Args:
        first: a score with its recipe, as ``reports/eval_bound/metrics.json`` holds it.
        second: another, of the same report or of another run's.
    """
    for row in (first, second):
        missing = [key for key in RECIPE if row.get(key) is None]
        if missing:
            return f"a score does not say its {missing[0]}"
    keys = _TOKENS
    if first["kind"] == second["kind"]:
        keys += _ESTIMATE
    for key in keys:
        if first[key] != second[key]:
            return f"{key} differs: {first[key]} and {second[key]}"
    return ""


def judge_rows(twin: Mapping[str, Any], bounds: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """Whether the bounds may be held against the twin's loss, and are numbers at all.

    Args:
        twin: its score with the recipe.
        bounds: those of the denoiser with theirs.
    """
    for row in bounds:
        name = f"{row.get('noise_levels')}, self-conditioning {row.get('self_conditioning')}"
        reason = why_incomparable(twin, row)
        if reason:
            return "fail", f"{name} cannot be held against the twin: {reason}"
        if not math.isfinite(row["bound_nats_per_token"]):
            return "fail", f"not finite: {name}"
    if not math.isfinite(twin["nats_per_token"]):
        return "fail", "not finite: autoregressive"
    return "pass", f"{len(bounds)} bounds and the twin's loss, all of {twin['n_tokens']} tokens"
