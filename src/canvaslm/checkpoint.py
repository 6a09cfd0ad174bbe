"""How does a model in training become a directory, and come back as exactly what it was?

A checkpoint is a directory ``step_00000400/`` with ``model.safetensors``, ``optimizer.safetensors``
and ``state.json``. It is written aside, flushed and renamed, so that a directory of that name is
whole; ``state.json`` vouches for itself and for both tensor files, so that a damaged checkpoint, or
one of another run, is never taken for it. Tensors are stored by parameter name and loaded strictly;
nothing is pickled, nothing repaired.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from canvaslm.checkpoint_state import (
    ANOTHER,
    STATE,
    TENSOR_FILES,
    Progress,
    State,
    number_of,
    read_state,
    refuse_other_run,
    render_state,
)
from canvaslm.errors import GateClosedError, InputError
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import count_parameters
from canvaslm.reporting.disk import room_for
from canvaslm.reporting.files import (
    flush,
    refuse_read_only,
    remove_directory,
    whole_directory,
    write_bytes,
)

_MODEL, _OPTIMIZER = TENSOR_FILES
_FILES = (*TENSOR_FILES, STATE)
_AVERAGE = "ema/"
_HEADER_BYTES = 128  # of a tensor in a safetensors file besides its name, at most

_log = logging.getLogger(__name__)


def save_checkpoint(
    root: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: dict[str, Any],
    keep_last: int | None,
    best_of: Callable[[Sequence[int]], Collection[int]] = lambda saved: (),
) -> Path:
    """Write a checkpoint under ``root`` and return its directory; the older ones stay until then.

    Args:
        root: the folder of checkpoints.
        model: the plain model.
        optimizer: with state for every parameter.
        progress: where the run stands.
        identity: what run this is, as plain JSON values.
        keep_last: how many checkpoints up to this one stay; None keeps all. Those of later steps
            are no part of the way to this one; they are left alone.
        best_of: says which of the steps that are saved stay besides.

    Raises:
        GateClosedError: a weight or a moment is not finite; nothing is written.
        InputError: there is too little room on the disk; the older ones are untouched.
        OSError: the disk refused for another reason; the older ones are untouched.
    """
    assert keep_last is None or keep_last >= 1, "the newest one always stays"
    tensors = {_MODEL: dict(model.state_dict()), _OPTIMIZER: _named_moments(model, optimizer)}
    _refuse_non_finite(tensors, progress.step)
    directory = root / f"step_{progress.step:08d}"
    sizes = _sizes(tensors, progress, identity)
    with (
        room_for(root, sizes, what=f"the checkpoint of step {progress.step}"),
        whole_directory(directory, holds=["*"]) as aside,  # the run owns its folder
    ):
        _write_files(aside, tensors, progress, identity)
    if keep_last is not None:
        _remove_old(root, progress.step, keep_last, best_of)
    return directory


def latest_complete(
    root: Path, *, identity: dict[str, Any] | None, up_to: int | None = None
) -> Path | None:
    """The whole checkpoint of a run with the highest step number, or None.

    Broken ones, and those of another run, are passed over with a warning.

    Args:
        root: the folder of checkpoints.
        identity: the run, as plain JSON values; None for any.
        up_to: the highest step number that will do; None for any.
    """
    for directory in reversed(_numbered(root)):
        if up_to is not None and (number_of(directory) or 0) > up_to:
            continue
        try:
            state = read_state(directory)
            if identity is not None:
                refuse_other_run(directory, state, identity)
            _verify(directory, state)
        except InputError as error:
            _log.warning("passed over: %s", error)
        else:
            return directory
    return None


def set_aside(root: Path, *, after: int | None) -> None:
    """Take the names away from checkpoints that a run does not go on from.

    They are damaged or another run's. Under their names they would be counted when old ones are
    removed, and whole ones would go in their place.

    Args:
        root: the folder of checkpoints.
        after: the step that the run goes on from; None for a run that starts anew.
    """
    for directory in _numbered(root):
        if after is None or (number_of(directory) or 0) > after:
            place = directory.with_name(f"passed_over_{directory.name}")
            shutil.rmtree(place, ignore_errors=True)
            directory.rename(place)
            _log.warning("set aside as %s", place)


def refuse_damaged(directory: Path) -> None:
    """Raise unless a checkpoint is whole.

    Raises:
        InputError: a file is missing or is not the one that was written.
    """
    _verify(directory, read_state(directory))


def load_model(directory: Path) -> Backbone:
    """Build the model that a checkpoint is judged by and used as, its head tied.

    Its weights are the average over the run where the run kept one, and the trained ones else. It
    lies on the CPU, in evaluation mode.

    Raises:
        InputError: this is no checkpoint, a file is missing or has another hash, a tensor is
            missing, unexpected, of another shape or type, or not finite.
    """
    model = load_trained_model(directory)
    if read_state(directory).identity.pretrain.ema_decay:
        targets = {_AVERAGE + name: p.data for name, p in model.named_parameters()}
        moments = _read_tensors(directory / _OPTIMIZER)
        averages = {name: moments[name] for name in moments if name.startswith(_AVERAGE)}
        _compare(targets, averages, directory / _OPTIMIZER)
        _copy_into(targets, averages)
    return model


def load_trained_model(directory: Path) -> Backbone:
    """Build the model of a checkpoint with the weights that training goes on from.

    Raises:
        InputError: as :func:`load_model`.
    """
    state = read_state(directory)
    _verify(directory, state)
    weights = _read_tensors(directory / _MODEL)
    identity = state.identity
    expected = count_parameters(identity.model, identity.layout)
    stored = sum(tensor.numel() for tensor in weights.values())
    if expected > 2 * stored:  # before memory is taken for it
        raise _refusal(directory / _MODEL, f"{expected} parameters", str(stored))
    model = Backbone(identity.model, identity.layout)
    targets = dict(model.state_dict())
    _compare(targets, weights, directory / _MODEL)
    _copy_into(targets, weights)
    return model.eval()


def load_weights(directory: Path, *, model: nn.Module) -> None:
    """Give a model the weights of a checkpoint, by name, and nothing else of it.

    Raises:
        InputError: as :func:`load_model`.
    """
    _verify(directory, read_state(directory))
    weights, targets = _read_tensors(directory / _MODEL), dict(model.state_dict())
    _compare(targets, weights, directory / _MODEL)
    _copy_into(targets, weights)


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
    _copy_into(targets[0], weights)
    _copy_into(targets[1], moments)
    return state.progress


def is_finite(tensor: Tensor) -> bool:
    """Whether every value of a tensor is finite, in one pass that writes nothing.

    A NaN is both the least and the largest of any values that it is among.
    """
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def go_back_to(directory: Path, progress: Progress) -> None:
    """Let a checkpoint be where its run stands, with more said of its past than when it was saved.

    Checkpoints of later steps are removed first, as they are of a way that the run has left. Then
    ``state.json`` is replaced whole; the tensors stay as they are.

    Raises:
        InputError: the checkpoint is damaged.
    """
    state = read_state(directory)
    assert progress.step == state.progress.step, "a checkpoint never changes its step"
    for later in _numbered(directory.parent):
        if (number_of(later) or 0) > progress.step:
            remove_directory(later)
    identity = json.loads((directory / STATE).read_bytes())["identity"]
    text = render_state(files=state.files, progress=progress, identity=identity)
    write_bytes(directory / STATE, text.encode())


def export_checkpoint(directory: Path, out: Path) -> None:
    """Copy a whole checkpoint to ``out``: aside, flushed, renamed over what stood there.

    Raises:
        InputError: the checkpoint is not whole, there is too little room, or as
            :func:`refuse_to_replace`.
    """
    refuse_to_replace(out)
    _verify(directory, read_state(directory))
    sizes = [(directory / name).stat().st_size for name in _FILES]
    with (
        room_for(out.parent, sizes, what="a copy of the checkpoint"),
        whole_directory(out, holds=_FILES) as aside,
    ):
        for name in _FILES:
            shutil.copyfile(directory / name, aside / name)


def refuse_to_replace(out: Path) -> None:
    """Raise unless a checkpoint may be written to ``out`` without a loss.

    Raises:
        InputError: ``out`` names no directory, or something other than a checkpoint stands there.
    """
    fix = "move that away, or name another directory"
    if out.name in ("", ".."):
        raise InputError(
            f"out {str(out)!r}", expected="a name for a directory", got="none", fix=fix
        )
    for place in (out, *out.parents):
        if place.is_dir() and not (place == out and place.is_symlink()):
            refuse_read_only(out.parent if place == out else place)
            break
        if place.is_symlink() or place.exists():
            got = "a symbolic link" if place.is_symlink() else "a file"
            raise InputError(place, expected="a directory", got=got, fix="remove it")
    found = _contents(out)
    if found and (set(found) != set(_FILES) or not all(found.values())):
        raise InputError(
            out,
            expected=f"nothing, or a checkpoint to replace: {', '.join(_FILES)} and no more",
            got=f"a directory with {', '.join(sorted(found)[:4])}",
            fix=fix,
        )


def _contents(directory: Path) -> dict[str, bool]:
    """The names in a directory, and which of them are files; none where there is no directory.

    Another process may put a checkpoint in its place meanwhile; then what stands there now counts.
    """
    while True:
        try:
            before = directory.stat().st_ino
            with os.scandir(directory) as entries:
                found = {entry.name: entry.is_file() for entry in entries}
            if directory.stat().st_ino == before:
                return found
        except FileNotFoundError:
            if not directory.exists():
                return {}


def _sizes(
    tensors: dict[str, dict[str, Tensor]], progress: Progress, identity: dict[str, Any]
) -> list[int]:
    """Bytes of the three files, known before they are written; a header's by its upper bound."""
    of_tensors = [
        8 + sum(x.nbytes + len(name.encode()) + _HEADER_BYTES for name, x in content.items())
        for content in tensors.values()
    ]
    state = render_state(
        files=dict.fromkeys(tensors, "0" * 64), progress=progress, identity=identity
    )
    return [*of_tensors, len(state.encode())]


