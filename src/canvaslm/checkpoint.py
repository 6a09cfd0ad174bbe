"""How does a model in training become a directory, and come back as exactly what it was?

A checkpoint is a directory ``step_00000400/`` with ``model.safetensors``, ``optimizer.safetensors``
and ``state.json``. It is written aside, flushed and renamed, so that a directory of that name is
whole; ``state.json`` holds the hash of both tensor files, so that a damaged one is never taken for
it. Tensors are stored by parameter name and loaded strictly; nothing is pickled, nothing repaired.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from canvaslm.errors import GateClosedError, InputError
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from canvaslm.params import parse_section
from canvaslm.reporting.files import remove_directory, to_json, whole_directory

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_FILES = (_MODEL, _OPTIMIZER, _STATE)
_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_NAME = re.compile(r"step_(\d{8,})")
_ANOTHER = "use another checkpoint, or train again"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A step that changed nothing: its number, its windows (both ends included) and why."""

    step: int
    first_window: int
    last_window: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is. ``windows_consumed`` is its one counter; step and tokens follow from it."""

    step: int  # optimiser steps done, the skipped ones included; the number of the next one
    windows_consumed: int
    tokens: int
    flops: float
    skipped: tuple[SkippedStep, ...]


def save_checkpoint(
    root: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: dict[str, Any],
    keep_last: int | None,
) -> Path:
    """Write a checkpoint under ``root`` and return its directory; the older ones stay until then.

    Args:
        root: the folder of checkpoints.
        model: the plain model.
        optimizer: its AdamW, with state for every parameter.
        progress: where the run stands.
        identity: what run this is, as plain JSON values.
        keep_last: how many of the latest checkpoints stay, this one included; None keeps all.

    Raises:
        GateClosedError: a weight or a moment is not finite; nothing is written.
        OSError: the disk refused, for example because it is full; the older ones are untouched.
    """
    tensors = {_MODEL: dict(model.state_dict()), _OPTIMIZER: _named_moments(model, optimizer)}
    _refuse_non_finite(tensors, progress.step)
    directory = root / f"step_{progress.step:08d}"
    with whole_directory(directory, holds=["*"]) as aside:  # the run owns its folder
        _write_files(aside, tensors, progress, identity)
    if keep_last is not None:
        for old in _numbered(root)[:-keep_last]:
            remove_directory(old)
    return directory


def latest_complete(root: Path) -> Path | None:
    """The whole checkpoint with the highest step number, or None; broken ones are passed over."""
    for directory in reversed(_numbered(root)):
        try:
            _verify(directory, read_state(directory))
        except InputError as error:
            _log.warning("passed over: %s", error)
        else:
            return directory
    return None


def read_state(directory: Path) -> dict[str, Any]:
    """Read ``state.json``: ``files`` (hashes), ``progress``, ``identity``, ``format``.

    Raises:
        InputError: this is no checkpoint, or its ``state.json`` is damaged.
    """
    path = directory / _STATE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _refusal(directory, f"a checkpoint with {_STATE}", "none") from None
    except (OSError, ValueError) as error:
        raise _refusal(path, "readable JSON", str(error)) from None
    if not isinstance(state, dict) or {"files", "format", "identity", "progress"} - set(state):
        raise _refusal(path, "files, format, identity and progress", "something else")
    if state["format"] != _FORMAT:
        raise _refusal(path, f"format {_FORMAT}", repr(state["format"]))
    return state


def load_model(directory: Path) -> Backbone:
    """Build the model of a checkpoint, on the CPU and in evaluation mode, its head tied.

    Raises:
        InputError: this is no checkpoint, a file is missing or has another hash, a tensor is
            missing, unexpected, of another shape or type, or not finite.
    """
    state = read_state(directory)
    _verify(directory, state)
    where = f"{directory / _STATE}:identity"
    identity = state["identity"]
    model = Backbone(
        parse_section(identity.get("model"), ModelParams, where=f"{where}.model"),
        parse_section(identity.get("layout"), Layout, where=f"{where}.layout"),
    )
    targets, weights = dict(model.state_dict()), _read_tensors(directory / _MODEL)
    _compare(targets, weights, directory / _MODEL)
    _copy_into(targets, weights)
    return model.eval()


def restore(directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a model and its optimiser back where a checkpoint was written, by name.

    Raises:
        InputError: as :func:`load_model`, for the optimiser's state too.
    """
    state = read_state(directory)
    _verify(directory, state)
    weights, moments = (_read_tensors(directory / name) for name in (_MODEL, _OPTIMIZER))
    targets = dict(model.state_dict()), _named_moments(model, optimizer)
    _compare(targets[0], weights, directory / _MODEL)
    _compare(targets[1], moments, directory / _OPTIMIZER)
    progress = _read_progress(state["progress"], directory / _STATE)
    _copy_into(targets[0], weights)
    _copy_into(targets[1], moments)
    return progress


