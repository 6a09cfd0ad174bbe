"""Does training keep its promises on a GPU, how fast is it there, and does it fit?

The gates that train: draws, whole steps in their two layouts, resuming, and compiling. Single
passes are in ``gpu_passes.py``.
"""

import gc
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from harness import product_run

from canvaslm.checkpoint import restore, save_checkpoint
from canvaslm.checkpoint_state import Progress
from canvaslm.device import available_bytes
from canvaslm.diffusion.corruption import draw_corruption
from canvaslm.measure import peak_bytes
from canvaslm.training.identity import run_identity
from canvaslm.training.learner import Learner
from canvaslm.training.memory import estimate_memory
from canvaslm.training.plan import Recipe
from gpu_gate import CLOSE, Found, Place, learner_of, objective_of, told, windows_of


def draws(place: Place) -> Found:
    """Noise and first weights are those of the CPU, bit for bit."""
    plan = place.plan(windows_per_step=4, micro_batch_windows=4)
    assert plan.diffusion is not None
    windows, numbers = windows_of(plan)
    noisy = [
        draw_corruption(
            torch.from_numpy(windows).to(device),
            numbers,
            layout=plan.layout,
            diffusion=plan.diffusion,
            context=plan.diffusion.context,
            tilt=plan.model.tilt,
            seed=plan.pretrain.seed,
        )
        for device in (torch.device("cpu"), place.device)
    ]
    same_ids = torch.equal(noisy[0].ids, noisy[1].ids.cpu())
    same_times = torch.equal(noisy[0].times, noisy[1].times.cpu())
    small = place.plan(model={"n_layers": 1})
    here = learner_of(small, place).model.state_dict()
    there = learner_of(small, Place(device=torch.device("cpu"), tiny=place.tiny, rounds=1))
    same_weights = all(
        torch.equal(value, here[name].cpu()) for name, value in there.model.state_dict().items()
    )
    equal = {"noisy ids": same_ids, "times": same_times, "first weights": same_weights}
    return Found(
        rows=[{"drawn": name, "equal_to_cpu": value} for name, value in equal.items()],
        ratios={"equal": float(all(equal.values()))},
        broken=[f"{name} are not those of the CPU" for name, value in equal.items() if not value],
    )


