"""What does a checkpoint say of itself, and can it be believed?

``state.json`` says which run it is of, how far that run was, and the hashes of the tensor files. It
holds a hash of all this too, so that one flipped bit is never taken for another step or another
run, and it has a strict, closed model, so that what does not fit is told in one line.
"""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from canvaslm.corpus.written import parse_written, read_written
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams
from canvaslm.params import Params
from canvaslm.reporting.differences import as_table, differences, in_one_line
from canvaslm.reporting.files import to_json

STATE = "state.json"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
ANOTHER = "use another checkpoint, or train again"
_FORMAT: Literal[3] = 3
_NAME = re.compile(r"step_(\d{8,})")

_log = logging.getLogger(__name__)


class SkippedStep(Params):
    """A step that changed nothing: its number, its windows (both ends included) and why."""

    step: int = Field(ge=0)
    first_window: int = Field(ge=0)
    last_window: int = Field(ge=0)
    cause: str


class Rollback(Params):
    """The run went back to a checkpoint, and will pass over what began the trouble.

    Attributes:
        from_step: steps done when it went back.
        to_step: steps done at the checkpoint.
        cause: why.
        bad_steps: how many of the steps between the two were bad; the kept run forgets them.
        marked: the steps, from ``to_step`` on, whose windows are passed over from now on.
    """

    from_step: int = Field(ge=0)
    to_step: int = Field(ge=0)
    cause: str
    bad_steps: int = Field(ge=0)
    marked: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _goes_back(self) -> Self:
        if not all(self.to_step <= step < self.from_step for step in self.marked):
            raise ValueError(f"steps {self.to_step} to {self.from_step - 1} can be marked")
        return self


class Progress(Params):
    """How far a run is. ``windows_consumed`` is its one counter; step and tokens follow from it.

    ``step`` counts the optimiser steps done, the skipped ones included; it is the number of the
    next one.
    """

    step: int = Field(ge=0)
    windows_consumed: int = Field(ge=0)
    tokens: int = Field(ge=0)
    flops: float = Field(ge=0)
    skipped: tuple[SkippedStep, ...]
    rollbacks: tuple[Rollback, ...]
    log_sha256: str  # of the record of all steps done; empty where none is kept

    @property
    def marked(self) -> frozenset[int]:
        """Every step that is passed over."""
        return frozenset(step for rollback in self.rollbacks for step in rollback.marked)


class _Pretrain(Params):
    """The keys of ``pretrain`` that decide the weights, of which three are read here."""

    model_config = ConfigDict(extra="allow")

    windows_per_step: int = Field(ge=1)
    steps: int = Field(ge=1)
    ema_decay: float = Field(ge=0, lt=1)


class _Data(Params):
    manifest_sha256: str
    tokenizer_sha256: str
    eot_id: int = Field(ge=0)
    shards: dict[str, str]  # training shard -> its sha256


class _Parent(Params):
    """The checkpoint that a forked run took its first weights from."""

    identity: str
    step: int = Field(ge=0)
    model_sha256: str


class Identity(Params):
    """Which run it is: what was trained, on which data, by which code."""

    objective: Literal["diffusion", "autoregressive"]
    layout: Layout
    model: ModelParams
    diffusion: DiffusionParams | None
    pretrain: _Pretrain
    data: _Data
    code: str
    parent: _Parent | None


