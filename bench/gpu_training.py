"""Does training keep its promises on a GPU, how fast is it there, and does it fit?

The gates that train or do a part of it: draws, bfloat16, attention, loss, whole steps in their two
layouts, resuming, and compiling.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from harness import peer, product_run

from canvaslm.checkpoint import restore, save_checkpoint
from canvaslm.checkpoint_state import Progress
from canvaslm.device import available_bytes
from canvaslm.diffusion.corruption import draw_corruption
from canvaslm.loss import chunked_cross_entropy, dense_cross_entropy
from canvaslm.measure import peak_bytes
from canvaslm.model.attention import block_causal_attention, canvas_attention, masked_attention
from canvaslm.randomness import stream
from canvaslm.training.identity import run_identity
from canvaslm.training.learner import Learner
from canvaslm.training.memory import estimate_memory
from canvaslm.training.plan import Recipe
from gpu_gate import Found, Place, learner_of, objective_of, told, windows_of

_CLOSE = 2e-2  # relative, of gradients and losses in bfloat16


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
            n_times=plan.diffusion.train_times,
            context=plan.diffusion.context,
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


def bfloat16(place: Place) -> Found:
    """Rate of products in both types, and the distance of a loss in bfloat16 from float32's."""
    size = place.choose(8192, 128)
    runs, flops = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        runs[name], flops[name] = product_run(dtype, device=place.device, size=size)
    seconds = place.time(runs)
    rates = {name: flops[name] / seconds[name].median_s for name in runs}
    losses = {}
    for precision in ("float32", "bfloat16"):
        plan = place.plan(
            model={"n_layers": 2}, precision=precision, windows_per_step=2, micro_batch_windows=2
        )
        record = learner_of(plan, place).take_step(0, *windows_of(plan))
        losses[precision] = (record.nats or float("nan")) / record.targets
    distance = abs(losses["bfloat16"] / losses["float32"] - 1)
    rows: list[dict[str, str | bool | int | float | None]] = [
        {"type": name, "products_tflop_per_s": rates[name] / 1e12, "loss_nats": losses[name]}
        for name in runs
    ]
    return Found(
        rows=rows,
        ratios={
            "rate_over_float32": rates["bfloat16"] / rates["float32"],
            "loss_distance": distance,
        },
        broken=[] if distance <= _CLOSE else [f"the loss is {distance:.2%} off float32's"],
    )


def attention(place: Place) -> Found:
    """Mask-free attention against a dense mask and a written softmax; values and gradients."""
    B, H, K, E = place.choose((2, 16, 4, 64), (2, 4, 2, 16))
    T, L = place.choose((4096, 256), (64, 16))
    found = Found()
    draws = torch.Generator().manual_seed(1)
    heads = [torch.randn(B, n, T, E, generator=draws) for n in (H, K, K, K, K)]
    canvas = torch.arange(T, device=place.device) // L
    one = canvas[:, None] >= canvas  # (T, T): one stream
    two = torch.cat((canvas[:, None] > canvas, canvas[:, None] == canvas), dim=1)  # (T, 2T)
    forms: dict[str, Callable[..., Tensor]] = {
        "one stream, ours": lambda q, k, v, *_: block_causal_attention(q, k, v, canvas_tokens=L),
        "one stream, dense mask": lambda q, k, v, *_: masked_attention(q, k, v, one),
        "one stream, dense mask, keys repeated": lambda q, k, v, *_: _repeated(q, k, v, one),
        "one stream, written softmax": lambda q, k, v, *_: _written_softmax(q, k, v, one),
        "two streams, ours": lambda q, k, v, ck, cv: canvas_attention(
            q, k, v, ck, cv, canvas_tokens=L, start=0
        ),
        "two streams, dense mask": lambda q, k, v, ck, cv: masked_attention(
            q, torch.cat((ck, k), dim=2), torch.cat((cv, v), dim=2), two
        ),
        "two streams, dense mask, keys repeated": lambda q, k, v, ck, cv: _repeated(
            q, torch.cat((ck, k), dim=2), torch.cat((cv, v), dim=2), two
        ),
    }
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(place.device, dtype).requires_grad_() for x in heads]
        works = {name: _forward_backward(form, inputs) for name, form in forms.items()}
        seconds = place.time(works)
        kind = str(dtype).removeprefix("torch.")
        for stream_name in ("one stream", "two streams"):
            ours, dense = f"{stream_name}, ours", f"{stream_name}, dense mask"
            distance = _distance(works[ours](), works[dense]())
            if distance > (2e-3 if dtype == torch.float32 else _CLOSE):
                found.broken.append(f"{stream_name} in {kind} is {distance:.1e} off a dense mask")
            dense_s = min(seconds[name].median_s for name in (dense, f"{dense}, keys repeated"))
            ratio = seconds[ours].median_s / dense_s
            found.ratios[f"{kind}/{stream_name.replace(' ', '_')}_over_dense_mask"] = ratio
            found.rows.append(
                {"attention": stream_name, "type": kind, "largest_relative_difference": distance}
            )
        for name, timing in seconds.items():
            found.rows.append({"form": name, "type": kind, "median_ms": 1e3 * timing.median_s})
    found.ratios["ours_over_dense_mask"] = found.ratios["bfloat16/one_stream_over_dense_mask"]
    return found