def step(place: Place) -> Found:
    """Whole steps in both layouts: share of the product's rate, peak memory over the estimate."""
    found = Found()
    layouts = {"16x2": (16, True), "8x4": (8, True), "8x4_without_checkpointing": (8, False)}
    for name, (windows, checkpointing) in layouts.items():
        plan = place.plan(
            windows_per_step=place.choose(32, 4),
            micro_batch_windows=place.choose(windows, windows // 8),
            gradient_checkpointing=checkpointing,
        )
        keys = {"share": f"{name}/share_of_peak", "memory": f"{name}/peak_over_estimate"}
        try:
            row = _measured_step(place, plan)
        except (torch.OutOfMemoryError, _TooLargeError) as error:
            found.not_measured[f"step/{name}/"] = told(error)
            found.ratios.update(dict.fromkeys(keys.values()))
            if checkpointing and isinstance(error, torch.OutOfMemoryError):
                found.broken.append(f"{name} was estimated to fit, and does not")
            continue
        finally:
            _give_back(place)
        found.rows.append({"layout": name, "gradient_checkpointing": checkpointing, **row})
        found.ratios[keys["share"]] = row["share_of_peak"]
        found.ratios[keys["memory"]] = row["peak_over_estimate"]
    shares = [found.ratios[f"{name}/share_of_peak"] for name in layouts]
    found.ratios["share_of_peak"] = max((x for x in shares if x is not None), default=None)
    if found.ratios["share_of_peak"] is None:
        found.not_measured["step/share_of_peak"] = "no layout fits"
    return found


def resume(place: Place) -> Found:
    """A run that was killed and went on has the bytes of one that was left alone."""
    plan = place.plan(
        model={"n_layers": 2},
        layout={"canvases_per_window": 4},
        windows_per_step=4,
        micro_batch_windows=2,
        warmup_steps=2,
    )
    straight, again = (_trained(learner_of(plan, place), plan, 0, 4) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        first = learner_of(plan, place)
        _trained(first, plan, 0, 2)
        saved = _saved(first, plan, Path(folder))
        second = learner_of(plan, place)
        restore(saved, model=second.model, optimizer=second.optimizer)
        resumed = _trained(second, plan, 2, 4)
    repeats, resumes = _same(straight, again), _same(straight, resumed)
    broken = [] if resumes else ["a resumed run has other bytes"]
    if not repeats:
        broken.append("two runs of one seed have different bytes on this device")
    rows: list[dict[str, str | bool | int | float | None]] = [
        {"compared": "two straight runs", "equal_bytes": repeats},
        {"compared": "a straight and a resumed run", "equal_bytes": resumes},
    ]
    return Found(rows=rows, ratios={"equal": float(resumes)}, broken=broken)


def compiled(place: Place) -> Found:
    """What compiling the passes gives a step, and what it costs before the first."""
    found = Found()
    seconds, losses = {}, {}
    for name, compile_it in (("eager", False), ("compiled", True)):
        plan = place.plan(
            windows_per_step=place.choose(8, 2),
            micro_batch_windows=place.choose(8, 2),
            gradient_checkpointing=True,
            trace_steps=0,
            compile=compile_it and place.device.type == "cuda",
        )
        row, losses[name] = _first_and_later_steps(place, plan)
        seconds[name] = row["median_s"]
        found.rows.append({"step": name, **row})
        _give_back(place)
    distance = abs(losses["compiled"] / losses["eager"] - 1)
    if not distance <= CLOSE:
        found.broken.append(f"a compiled step's loss is {distance:.2%} off")
    if place.device.type != "cuda":
        found.fallbacks.append("compiled: to the eager step (no CUDA)")
    found.ratios["compiled_over_eager"] = seconds["compiled"] / seconds["eager"]
    return found


class _TooLargeError(Exception):
    """A step that would not fit by its estimate is not tried."""


def _measured_step(place: Place, plan: Recipe) -> dict[str, float]:
    """Seconds, share of the product's rate and peak of whole steps of one layout."""
    estimate = estimate_memory(plan, sliced_attention=place.device.type != "cuda").total
    free = available_bytes(place.device)
    if estimate > free:
        raise _TooLargeError(f"estimated {estimate / 2**30:.1f} GiB, free {free / 2**30:.1f}")
    learner = learner_of(plan, place)
    batch = windows_of(plan)
    learner.take_step(0, *batch)  # what compiles takes memory of its own
    peak = peak_bytes(lambda: learner.take_step(1, *batch), device=place.device) or 0
    product, product_flops = product_run(
        torch.bfloat16, device=place.device, size=place.choose(8192, 128)
    )
    runs = {"step": lambda: learner.take_step(2, *batch), "product": product}
    seconds = place.time(runs, rounds=3, warmup_rounds=1)
    flops = objective_of(plan).flops_of_first(plan.model, plan.pretrain.windows_per_step)
    rate, peak_rate = flops / seconds["step"].median_s, product_flops / seconds["product"].median_s
    tokens = plan.pretrain.windows_per_step * plan.layout.window_tokens
    return {
        "median_s": seconds["step"].median_s,
        "tokens_per_s": tokens / seconds["step"].median_s,
        "tflop_per_s": rate / 1e12,
        "products_tflop_per_s": peak_rate / 1e12,
        "share_of_peak": rate / peak_rate,
        "peak_gib": peak / 2**30,
        "estimate_gib": estimate / 2**30,
        "peak_over_estimate": peak / estimate,
    }


def _first_and_later_steps(place: Place, plan: Recipe) -> tuple[dict[str, float], float]:
    """Seconds of the first step and of later ones, and the first one's nats per token."""
    learner, batch = learner_of(plan, place), windows_of(plan)
    started = time.perf_counter()
    record = learner.take_step(0, *batch)
    first_s = time.perf_counter() - started
    timing = place.time({"step": lambda: learner.take_step(1, *batch)}, rounds=3, warmup_rounds=1)
    loss_nats = (record.nats or float("nan")) / record.targets
    return {"first_s": first_s, "median_s": timing["step"].median_s}, loss_nats


def _trained(learner: Learner, plan: Recipe, start: int, end: int) -> dict[str, Tensor]:
    """Weights and moments after some steps."""
    for number in range(start, end):
        record = learner.take_step(number, *windows_of(plan, number))
        assert not record.cause, record.cause
    moments = {
        f"{key}/{name}": moment
        for name, parameter in learner.model.named_parameters()
        for key, moment in learner.optimizer.state[parameter].items()
    }
    tensors: Mapping[str, Tensor] = {**learner.model.state_dict(), **moments}
    return {name: value.detach().clone() for name, value in tensors.items()}


def _saved(learner: Learner, plan: Recipe, folder: Path) -> Path:
    """A checkpoint after two steps."""
    progress = Progress(
        step=2,
        windows_consumed=2 * plan.pretrain.windows_per_step,
        tokens=2 * plan.pretrain.windows_per_step * plan.layout.window_tokens,
        flops=0.0,
        skipped=(),
        rollbacks=(),
        log_sha256="",
    )
    identity = run_identity(
        plan,
        manifest_sha256="",
        tokenizer_sha256="",
        eot_id=0,
        shards={},
        code_digest="bench",
        parent=None,
    )
    return save_checkpoint(
        folder,
        model=learner.model,
        optimizer=learner.optimizer,
        progress=progress,
        identity=identity,
        keep_last=None,
    )


def _same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def _give_back(place: Place) -> None:
    """Free what is no longer used before the next layout is measured."""
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
