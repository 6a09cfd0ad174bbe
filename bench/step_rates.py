"""How are steps timed in turn, and which ratios come of it?

A group is some kinds of step at one shape in one arithmetic, perhaps with peers and on several
numbers of threads. All of it runs in turn with a large product of the same type, whose rate is the
peak.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from harness import CPU, product_run

import peers
from canvaslm.device import Precision, multiplies_in_tiles
from canvaslm.measure import interleaved_seconds, seconds
from canvaslm.model.shape import count_parameters
from canvaslm.reporting.benches import Scalar
from canvaslm.training.plan import Recipe
from step_work import Kind, bare_products, build_step, plan_of, random_windows

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCT = "product"
_OVER_ONE = {"two_streams": "two_streams_over_one", "masked": "mask_over_one"}


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is timed in turn.

    Attributes:
        threads: each number of threads that it is timed on; none for those of the options.
        most_rounds: rounds that are kept at most, for steps of many seconds.
        more_in_tiles: times as many rounds where the CPU has tiles for bfloat16, since its steps
            are then so short that a few of them are noise.
    """

    shape: str
    precision: Precision
    kinds: tuple[Kind, ...]
    has_peers: bool = False
    threads: tuple[int, ...] = ()
    most_rounds: int | None = None
    more_in_tiles: int = 1


@dataclass(kw_only=True)
class Found:
    """What a bench has measured so far."""

    rows: list[dict[str, Scalar]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One step to be timed."""

    run: Callable[[], object]
    flops: float
    tokens: int


def time_group(group: Group, found: Found, *, rounds: int, threads: int) -> None:
    """Time a group and add its rows and ratios to what was found.

    Args:
        group: what is timed.
        found: gets the rows and ratios.
        rounds: rounds that are kept, where the group has no lower number.
        threads: those of this process.
    """
    works = _works_of(group, found)
    runs = {name: work.run for name, work in works.items()}
    runs[_PRODUCT], product_flops = product_run(DTYPES[group.precision])
    numbers = group.threads or (threads,)
    timings = interleaved_seconds(
        {f"{name}@{n}": _on_threads(n, run) for name, run in runs.items() for n in numbers},
        device=CPU,
        rounds=min(rounds, group.most_rounds or rounds)
        * (group.more_in_tiles if multiplies_in_tiles() else 1),
        warmup_rounds=1,
    )
    torch.set_num_threads(threads)
    taken = {n: {name: timings[f"{name}@{n}"].median_s for name in runs} for n in numbers}
    for n in numbers if len(numbers) == 1 else numbers[1:]:
        peak = product_flops / taken[n].pop(_PRODUCT)
        for name, work in works.items():
            row = _row(group, n, name, work, taken[n][name], peak)
            found.rows.append(row)
        _add_ratios(group, n, works, taken[n], peak, found)
    for n in numbers[1:]:
        for name, median_s in taken[n].items():
            gain = taken[numbers[0]][name] / median_s
            found.ratios[f"{_place(group)}/{name}_threads{n}_over_threads{numbers[0]}"] = gain


def _works_of(group: Group, found: Found) -> dict[str, _Work]:
    """The steps of a group by name. A peer has the twin's matrices, so the twin's arithmetic."""
    works = {}
    for kind in group.kinds:
        plan = plan_of(group.shape, kind, precision=group.precision)
        step = build_step(plan, masked=kind == "masked")
        works[str(kind)] = _Work(run=step.run, flops=step.flops, tokens=step.tokens)
    if group.has_peers:
        twin = plan_of(group.shape, "autoregressive", precision=group.precision)
        own = works["autoregressive"]
        for name, run in _peers_of(twin, found).items():
            works[name] = _Work(run=run, flops=own.flops, tokens=own.tokens)
        run, flops = bare_products(twin)
        works["bare_products"] = _Work(run=run, flops=flops, tokens=own.tokens)
    return works


def _peers_of(twin: Recipe, found: Found) -> dict[str, Callable[[], object]]:
    """Steps of peers of the twin's size: a Llama, with the faster attention, and nanochat's GPT."""
    windows = random_windows(twin)
    llamas: dict[str, Callable[[], object]] = {}
    for attention in peers.LLAMA_ATTENTIONS:
        llama = peers.build_llama(
            twin.model, twin.layout, attention=attention, max_tokens=twin.layout.window_tokens
        )
        if llama is not None:
            loss = peers.llama_loss(llama)
            llamas[attention] = peers.peer_step(llama, loss, twin.pretrain, windows)
    gpt = peers.NanochatGPT(twin.model, twin.layout)
    step = peers.peer_step(gpt, peers.nanochat_loss(gpt), twin.pretrain, windows)
    if not llamas:
        return {"gpt": step}
    attention = _fastest(llamas)
    told = {"precision": twin.pretrain.precision, "window_tokens": twin.layout.window_tokens}
    found.rows.append({"peer": "llama", "faster_attention": attention, **told})
    return {"llama": llamas[attention], "gpt": step}


def _fastest(runs: Mapping[str, Callable[[], object]]) -> str:
    """The one of the shortest second call."""
    found = {}
    for name, run in runs.items():
        run()
        found[name] = seconds(run, device=CPU)
    return min(found, key=found.__getitem__)


def _add_ratios(
    group: Group,
    threads: int,
    works: Mapping[str, _Work],
    taken: Mapping[str, float],
    peak: float,
    found: Found,
) -> None:
    """Shares of peak, rates of the twin over those of peers, and what two streams cost."""
    place = f"{_place(group)}/threads{threads}"
    for name, work in works.items():
        found.ratios[f"{place}/{name}_share_of_peak"] = work.flops / taken[name] / peak
    if group.has_peers:
        twin_s = taken["autoregressive"]
        llama_s = taken.get("llama")
        found.ratios[f"{place}/autoregressive_over_llama"] = llama_s and llama_s / twin_s
        found.ratios[f"{place}/autoregressive_over_gpt"] = taken["gpt"] / twin_s
        if llama_s is None:
            found.not_measured[f"{place}/autoregressive_over_llama"] = "transformers is absent"
    for name in taken.keys() & _OVER_ONE:
        found.ratios[f"{place}/{_OVER_ONE[name]}"] = taken[name] / taken["one_stream"]


def _row(
    group: Group, threads: int, name: str, work: _Work, median_s: float, peak: float
) -> dict[str, Scalar]:
    plan = plan_of(group.shape, "autoregressive", precision=group.precision)
    return {
        "shape": group.shape,
        "precision": group.precision,
        "threads": threads,
        "step": name,
        "parameters": count_parameters(plan.model, plan.layout),
        "tokens": work.tokens,
        "median_s": median_s,
        "tokens_per_s": work.tokens / median_s,
        "share_of_peak": work.flops / median_s / peak,
        "peak_gflops_per_s": peak / 1e9,
    }


def _place(group: Group) -> str:
    return f"step/{group.shape}/{group.precision}"


def _on_threads(n: int, run: Callable[[], object]) -> Callable[[], object]:
    def threaded() -> object:
        torch.set_num_threads(n)
        return run()

    return threaded
