"""How much slower or leaner is the chunked loss than the dense one, and than everybody else's?

Forward and backward to hidden states and head, in turn, in multiples of the three matrix products
that no form can avoid, made into memory that is used again. Of the large sizes some are timed
without the others, which take minutes there, or not at all, unless `--all` asks for them. Memory is
what a fresh process takes beyond the inputs and their gradients. Then the distance of gradients
from those of float64, and the soft embedding in multiples of its two products.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from harness import CPU, begin, finish, fresh_peak_bytes, parser, refuse, track

from canvaslm.device import Precision
from canvaslm.loss import chunked_cross_entropy, dense_cross_entropy
from canvaslm.measure import Timing, interleaved_seconds, seconds
from canvaslm.scores import soft_embedding
from loss_forms import COMPILED, OURS, Inputs, draw_inputs, ours, peers, products, torch_default

_VOCAB = 50_257
_TYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_UNIT, _WIDE_UNIT = "three_products", "three_products_float32"
_TOKENS = (1024, 4096)
_LEAN_PEERS: dict[Precision, tuple[str, ...]] = {
    "float32": ("torch_best_options", "checkpointed_chunks"),
    "bfloat16": ("torch_best_options",),  # much the leaner of the two in float32
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """One size in one type."""

    precision: Precision
    width: int
    tokens: int
    threads: int = 1
    share: float  # of the rounds that the options say
    vocab: int = _VOCAB
    has_peers: bool = True

    @property
    def place(self) -> str:
        """The beginning of its ids."""
        size = f"D{self.width}_N{self.tokens}"
        if self.vocab != _VOCAB:
            size += f"_V{self.vocab}"
        return f"loss/{self.precision}/{size}/threads{self.threads}"


@dataclass(kw_only=True)
class Found:
    """Rows and ratios so far."""

    rows: list[dict[str, str | int | float | None]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Time size by size, measure memory and distances, print and write."""
    options = parser(__doc__, "loss", rounds=3)
    options.add_argument("--all", action="store_true", help="every form at every size: minutes")
    options.add_argument(
        "--only",
        help="time only sizes whose id has this in it, such as D256_N1024; goes to partial/",
    )
    chosen = options.parse_args()
    begin(chosen)
    groups, found = _groups(chosen), Found()
    found.reasons["liger"] = "its kernels are Triton's, for a GPU; bench/gpu_gates.py has it"
    if not groups:
        refuse(f"--only: expected a part of an id such as D256_N1024, got {chosen.only!r}")
    if not chosen.tiny:
        _use_memory_once()
    for group in track(groups, total=len(groups), label="sizes"):
        if group.threads > torch.multiprocessing.cpu_count():
            found.ratios[f"{group.place}/ours_over_products"] = None
            found.reasons[f"threads{group.threads}"] = "this machine has fewer cores"
            continue
        torch.set_num_threads(group.threads)
        rounds = max(1, round(chosen.rounds * group.share))
        _time(group, rounds, found, is_tiny=chosen.tiny)
    torch.set_num_threads(chosen.threads)
    if not chosen.only:
        _measure_distances(found, is_tiny=chosen.tiny)
        for width in (32,) if chosen.tiny else (256, 1024):
            _time_expectation(width, 64 if chosen.tiny else 1024, found, tiny=chosen.tiny)
    if not chosen.only and not chosen.tiny:
        torch.set_num_threads(torch.multiprocessing.cpu_count())
        _measure_memory(found)
        torch.set_num_threads(chosen.threads)
    finish(chosen, rows=found.rows, ratios=found.ratios, not_measured=found.reasons)


