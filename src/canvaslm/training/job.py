"""Which run is this: what does it train, on which data, under which identity?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvaslm.corpus.windows import Windows
from canvaslm.errors import InputError
from canvaslm.objective.denoising import Denoising
from canvaslm.objective.next_token import NextToken
from canvaslm.training.identity import run_identity
from canvaslm.training.learner import Objective
from canvaslm.training.optimizer import update_flops
from canvaslm.training.plan import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: what it trains, on which data, under which identity."""

    recipe: Recipe
    objective: Objective
    windows: Windows
    identity: dict[str, Any]

    def flops_of_first(self, n_windows: int) -> float:
        """Operations of the first windows of the run: of their passes, and of their updates."""
        passes = self.objective.flops_of_first(self.recipe.model, n_windows)
        n_updates = n_windows / self.recipe.pretrain.windows_per_step
        return passes + update_flops(self.recipe) * n_updates


def make_job(
    recipe: Recipe, *, shards: Path, code_digest: str, parent: dict[str, Any] | None = None
) -> Job:
    """Open the data of a run and write down its identity.

    Args:
        recipe: what is trained.
        shards: the folder of the packed shards.
        code_digest: digest of all code that the stage can reach.
        parent: for a fork, which checkpoint its first weights come from.

    Raises:
        InputError: the shards are incomplete, are of another vocabulary, or hold no whole window.
    """
    windows = Windows(shards, "train", recipe.layout.window_tokens)
    manifest = windows.manifest
    if manifest.vocab_size != recipe.layout.vocab_size:
        raise InputError(
            shards / "manifest.json",
            expected=f"layout.vocab_size ({recipe.layout.vocab_size})",
            got=str(manifest.vocab_size),
            fix="run `dvc repro audit_windows`",
        )
    identity = run_identity(
        recipe,
        manifest_sha256=manifest.sha256,
        tokenizer_sha256=manifest.tokenizer_sha256,
        eot_id=manifest.eot_id,
        shards={shard.file: shard.sha256 for shard in manifest.splits["train"]},
        code_digest=code_digest,
        parent=parent,
    )
    objective = _make_objective(recipe, manifest.eot_id)
    return Job(recipe=recipe, objective=objective, windows=windows, identity=identity)


def _make_objective(recipe: Recipe, eot_id: int) -> Objective:
    if recipe.diffusion is None:
        return NextToken(
            layout=recipe.layout,
            eot_id=eot_id,
            vocab_chunk=recipe.pretrain.vocab_chunk,
        )
    objective = Denoising(
        layout=recipe.layout,
        diffusion=recipe.diffusion,
        seed=recipe.pretrain.seed,
        vocab_chunk=recipe.pretrain.vocab_chunk,
        first_phase_windows=recipe.first_phase_windows,
    )
    objective.refuse_misfit(recipe.model)
    return objective