class State(Params):
    """All that ``state.json`` holds; ``sha256`` is of the rest of it."""

    format: Literal[3]
    files: dict[str, str]
    progress: Progress
    identity: Identity
    sha256: str

    @field_validator("files")
    @classmethod
    def _vouch_for_both_files(cls, files: dict[str, str]) -> dict[str, str]:
        if set(files) != set(TENSOR_FILES):
            raise ValueError(f"should be the hashes of {' and '.join(TENSOR_FILES)}")
        return files

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        done, windows = self.progress, self.progress.windows_consumed
        due = done.step * self.identity.pretrain.windows_per_step
        if windows != due:
            raise ValueError(f"{done.step} steps consume {due} windows, not {windows}")
        if done.tokens != windows * self.identity.layout.window_tokens:
            raise ValueError(f"{windows} windows do not have {done.tokens} tokens")
        return self

    @model_validator(mode="after")
    def _past_is_possible(self) -> Self:
        done, per_step = self.progress, self.identity.pretrain.windows_per_step
        steps = [item.step for item in done.skipped]
        if steps != sorted(set(steps)) or any(step >= done.step for step in steps):
            raise ValueError(f"skipped steps rise and lie before step {done.step}")
        for item in done.skipped:
            first = item.step * per_step
            if (item.first_window, item.last_window) != (first, first + per_step - 1):
                raise ValueError(f"step {item.step} has the windows from {first} on")
        if done.step > self.identity.pretrain.steps:
            raise ValueError(f"a run of {self.identity.pretrain.steps} steps ends there")
        return self


def render_state(*, files: dict[str, str], progress: Progress, identity: dict[str, Any]) -> str:
    """The text of a ``state.json``, with the hash that vouches for it.

    Args:
        files: the sha256 of each tensor file by name.
        progress: where the run stands.
        identity: what run this is, as plain JSON values.
    """
    content = {
        "format": _FORMAT,
        "files": files,
        "progress": progress.model_dump(mode="json"),
        "identity": identity,
    }
    return to_json(content | {"sha256": _digest(content)})


def read_state(directory: Path) -> State:
    """Read what a checkpoint says of itself.

    Raises:
        InputError: this is no checkpoint, its ``state.json`` is damaged or of another format, or
            the directory has the name of another step.
    """
    path, expected = directory / STATE, "the state of a checkpoint"
    if not path.exists():
        raise InputError(directory, expected=f"a checkpoint with {STATE}", got="none", fix=ANOTHER)
    text = read_written(path, expected=expected, missing="none", fix=ANOTHER)
    state = parse_written(text, path, State, expected=expected, broken="another", fix=ANOTHER)
    digest = _digest_without_hash(text)
    if digest != state.sha256:
        told = f"sha256 {state.sha256}, as it says itself"
        raise InputError(path, expected=told, got=digest, fix=ANOTHER)
    number = number_of(directory)
    if number is not None and number != state.progress.step:
        told = f"step {number}, as its directory is named"
        raise InputError(path, expected=told, got=f"step {state.progress.step}", fix=ANOTHER)
    return state


def refuse_other_run(
    directory: Path,
    state: State,
    identity: dict[str, Any],
    *,
    fix: str = "move it out of the folder of this run",
) -> None:
    """Raise unless a checkpoint is of one run; what differs is logged as a table, too.

    Args:
        directory: the checkpoint.
        state: what it says of itself.
        identity: the run, as plain JSON values.
        fix: what to do with one of another run.

    Raises:
        InputError: it is of another run; each key that differs is named, stored and wanted.
    """
    stored, wanted = state.identity.model_dump(mode="json"), json.loads(json.dumps(identity))
    found = differences(stored, wanted)
    if found:
        _log.warning("%s is of another run:\n%s", directory, as_table(found))
        raise InputError(
            f"{directory / STATE}:identity",
            expected="a checkpoint of this run",
            got=f"that of another run ({in_one_line(found)})",
            fix=fix,
        )


def number_of(directory: Path) -> int | None:
    """The step in the name of a checkpoint's directory; None for another name."""
    named = _NAME.fullmatch(directory.name)
    return int(named[1]) if named else None


def _digest_without_hash(text: bytes) -> str:
    """Hash a ``state.json`` as it was before its hash was added."""
    try:
        content = json.loads(text)
        return _digest({key: content[key] for key in content if key != "sha256"})
    except ValueError as error:  # a number of thousands of digits
        return str(error)


def _digest(content: dict[str, Any]) -> str:
    """Hash JSON values in one spelling."""
    text = json.dumps(json.loads(to_json(content)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