def _groups(options: argparse.Namespace) -> Sequence[Group]:
    if options.tiny:
        small = Group(precision="float32", width=32, tokens=64, vocab=1000, share=1.0)
        return [small, replace(small, precision="bfloat16")]
    size = functools.partial(Group, threads=options.threads)
    few, many = _TOKENS
    groups = [
        size(precision="float32", width=192, tokens=many, vocab=2048, share=1.6),
        size(precision="float32", width=256, tokens=few, share=1.0),
        size(precision="float32", width=256, tokens=many, share=0.2),
        size(precision="float32", width=1024, tokens=few, share=0.4),
        size(precision="float32", width=1024, tokens=many, share=0.2, has_peers=options.all),
        size(precision="bfloat16", width=256, tokens=few, share=0.4),
        size(precision="bfloat16", width=256, tokens=many, share=0.2, has_peers=options.all),
        size(precision="bfloat16", width=1024, tokens=few, share=0.2, has_peers=options.all),
    ]
    if options.all:
        groups.append(size(precision="bfloat16", width=1024, tokens=many, share=0.2))
    if options.threads == 1:
        narrow = [group for group in groups if group.width == 256]
        groups += [replace(group, threads=2, has_peers=False) for group in narrow]
    return [group for group in groups if (options.only or "") in group.place]


def _use_memory_once() -> None:
    """Let the dense form find pages that were used before, as in the second step of a training.

    A virtual machine takes seconds to get a gigabyte that it has never used.
    """
    torch.empty(4, max(_TOKENS), _VOCAB).fill_(1.0)


def _time(group: Group, rounds: int, found: Found, *, is_tiny: bool) -> None:
    """Everything in turn; ours and the products twice as often, as most ratios are theirs."""
    inputs = draw_inputs(width=group.width, tokens=group.tokens, vocab=group.vocab)
    pair = {
        _UNIT: products(inputs, _TYPES[group.precision]),
        OURS: ours(inputs, group.precision),
    }
    if group.precision != "float32" and group.width == 256:
        pair[_WIDE_UNIT] = products(inputs, torch.float32)
    others = peers(inputs, group.precision) if group.has_peers else {}
    is_small = group.tokens * group.width < 2**20
    first_s: float | None = None
    if is_tiny:
        others.pop(COMPILED, None)
        found.reasons[COMPILED] = "it compiles for longer than the tiny form may take"
    if COMPILED in others:
        first_s = seconds(others[COMPILED], device=CPU)
    timings = interleaved_seconds(
        pair | others, device=CPU, rounds=rounds, warmup_rounds=1 if is_small else 0
    )
    again = interleaved_seconds(pair, device=CPU, rounds=rounds, warmup_rounds=0)
    for name, timing in again.items():
        timings[name] = Timing(rounds_s=timings[name].rounds_s + timing.rounds_s)
    if others and group.width == 256 and group.tokens == 1024 and group.precision == "float32":
        once_s = seconds(torch_default(inputs, group.precision), device=CPU)
        timings["torch_default_options"] = Timing(rounds_s=(once_s,))
    medians = {name: timing.median_s for name, timing in timings.items()}
    for name, median_s in medians.items():
        found.rows.append(
            {
                "size": group.place,
                "form": name,
                "median_s": median_s,
                "over_products": median_s / medians[_UNIT],
                "first_call_s": first_s if name == COMPILED else None,
            }
        )
    found.ratios[f"{group.place}/ours_over_products"] = medians[OURS] / medians[_UNIT]
    if _WIDE_UNIT in medians:
        ratio = medians[OURS] / medians[_WIDE_UNIT]
        found.ratios[f"{group.place}/ours_over_float32_products"] = ratio
    best = f"{group.place}/ours_over_best_peer"
    if others:
        found.ratios[best] = medians[OURS] / min(medians[name] for name in others)


def _measure_memory(found: Found) -> None:
    """Bytes beyond inputs and gradients, of ours and of the leanest others."""
    sizes = {"width": 1024, "tokens": 4096, "vocab": _VOCAB}
    logits_bytes = 4 * sizes["tokens"] * _VOCAB
    given = 4 * sizes["width"] * (sizes["tokens"] + _VOCAB)
    for precision in _TYPES:
        extra: dict[str, int] = {}
        for form in (OURS, *_LEAN_PEERS[precision]):
            arguments = {"form": form, "precision": precision, **sizes}
            peak = fresh_peak_bytes("loss_forms:prepare", arguments, processes=1)
            if peak is None:
                continue
            extra[form] = peak - given
            found.rows.append(
                {
                    "memory": f"loss/{precision}/D1024_N4096",
                    "form": form,
                    "extra_bytes": extra[form],
                    "extra_over_float32_logits": extra[form] / logits_bytes,
                }
            )
        place = f"loss/{precision}/D1024_N4096/threads1"
        for name in ("ours_extra_over_logits", "ours_extra_over_leanest_peer"):
            found.ratios[f"{place}/{name}"] = None
        if OURS not in extra:
            found.reasons["ours_extra"] = "this machine does not say what a process takes"
            continue
        leanest = min(extra[form] for form in _LEAN_PEERS[precision])
        found.ratios[f"{place}/ours_extra_over_logits"] = extra[OURS] / logits_bytes
        found.ratios[f"{place}/ours_extra_over_leanest_peer"] = extra[OURS] / leanest