def _remove_old(
    root: Path, step: int, keep_last: int, best_of: Callable[[Sequence[int]], Collection[int]]
) -> None:
    """Remove what stands before a step and is neither among the last nor among the best."""
    so_far = {number_of(path) or 0: path for path in _numbered(root)}
    so_far = {number: path for number, path in so_far.items() if number <= step}
    best = set(best_of(list(so_far)))
    for number in list(so_far)[:-keep_last]:
        if number not in best:
            remove_directory(so_far[number])


def _write_files(
    aside: Path,
    tensors: dict[str, dict[str, Tensor]],
    progress: Progress,
    identity: dict[str, Any],
) -> None:
    """Write the two tensor files, then what vouches for them.

    A file is hashed in a thread while the next one is written and while it goes to the disk, so
    that a trainer waits for the longer of the two and not for both. The larger one comes first.
    """
    hashes = {}
    with ThreadPoolExecutor(len(tensors)) as pool:
        for name, content in sorted(tensors.items(), key=lambda item: item[0] != _OPTIMIZER):
            try:
                # No metadata: safetensors writes more than one key of it in random order.
                save_file({key: content[key].contiguous() for key in sorted(content)}, aside / name)
            except SafetensorError as error:
                raise _as_os_error(error, aside / name) from error
            hashes[name] = pool.submit(_sha256, aside / name)
        for name in tensors:
            flush(aside / name)
    files = {name: digest.result() for name, digest in hashes.items()}
    state = render_state(files=files, progress=progress, identity=identity)
    (aside / STATE).write_text(state, encoding="utf-8")


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
    numbers = {path: number_of(path) for path in root.iterdir() if path.is_dir()}
    found = {path: number for path, number in numbers.items() if number is not None}
    return sorted(found, key=found.__getitem__)


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state under the names of the parameters that it belongs to."""
    moments = {}
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter], f"{name} has no state yet"
        for moment, value in optimizer.state[parameter].items():
            moments[f"{moment}/{name}"] = value
    return moments


def _refuse_non_finite(files: dict[str, dict[str, Tensor]], step: int) -> None:
    for content in files.values():
        for name, tensor in content.items():
            if not is_finite(tensor):
                raise GateClosedError(
                    f"pretrain: {name} is not finite after step {step}, so no checkpoint was "
                    "written and the older ones stay; lower the learning rates and run it again"
                )


def _verify(directory: Path, state: State) -> None:
    """Compare both tensor files with the hashes in the state."""
    for name in (_MODEL, _OPTIMIZER):
        path = directory / name
        if not path.is_file():
            raise _refusal(directory, f"a checkpoint with {name}", "none")
        expected, got = state.files[name], _sha256(path)
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
        if not is_finite(tensor):
            raise _refusal(f"{where}:{name}", "finite values", "NaN or infinity")


def _copy_into(targets: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Overwrite the targets' values in place, so that ties and optimiser references hold."""
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(stored[name])


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _refusal(where: str | Path, expected: str, got: str) -> InputError:
    return InputError(where, expected=expected, got=got, fix=ANOTHER)
