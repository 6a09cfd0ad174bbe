"""Which model is this, and do the shards hold the text that it can read?"""

from dataclasses import dataclass
from pathlib import Path

from canvaslm.checkpoint import load_model
from canvaslm.checkpoint_state import TENSOR_FILES, Identity, Progress, read_state
from canvaslm.corpus.manifest import Manifest
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A trained model and where it comes from.

    Attributes:
        model: the model, on the CPU, in evaluation mode, with the weights that it is judged by.
        identity: what run it is.
        progress: how far that run went.
        model_sha256: of the file that holds its weights.
    """

    model: Backbone
    identity: Identity
    progress: Progress
    model_sha256: str

    @property
    def layout(self) -> Layout:
        """The window that it was trained on."""
        return self.model.layout

    @property
    def diffusion(self) -> DiffusionParams:
        """How its canvases were corrupted in training.

        Raises:
            InputError: its identity does not say so.
        """
        if self.identity.diffusion is None:
            raise InputError(
                f"the {self.identity.objective} checkpoint",
                expected="how canvases were corrupted in training",
                got="none",
                fix="use a checkpoint of the diffusion objective",
            )
        return self.identity.diffusion

    @property
    def training(self) -> dict[str, float | str]:
        """The training behind it, for a report: optimiser steps, tokens, FLOPs, hash of the model.

        Steps that changed nothing, and rollbacks, stand beside them: steps and tokens count those.
        The hash is of the trained weights, also where their average is judged, which is told.
        """
        done = self.progress
        counts: dict[str, float | str] = {x: getattr(done, x) for x in ("step", "tokens", "flops")}
        counts["skipped_steps"] = len(self.progress.skipped)
        counts["rollbacks"] = len(self.progress.rollbacks)
        counts["model_sha256"] = self.model_sha256
        told = {f"trained_{key}": count for key, count in counts.items()}
        return told | {"judged_weights": self.judged_weights}

    @property
    def judged_weights(self) -> str:
        """Which weights are judged: ``trained``, or ``averaged`` where the run kept an average."""
        return "averaged" if self.identity.pretrain.ema_decay else "trained"


def load_contestant(directory: Path, objective: str, manifest: Manifest) -> Contestant:
    """Load a checkpoint that is to be judged on some shards.

    Args:
        directory: one complete checkpoint.
        objective: ``diffusion`` or ``autoregressive``.
        manifest: what the shards say of themselves.

    Raises:
        InputError: the checkpoint is not whole, is of another objective, or its vocabulary or
            tokenizer is not that of the shards.
    """
    state = read_state(directory)
    _refuse_other(directory, "objective", state.identity.objective, objective)
    model = load_model(directory)
    _refuse_other(directory, "vocab_size", model.layout.vocab_size, manifest.vocab_size)
    for key in ("eot_id", "tokenizer_sha256"):
        _refuse_other(directory, key, getattr(state.identity.data, key), getattr(manifest, key))
    return Contestant(
        model=model,
        identity=state.identity,
        progress=state.progress,
        model_sha256=state.files[TENSOR_FILES[0]],
    )


def refuse_other_window(first: Contestant, second: Contestant) -> None:
    """Raise unless both models were trained on windows of one length, however cut into canvases.

    Raises:
        InputError: they were not, so that they would not score the same tokens.
    """
    if first.layout.window_tokens != second.layout.window_tokens:
        raise InputError(
            f"the {second.identity.objective} checkpoint",
            expected=f"windows of {first.layout.window_tokens} tokens, as the other checkpoint",
            got=str(second.layout.window_tokens),
            fix="train both objectives with the same layout",
        )


def _refuse_other(directory: Path, name: str, got: object, expected: object) -> None:
    """Raise unless a property of the checkpoint is the one that is needed."""
    if got != expected:
        raise InputError(
            f"{directory}:{name}",
            expected=str(expected),
            got=str(got),
            fix="evaluate the checkpoint on the shards that its tokenizer packed, by objective",
        )
