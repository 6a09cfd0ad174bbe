"""What does a training do besides arithmetic, and how long does that take?

Windows are read from a shard on the disk, draws are made, steps are recorded in a run's folder and
checkpoints are written there, each by the code that a training runs. A checkpoint is held against
its bare write: the same tensors into the same two files, flushed and renamed, and nothing else.
"""

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness import ROOT

from canvaslm.checkpoint import is_finite, save_checkpoint
from canvaslm.corpus.windows import Windows
from canvaslm.diffusion.corruption import draw_corruption
from canvaslm.randomness import stream
from canvaslm.reporting.files import flush, remove_directory, write_json
from canvaslm.training.loader import open_reader
from canvaslm.training.loop import advance, start
from canvaslm.training.plan import Recipe
from canvaslm.training.run_state import RunState, StepRecord, open_run
from step_work import Step

_CALLS = 50  # of what takes less than a millisecond


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds of one step's reading, draws and records, and of one checkpoint."""

    data_s: float
    draws_s: float
    logging_s: float
    save_s: float  # what the loop waits for
    write_s: float  # of the same bytes
    copy_s: float  # of the same tensors: what a save in a thread would wait for
    finite_s: float  # looking at all of them
    hash_s: float  # of the same bytes, in line
    checkpoint_bytes: int


def measure_overheads(step: Step, *, saves: int) -> Overheads:
    """Time everything that a step of this plan has around its passes.

    Args:
        step: it has been taken, so that moments are not zero.
        saves: checkpoints that are written, with a bare write after each.
    """
    with _folder_of_run(step.plan) as (state, windows):
        save_s, write_s = _time_saves(step, state, saves)
        tensors = [x for named in _tensors(step).values() for x in named.values()]
        return Overheads(
            data_s=_time_reading(step.plan, windows),
            draws_s=_median_s(lambda: _draw(step)) if step.plan.diffusion else 0.0,
            logging_s=_time_records(step, state),
            save_s=save_s,
            write_s=write_s,
            copy_s=_median_s(lambda: [x.clone() for x in tensors], calls=saves),
            finite_s=_median_s(lambda: [is_finite(x) for x in tensors], calls=saves),
            hash_s=_median_s(lambda: [_digest(x) for x in tensors], calls=saves),
            checkpoint_bytes=sum(x.nbytes for x in tensors),
        )


@contextmanager
def _folder_of_run(plan: Recipe) -> Iterator[tuple[RunState, Windows]]:
    """A run's folder and a training split of a hundred steps, on the disk of the checkout."""
    with (
        tempfile.TemporaryDirectory(prefix=".bench_step.", dir=ROOT) as place,
        open_run(Path(place), "run") as state,
    ):
        yield state, _write_shard(Path(place) / "shards", plan)


def _write_shard(place: Path, plan: Recipe) -> Windows:
    """Lay random ids down as `pack_shards` does."""
    V, T = plan.layout.vocab_size, plan.layout.window_tokens
    ids = stream(1, "bench").integers(V, size=100 * plan.pretrain.windows_per_step * T)
    content = ids.astype("<u2").tobytes()
    splits = {}
    for split in ("train", "val"):
        file = place / split / "shard_00000.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        shard = {"file": f"{split}/shard_00000.bin", "tokens": len(ids), "documents": 1}
        digest = hashlib.sha256(content).hexdigest()
        splits[split] = [{**shard, "text_bytes": len(ids), "sha256": digest}]
    (place / "token_bytes.bin").write_bytes(np.ones(V, "<u4").tobytes())
    manifest = {
        "format_version": 1,
        "dtype": "uint16",
        "vocab_size": V,
        "eot_id": 0,
        "tokenizer_sha256": "none",
        "documents_sha256": "none",
        "token_bytes_sha256": "none",
        "splits": splits,
    }
    write_json(place / "manifest.json", manifest)
    return Windows(place, "train", T)


def _time_reading(plan: Recipe, windows: Windows) -> float:
    """Of the windows of one step, in line."""
    params = plan.pretrain.model_copy(update={"loader_workers": 0})
    numbers = iter(range(_CALLS + 1))
    with open_reader(windows, params) as reader:
        return _median_s(lambda: reader.read(next(numbers)))


def _draw(step: Step) -> None:
    """The noise of one step and its coins for a first guess, as the objective draws them."""
    plan, numbers = step.plan, step.numbers
    assert plan.diffusion is not None
    draw_corruption(
        torch.from_numpy(step.windows),
        numbers,
        layout=plan.layout,
        diffusion=plan.diffusion,
        context=plan.diffusion.context,
        tilt=plan.model.tilt,
        seed=plan.pretrain.seed,
    )
    for number in numbers:
        stream(plan.pretrain.seed, "self_conditioning", int(number)).random()


def _time_records(step: Step, state: RunState) -> float:
    """Of one step's lines in both logs and of its counts."""
    params, layout = step.plan.pretrain, step.plan.layout
    record = StepRecord(
        step=0, nats=1.5, targets=step.tokens, gradient_norm=0.5, learning_rate=0.001, cause=""
    )

    def note() -> None:
        state.record(record, seconds=0.5)
        advance(
            start(),
            record,
            params,
            layout,
            lambda windows: step.flops * windows / len(step.windows),
        )

    return _median_s(note)


def _time_saves(step: Step, state: RunState, saves: int) -> tuple[float, float]:
    """Of a checkpoint and of a bare write, in turn; both remove the one before."""
    save_s, write_s = [], []
    for number in range(1, saves + 1):
        save_s.append(_seconds(lambda: _save(step, state, number)))  # noqa: B023, called at once
        write_s.append(_seconds(lambda: _write(step, state.directory, number)))  # noqa: B023
    return statistics.median(save_s), statistics.median(write_s)


def _save(step: Step, state: RunState, number: int) -> None:
    """As the loop does, after a look at the logs."""
    state.flush()
    windows = number * step.plan.pretrain.windows_per_step
    progress = start().model_copy(
        update={
            "step": number,
            "windows_consumed": windows,
            "log_sha256": state.digest(0),
        }
    )
    save_checkpoint(
        state.checkpoints,
        model=step.learner.model,
        optimizer=step.learner.optimizer,
        progress=progress,
        identity={},
        keep_last=1,
    )


def _write(step: Step, root: Path, number: int) -> None:
    """The bytes alone."""
    aside = root / f"bare_{number}.partial"
    aside.mkdir()
    for name, tensors in _tensors(step).items():
        save_file(tensors, aside / name)
        flush(aside / name)
    flush(aside)
    aside.rename(root / f"bare_{number}")
    flush(root)
    remove_directory(root / f"bare_{number - 1}")


def _tensors(step: Step) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint holds, by file."""
    model, state = step.learner.model, step.learner.optimizer.state
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    moments = {
        f"{kind}/{name}": moment
        for name, parameter in model.named_parameters()
        for kind, moment in state[parameter].items()
    }
    return {"model.safetensors": weights, "optimizer.safetensors": moments}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().data).hexdigest()


def _median_s(run: Callable[[], object], *, calls: int = _CALLS) -> float:
    """The middle of some calls after one that warms up."""
    run()
    return statistics.median(_seconds(run) for _ in range(calls))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