def loss(place: Place) -> Found:
    """Seconds and extra bytes of the loss against dense, torch's own, Apple's and Liger's."""
    N, D, V = place.choose((8192, 1024, 50_257), (64, 32, 512))
    chunk = place.choose(8192, 128)
    draws = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=draws).to(place.device, torch.bfloat16).requires_grad_()
    weight = torch.randn(V, D, generator=draws).mul_(0.02)
    weight = weight.to(place.device, torch.bfloat16).requires_grad_()
    targets = torch.randint(V, (N,), generator=draws).to(place.device)
    forms: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: chunked_cross_entropy(
            hidden, weight, targets, vocab_chunk=chunk, reduction="mean"
        ),
        "dense": lambda: dense_cross_entropy(hidden, weight, targets, reduction="mean"),
        "torch": lambda: functional.linear_cross_entropy(hidden, weight, targets),
    }
    found = Found()
    on_gpu = place.device.type == "cuda"
    apple = peer("cut_cross_entropy") if on_gpu else None  # their kernels need one
    liger = peer("liger_kernel.transformers") if on_gpu else None
    if apple is not None:
        forms["apple"] = lambda: apple.linear_cross_entropy(hidden, weight, targets, impl="cce")
    if liger is not None:
        liger_loss = liger.LigerFusedLinearCrossEntropyLoss()
        forms["liger"] = lambda: liger_loss(weight, hidden, targets)
    works = _working(
        {name: _with_backward(form, (hidden, weight)) for name, form in forms.items()}, found
    )
    works["products"] = _three_products(hidden.detach(), weight.detach())
    seconds = place.time(works)
    truth = dense_cross_entropy(
        hidden.detach().float(), weight.detach().float(), targets, reduction="mean"
    ).item()
    for name, timing in seconds.items():
        resident = torch.cuda.memory_allocated() if on_gpu else 0
        peak = peak_bytes(works[name], device=place.device) if on_gpu else None
        value = forms[name]().item() if name in forms else None
        distance = None if value is None else abs(value / truth - 1)
        found.rows.append(
            {
                "form": name,
                "median_ms": 1e3 * timing.median_s,
                "over_products": timing.median_s / seconds["products"].median_s,
                "extra_over_float32_logits": None
                if peak is None
                else (peak - resident) / (4 * N * V),
                "loss_relative_error": distance,
            }
        )
        if name == "ours" and distance is not None and distance > 3e-3:
            found.broken.append(f"the loss is {distance:.1e} off float32's")
    peers = [
        timing.median_s for name, timing in seconds.items() if name not in ("ours", "products")
    ]
    found.ratios["ours_over_best_peer"] = seconds["ours"].median_s / min(peers)
    found.ratios["ours_over_products"] = seconds["ours"].median_s / seconds["products"].median_s
    return found


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
    if not distance <= _CLOSE:
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
    flops = objective_of(plan).flops_per_window(plan.model) * plan.pretrain.windows_per_step
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
        f"{key}/{name}": learner.optimizer.state[parameter][key]
        for name, parameter in learner.model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
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


def _forward_backward(
    form: Callable[..., Tensor], inputs: list[Tensor]
) -> Callable[[], list[Tensor]]:
    """Work that returns the output and the gradients of queries, keys and values."""
    draws = torch.from_numpy(stream(1, "bench").standard_normal(inputs[0].shape, dtype="float32"))
    slope = draws.to(inputs[0].device, inputs[0].dtype)

    def work() -> list[Tensor]:
        out = form(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs[:3], slope)]

    return work


def _with_backward(form: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(form(), inputs)


def _three_products(hidden: Tensor, weight: Tensor) -> Callable[[], object]:
    """The products that no form can avoid, on logits that are there."""
    slope = hidden @ weight.T
    return lambda: (hidden @ weight.T, slope @ weight, slope.T @ hidden)


def _working(
    works: dict[str, Callable[[], object]], found: Found
) -> dict[str, Callable[[], object]]:
    """Those that run here; a peer that raises is not measured."""
    good = {}
    for name, work in works.items():
        try:
            work()
        except Exception as error:  # foreign code, which may refuse a device in any way
            if name == "ours":
                raise
            found.not_measured[name] = told(error)
        else:
            good[name] = work
    return good


def _repeated(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Under a dense mask, with a key head of its own for every query head: more kernels do that."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def _written_softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention as it is written in a book, in the type of its inputs."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def _distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any value, relative to the largest value."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def _give_back(place: Place) -> None:
    """Free what is no longer used before the next layout is measured."""
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