def export_checkpoint(directory: Path, out: Path) -> None:
    """Copy a whole checkpoint to ``out``: aside, flushed, renamed over what stood there.

    Raises:
        InputError: the checkpoint is not whole, or ``out`` holds something else than one.
    """
    _verify(directory, read_state(directory))
    with whole_directory(out, holds=_FILES) as aside:
        for name in _FILES:
            shutil.copyfile(directory / name, aside / name)


def _write_files(
    aside: Path,
    tensors: dict[str, dict[str, Tensor]],
    progress: Progress,
    identity: dict[str, Any],
) -> None:
    """Write the two tensor files, then what vouches for them."""
    for name, content in tensors.items():
        try:
            # No metadata: safetensors writes more than one key of it in random order.
            save_file({key: content[key].contiguous() for key in sorted(content)}, aside / name)
        except SafetensorError as error:
            raise _as_os_error(error, aside / name) from error
    state = {
        "format": _FORMAT,
        "files": {name: _sha256(aside / name) for name in tensors},
        "progress": dataclasses.asdict(progress),
        "identity": identity,
    }
    (aside / _STATE).write_text(to_json(state), encoding="utf-8")


def _as_os_error(error: SafetensorError, path: Path) -> OSError:
    """safetensors reports what the system refused as text, with the number in it."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        raise error
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _numbered(root: Path) -> list[Path]:
    """Directories that carry a checkpoint's name, by number and not as text."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state under the names of the parameters that it belongs to."""
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        for moment in _MOMENTS
    }


def _refuse_non_finite(files: dict[str, dict[str, Tensor]], step: int) -> None:
    for content in files.values():
        for name, tensor in content.items():
            if not bool(torch.isfinite(tensor).all()):
                raise GateClosedError(
                    f"pretrain: {name} is not finite after step {step}, so no checkpoint was "
                    "written and the older ones stay; lower learning_rate and run it again"
                )


def _verify(directory: Path, state: dict[str, Any]) -> None:
    """Compare both tensor files with the hashes in the state."""
    for name in (_MODEL, _OPTIMIZER):
        path = directory / name
        if not path.is_file():
            raise _refusal(directory, f"a checkpoint with {name}", "none")
        expected, got = dict(state["files"]).get(name), _sha256(path)
        if expected != got:
            raise _refusal(path, f"sha256 {expected}", got)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _refusal(path, "a safetensors file", str(error)) from None


def _compare(targets: dict[str, Tensor], stored: dict[str, Tensor], where: Path) -> None:
    """Accept stored tensors only when names, shapes and types are those of the targets."""
    missing, unexpected = sorted(targets.keys() - stored), sorted(stored.keys() - targets)
    if missing or unexpected:
        got = f"missing {missing or 'none'}, unexpected {unexpected or 'none'}"
        raise _refusal(where, f"the {len(targets)} tensors of this model", got)
    for name, target in targets.items():
        tensor = stored[name]
        if tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise _refusal(f"{where}:{name}", _described(target), _described(tensor))
        if not bool(torch.isfinite(tensor).all()):
            raise _refusal(f"{where}:{name}", "finite values", "NaN or infinity")


def _copy_into(targets: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Overwrite the targets' values in place, so that ties and optimiser references hold."""
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(stored[name])


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _read_progress(values: Any, where: Path) -> Progress:
    try:
        skipped = tuple(SkippedStep(**item) for item in values["skipped"])
        return Progress(**{**values, "skipped": skipped})
    except (TypeError, KeyError) as error:
        raise _refusal(f"{where}:progress", "progress of a run", str(error)) from None


def _refusal(where: str | Path, expected: str, got: str) -> InputError:
    return InputError(where, expected=expected, got=got, fix=_ANOTHER)
