"""When are two runs the same run, so that one may go on from the other's state?

What decides the weights is identity. How they are computed is not: a device or a cut into
micro-batches may change how a sum is rounded and nothing else, and a run that does not fit its
memory must be able to go on with smaller ones. Nor is where the run lives, or how often it writes.
docs/resume.md gives the reason for each key.
"""

import hashlib
import json
from typing import Any

from canvaslm.training.plan import Recipe

_HOW = {"device", "micro_batch_windows", "vocab_chunk", "compile", "gradient_checkpointing"}
_NOT_IDENTITY = _HOW | {
    "log_every",
    "save_every",
    "trace_steps",
    "keep_last",
    "keep_best",
    "loader_workers",
    "max_rollbacks",
}


def run_identity(
    recipe: Recipe,
    *,
    manifest_sha256: str,
    tokenizer_sha256: str,
    eot_id: int,
    shards: dict[str, str],
    code_digest: str,
    parent: dict[str, Any] | None,
) -> dict[str, Any]:
    """Write down in full what decides a run's weights, as plain JSON values.

    Args:
        recipe: what is trained.
        manifest_sha256: hash of the shards' manifest, which itself holds the hash of each shard.
        tokenizer_sha256: hash of the tokenizer that the ids belong to.
        eot_id: the end-of-text id.
        shards: the sha256 of each training shard by its name.
        code_digest: digest of all code that the stage can reach.
        parent: for a fork, which checkpoint its first weights come from.
    """
    pretrain = recipe.pretrain.model_dump()
    return {
        "objective": recipe.objective,
        "layout": recipe.layout.model_dump(),
        "model": recipe.model.model_dump(),
        "diffusion": recipe.diffusion.model_dump() if recipe.diffusion else None,
        "pretrain": {key: pretrain[key] for key in pretrain if key not in _NOT_IDENTITY},
        "data": {
            "manifest_sha256": manifest_sha256,
            "tokenizer_sha256": tokenizer_sha256,
            "eot_id": eot_id,
            "shards": shards,
        },
        "code": code_digest,
        "parent": parent,
    }


def identity_name(identity: dict[str, Any]) -> str:
    """Name a run by its identity: sixteen hex digits, safe as a folder."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
