"""What do all benches share: options, threads, peers, a product to compare with, memory, results?

A bench calls :func:`begin`, times its work by :func:`canvaslm.measure.interleaved_seconds`, and
ends with :func:`finish`, which prints tables on stdout and writes the JSON that ``bench/check.py``
reads. Importing this module puts the checkout's own ``src`` first on the path.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TypeVar

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "src") not in sys.path[:1]:
    sys.path.insert(0, str(ROOT / "src"))

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from canvaslm.device import describe_machine, multiplies_in_tiles
from canvaslm.errors import InputError
from canvaslm.heap import keep_freed_memory
from canvaslm.measure import peak_bytes
from canvaslm.reporting.benches import BenchResult, Scalar
from canvaslm.reporting.files import refuse_read_only, write_json

CPU = torch.device("cpu")
T = TypeVar("T")

_PRODUCT = 2048  # rows and columns of the product whose rate stands for the peak
_WIDTH = 200  # columns of a table where no terminal says how many there are
_FRESH_PROCESSES = 3
_SEED = 1
_MOST = 1000  # threads, or rounds
_versions: dict[str, str] = {}
_reasons: dict[str, str] = {}
_fallbacks: list[str] = []


def parser(
    doc: str | None, name: str, *, rounds: int = 5, threads: int = 1
) -> argparse.ArgumentParser:
    """The options that every bench has; a bench may add its own.

    Args:
        doc: the bench's docstring, shown by ``--help``.
        name: the bench's name: ``options.bench``, and the name of the file that it writes.
        rounds: rounds that are kept unless ``--rounds`` says another number.
        threads: of one operation, unless ``--threads`` says another number.
    """
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.set_defaults(bench=name, usual_threads=threads)
    options.add_argument(
        "--threads",
        type=_count,
        default=threads,
        help="threads of one operation (default %(default)s)",
    )
    options.add_argument(
        "--rounds", type=_count, default=rounds, help="rounds that are kept (default %(default)s)"
    )
    options.add_argument("--tiny", action="store_true", help="seconds; its figures mean nothing")
    options.add_argument(
        "--out",
        type=Path,
        help=f"default reports/bench/{name}.json, {name}_threadsN.json for N other threads, "
        "and below tiny/ with --tiny",
    )
    return options


def begin(options: argparse.Namespace) -> None:
    """Set what must be the same for all that is compared: threads, allocator, seeds.

    Sets ``options.out`` where the user has not.
    """
    sys.excepthook = _say_stopped
    _versions.clear()
    _versions["torch"] = torch.__version__
    _reasons.clear()
    _fallbacks.clear()
    torch.set_num_threads(options.threads)
    torch.manual_seed(_SEED)
    if not keep_freed_memory():
        _fallbacks.append("allocator: freed memory goes back to the kernel (no glibc)")
    only = getattr(options, "only", None)
    if only is not None and options.tiny:
        refuse("--only: expected full sizes, got --tiny; leave one of the two out")
    if options.out is None:
        folder = Path("reports/bench")
        if options.tiny or only is not None:  # bench/check.py does not look there
            folder /= "tiny" if options.tiny else "partial"
        suffix = "" if options.threads == options.usual_threads else f"_threads{options.threads}"
        options.out = folder / f"{options.bench}{suffix}.json"
    _refuse_unwritable(options.out)


def refuse(message: str) -> NoReturn:
    """End with one line on stderr and exit 2."""
    print(message, file=sys.stderr)
    sys.exit(2)


def peer(module_name: str) -> ModuleType | None:
    """Import somebody else's package, and note its version.

    Returns:
        The module, or None where it is absent or does not load here; :func:`finish` writes why
        under ``not_measured``, by the name before the first dot.
    """
    name = module_name.partition(".")[0]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        _reasons[name] = f"not importable ({_one_line(error)}); it is in the extra canvaslm[bench]"
        return None
    except Exception as error:  # foreign code, which may refuse a machine in any way
        _reasons[name] = f"does not load on this machine: {_one_line(error)}"
        return None
    owners = importlib.metadata.packages_distributions().get(name, [name])
    _versions[owners[0]] = importlib.metadata.version(owners[0])
    return module


def noted() -> dict[str, dict[str, str]]:
    """What :func:`peer` noted in this process, for another one to :func:`note`."""
    return {"versions": dict(_versions), "reasons": dict(_reasons)}


def note(found: Mapping[str, Mapping[str, str]]) -> None:
    """Take over what a process of this bench has noted of peers."""
    _versions.update(found["versions"])
    _reasons.update(found["reasons"])


def product_run(
    dtype: torch.dtype, *, device: torch.device = CPU, size: int = _PRODUCT
) -> tuple[Callable[[], object], float]:
    """A large matrix product, to be timed in turn with what is compared with the machine's peak.

    Returns:
        The work, into a buffer that is used again, and its floating-point operations.
    """
    draws = torch.Generator().manual_seed(_SEED)
    left, right = (torch.randn(size, size, generator=draws).to(device, dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out), 2.0 * size**3


def fresh_peak_bytes(
    function_path: str, arguments: Mapping[str, Any], *, processes: int = _FRESH_PROCESSES
) -> int | None:
    """Memory that a piece of work takes beyond what was there before it.

    The work runs once in each of some fresh processes, with the threads of this one and under the
    same allocator.

    Args:
        function_path: ``module:function`` of a file of ``bench/``. The function gets the arguments
            by name, prepares all inputs, and returns the work, which takes none.
        arguments: what JSON can carry.
        processes: how many; one will do for work of many seconds that fills its memory at once.

    Returns:
        The median in bytes; None where this machine gives no answer.
    """
    words = [sys.executable, __file__, function_path, json.dumps(arguments)]
    found: list[int] = []
    for _ in range(processes):
        ran = subprocess.run(
            [*words, str(torch.get_num_threads())], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            raise RuntimeError(f"{function_path} failed in a fresh process:\n{ran.stderr}")
        extra = json.loads(ran.stdout.splitlines()[-1])
        if extra is None:
            return None
        found.append(extra)
    return int(statistics.median(found))


def track(items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
    """Show on stderr how many items are done.

    Nothing is drawn while an item is worked on: a display with a thread of its own would take time
    from what is being measured.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(label, total=total)
        progress.refresh()
        for item in items:
            yield item
            progress.update(task, advance=1, refresh=True)


