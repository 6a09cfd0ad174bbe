"""Are single passes right and fast on a GPU: a step in bfloat16, attention, and the loss?

Each against a form that is written out, and against those of others.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from harness import peer, product_run

from canvaslm.loss import chunked_cross_entropy, dense_cross_entropy
from canvaslm.measure import peak_bytes
from canvaslm.model.attention import block_causal_attention, canvas_attention, masked_attention
from canvaslm.randomness import stream
from gpu_gate import CLOSE, Found, Place, learner_of, told, windows_of


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
        broken=[] if distance <= CLOSE else [f"the loss is {distance:.2%} off float32's"],
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
            if distance > (2e-3 if dtype == torch.float32 else CLOSE):
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