def _measure_distances(found: Found, *, is_tiny: bool) -> None:
    """Gradients against those of float64, at scores of several nats; ours over chunk sizes."""
    far = 0.0
    for precision, dtype in _TYPES.items():
        inputs = draw_inputs(width=128, tokens=1024, vocab=4096, spread=5.0, dtype=dtype)
        truth = _gradients_of_dense(inputs, torch.float64)
        dense = _distance(_gradients_of_dense(inputs, dtype), truth)
        for chunk in (64, 1024, 4096):
            nats = chunked_cross_entropy(
                inputs.hidden,
                inputs.weight,
                inputs.targets,
                vocab_chunk=chunk,
                reduction="mean",
            )
            gradients = torch.autograd.grad(nats, (inputs.hidden, inputs.weight))
            distance = _distance(gradients, truth)
            far = max(far, distance / dense if precision == "float32" else distance)
            found.rows.append(_distance_row(precision, OURS, distance, chunk))
        name = "gradient_error_over_dense" if precision == "float32" else "relative_error"
        found.ratios[f"loss/{precision}/{name}"] = far
        far = 0.0
        for form, run in peers(inputs, precision).items():
            if form == COMPILED and is_tiny:
                continue
            run()
            assert inputs.hidden.grad is not None
            assert inputs.weight.grad is not None
            distance = _distance((inputs.hidden.grad, inputs.weight.grad), truth)
            found.rows.append(_distance_row(precision, form, distance))


def _distance_row(
    precision: Precision, form: str, distance: float, vocab_chunk: int | None = None
) -> dict[str, str | int | float | None]:
    return {
        "type": precision,
        "form": form,
        "vocab_chunk": vocab_chunk,
        "gradient_relative_error": distance,
    }


def _gradients_of_dense(inputs: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (inputs.hidden, inputs.weight))
    nats = dense_cross_entropy(hidden, weight, inputs.targets, reduction="mean")
    return torch.autograd.grad(nats, (hidden, weight))


def _distance(gradients: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """The larger of the two relative distances, by norm."""
    pairs = zip(gradients, truth, strict=True)
    return max(float((mine.double() - true).norm() / true.norm()) for mine, true in pairs)


def _time_expectation(width: int, tokens: int, found: Found, *, tiny: bool) -> None:
    """``softmax(hidden @ weight.T) @ weight`` and the log-sum-exp, over two products."""
    inputs = draw_inputs(width=width, tokens=tokens, vocab=1000 if tiny else _VOCAB)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    scores, mixed = torch.empty(tokens, len(weight)), torch.empty_like(hidden)
    slopes = torch.randn(tokens, len(weight))

    def two_products() -> None:
        torch.mm(hidden, weight.T, out=scores)
        torch.mm(slopes, weight, out=mixed)

    timings = interleaved_seconds(
        {
            "two_products": two_products,
            "soft_embedding": lambda: soft_embedding(hidden, weight, vocab_chunk=8192),
        },
        device=CPU,
        rounds=7,
        warmup_rounds=1,
    )
    ratio = timings["soft_embedding"].median_s / timings["two_products"].median_s
    name = "expectation_over_products" + ("" if width > 256 else f"_D{width}")
    found.ratios[f"loss/float32/{name}"] = ratio
    for form, timing in timings.items():
        found.rows.append({"width": width, "form": form, "median_s": timing.median_s})


if __name__ == "__main__":
    main()