def finish(
    options: argparse.Namespace,
    *,
    rows: Sequence[Mapping[str, Scalar]],
    ratios: Mapping[str, float | None],
    not_measured: Mapping[str, str] | None = None,
    fallbacks: Sequence[str] = (),
    device: torch.device = CPU,
) -> None:
    """Print what was found and write it to ``options.out``.

    Args:
        options: as :func:`begin` left them.
        rows: what was measured, flat, with units in the keys; rows of equal keys make one table.
        ratios: by id; None where nothing was measured.
        not_measured: why, by the ratio's id or a part of it; what :func:`peer` noted is added.
        fallbacks: what fell back, from what to what.
        device: where it was measured.
    """
    result = BenchResult(
        bench=options.bench,
        machine=_describe(device),
        versions=dict(_versions),
        threads=options.threads,
        tiny=options.tiny,
        rounds=options.rounds,
        rows=[dict(row) for row in rows],
        ratios=dict(ratios),
        not_measured={**_reasons, **(not_measured or {})},
        fallbacks=[*_fallbacks, *fallbacks],
    )
    _show(result)
    write_json(options.out, result.model_dump())
    print(f"written to {options.out}")


def _describe(device: torch.device) -> dict[str, str | int]:
    """The machine, and on a CPU whether it multiplies bfloat16 in tiles (AMX)."""
    found = describe_machine(device)
    if device.type != "cpu":
        return found
    return {**found, "bfloat16_tiles": int(multiplies_in_tiles())}


def _show(result: BenchResult) -> None:
    """Tables of rows and ratios, and below them what is missing."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    machine = ", ".join(f"{key} {value}" for key, value in result.machine.items())
    title = f"{result.bench}{' (tiny: figures mean nothing)' if result.tiny else ''}"
    console.print(f"{title}: {machine}; medians of {result.rounds} rounds", highlight=False)
    for columns in dict.fromkeys(tuple(row) for row in result.rows):
        console.print(_table(columns, (row for row in result.rows if tuple(row) == columns)))
    if result.ratios:
        pairs = ({"ratio": name, "value": value} for name, value in result.ratios.items())
        console.print(_table(("ratio", "value"), pairs))
    for name, why in result.not_measured.items():
        console.print(f"not measured: {name}: {why}", highlight=False, markup=False)
    for what in result.fallbacks:
        console.print(f"fell back: {what}", highlight=False, markup=False)


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Scalar]]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(escape(column), justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(escape(_shown(row[column])) for column in columns))
    return table


def _shown(value: Scalar) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def _say_stopped(
    kind: type[BaseException], error: BaseException, place: TracebackType | None
) -> None:
    """Ctrl-C is a wish and no fault of the code, so it gets one line; anything else a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped; nothing was written", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, place)


def _refuse_unwritable(out: Path) -> None:
    """Before minutes of work, and not after them."""
    if out.is_dir():
        refuse(f"{out}: expected a file to write, got a directory; name a file in it")
    folder = next(place for place in out.absolute().parents if place.is_dir())
    try:
        refuse_read_only(folder)
    except InputError as error:
        refuse(" ".join(str(error).split()))


def _count(text: str) -> int:
    """A whole number from one to a thousand, or argparse's own message."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"a number from 1 to {_MOST} is expected, not {text}")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _extra_bytes(function_path: str, arguments: Mapping[str, Any]) -> int | None:
    """In this process: the peak of the work over what its preparation left."""
    module, _, function = function_path.partition(":")
    work = getattr(importlib.import_module(module), function)(**arguments)
    for dtype in (torch.float32, torch.bfloat16):  # code of the libraries, which is nobody's extra
        product_run(dtype, size=256)[0]()
    _return_freed_memory()
    before = peak_bytes(lambda: None, device=CPU)
    peak = peak_bytes(work, device=CPU)
    return None if before is None or peak is None else max(0, peak - before)


def _return_freed_memory() -> None:
    """Give back what the preparation has freed, or the work would find it there for nothing."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


def _main_of_fresh_process() -> None:
    function_path, arguments, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(_SEED)
    keep_freed_memory()
    print(json.dumps(_extra_bytes(function_path, json.loads(arguments))))


if __name__ == "__main__":
    _main_of_fresh_process()
