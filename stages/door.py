"""What do all stages share at the door: the library of this checkout, errors, progress.

Importing this module puts the checkout's own ``src`` first on the path, so that a stage started in
a temporary experiment checkout never runs the installed library by mistake.
"""

import errno
import functools
import importlib
import io
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TypeVar

import typer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "src") not in sys.path[:1]:
    sys.path.insert(0, str(ROOT / "src"))

T = TypeVar("T")
PARAMS = Annotated[Path, typer.Option("--params", help="The params file with every knob.")]

# Named as text on purpose: a stage validates the whole file, so that a slip in any section stops
# the pipeline before work starts, yet its result depends only on the sections that it loads.
SECTIONS = {
    "layout": "canvaslm.layout:Layout",
    "model": "canvaslm.model.shape:ModelParams",
    "diffusion": "canvaslm.diffusion.schedule:DiffusionParams",
    "fetch_corpus": "canvaslm.corpus.fetch:FetchParams",
    "collect_documents": "canvaslm.corpus.documents:CollectParams",
    "train_tokenizer": "canvaslm.corpus.tokenizer:TokenizerParams",
    "pack_shards": "canvaslm.corpus.shards:PackParams",
    "audit_windows": "canvaslm.corpus.audit:AuditParams",
    "pretrain": "canvaslm.training.plan:PretrainParams",
    "audit_run": "canvaslm.run_audit.params:AuditRunParams",
    "eval_loss_parity": "canvaslm.evaluation.parity_params:EvalLossParityParams",
    "eval_bound": "canvaslm.evaluation.bound_params:EvalBoundParams",
    "eval_speedup": "canvaslm.evaluation.speedup_params:EvalSpeedupParams",
    "eval_samples": "canvaslm.evaluation.samples_params:EvalSamplesParams",
    "generate": "canvaslm.evaluation.speedup_params:GenerateParams",
    "docs_gate": "canvaslm.docs_gate:DocsGateParams",
    "report": "canvaslm.reporting.page:ReportParams",
}
NOT_SECTIONS = {"profile"}
SECONDS_BETWEEN_LINES = 10.0
_INTERRUPTED = "interrupted; the same command again goes on or starts over"
_STATUS_OF_INTERRUPT = 130


def _tell_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End in one line also when Ctrl-C comes before or after the stage itself."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"{_INTERRUPTED}\n")
        sys.exit(_STATUS_OF_INTERRUPT)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _tell_interrupt


def main(stage: Callable[..., None]) -> None:
    """Run one stage as a command: exit 0 done, 1 a gate is closed, 2 bad input."""
    importlib.import_module("canvaslm.leash").end_with_dvc()  # as text: it changes no result
    importlib.import_module("canvaslm.heap").keep_freed_memory()  # nor does this
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_guarded(stage))
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:  # what is wrong with the command line itself
        told = error.format_message() if hasattr(error, "format_message") else str(error)
        typer.echo(" ".join(f"{sys.argv[0]}: {told.rstrip('.')}; see --help".split()), err=True)
        status = 2
    if status == _STATUS_OF_INTERRUPT:  # typer has caught it, outside the stage itself
        typer.echo(_INTERRUPTED, err=True)
    sys.exit(status if isinstance(status, int) else 0)


def track(items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
    """Yield ``items`` under a progress bar on stderr, or as a line now and then where none fits."""
    if sys.stderr.isatty():
        yield from _bar(items, total, label)
    else:
        yield from _lines(items, total, label)


def say(text: str) -> None:
    """Write text to stdout; what a terminal cannot show, or would obey, is shown as escapes.

    Raises:
        InputError: stdout is closed, so that the text would be lost.
    """
    from canvaslm.errors import InputError

    if sys.stdout is None:
        raise InputError(
            "stdout", expected="an open stream", got="a closed one", fix="send the text somewhere"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdout.isatty():
        shown = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
        text = "".join(shown)
    sys.stdout.write(f"{text}\n")


def validate_params(path: Path) -> None:
    """Read every section of a params file with its model.

    Raises:
        InputError: a section or a key is unknown or missing, or a value does not fit.
    """
    from canvaslm.errors import InputError
    from canvaslm.params import nearest_name, parse_section, read_yaml

    content = read_yaml(path)
    known = [*SECTIONS, *NOT_SECTIONS]
    if not isinstance(content.get("profile"), str):
        raise InputError(
            f"{path}:profile",
            expected="the name of a profile",
            got=repr(content.get("profile")),
            fix="run `make profile NAME=laptop`",
        )
    for name in content:
        if name not in known:
            raise InputError(
                f"{path}:{name}",
                expected="a known section",
                got=repr(name),
                fix=nearest_name(name, known),
            )
    for name, place in SECTIONS.items():
        module, _, attribute = place.partition(":")
        model = getattr(importlib.import_module(module), attribute)
        if name not in content:
            raise InputError(
                f"{path}:{name}",
                expected="a section of that name",
                got="none",
                fix="run `make profile NAME=laptop`",
            )
        parse_section(content[name], model, where=f"{path}:{name}")


def code_digest(stage: str) -> str:
    """One hash over the code that a stage can reach, taken now and not from a file.

    The module is named as text, so that an edit of how fingerprints are made retrains nothing.
    """
    code = importlib.import_module("canvaslm.code_fingerprint")
    return code.fingerprint(ROOT / "stages" / f"{stage}.py", ROOT)["digest"]


def _guarded(stage: Callable[..., None]) -> Callable[..., None]:
    """Turn what a user can put right into one line and an exit status."""

    @functools.wraps(stage)
    def run(*args: Any, **options: Any) -> None:
        from canvaslm.errors import GateClosedError, InputError

        try:
            if "params" in options:
                validate_params(options["params"])
            _note_stale_fingerprint(Path(sys.argv[0]))
            stage(*args, **options)
        except InputError as error:
            _leave(str(error), 2)
        except GateClosedError as error:
            _leave(f"gate closed: {error}", 1)
        except OSError as error:
            _leave(_tell(error), 2)
        except KeyboardInterrupt:
            _leave(_INTERRUPTED, _STATUS_OF_INTERRUPT)

    return run


def _leave(line: str, status: int) -> None:
    """Say it in one line on stderr and exit."""
    typer.echo(" ".join(line.split()), err=True)
    sys.exit(status)


def _tell(error: OSError) -> str:
    """One line for what the operating system refused."""
    place, reason = error.filename or "the disk", error.strerror or str(error)
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        place, _, reason = error.args[0][0]  # of a tree that was copied: (from, to, why)
        reason = re.sub(r"^\[Errno \d+\] |: '.*'$", "", str(reason))
    full = (errno.ENOSPC, errno.EDQUOT)
    if error.errno in full or reason in map(os.strerror, full):
        return f"{place}: expected room to write, got no space left; free some and run it again"
    return f"{place}: expected access, got {reason}; check the path and its rights"


def _note_stale_fingerprint(script: Path) -> None:
    """Say so when a stage that is started by hand no longer is what its fingerprint file says."""
    recorded = Path("reports/code") / f"{script.stem}.json"
    if "DVC_STAGE" in os.environ or not recorded.is_file():
        return
    code = importlib.import_module("canvaslm.code_fingerprint")
    files = importlib.import_module("canvaslm.reporting.files")
    if files.to_json(code.fingerprint(ROOT / "stages" / script.name, ROOT)) != recorded.read_text():
        logging.getLogger("door").warning(
            "%s is older than the code that runs now; `dvc repro` will run this stage again",
            recorded,
        )


def _bar(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """A rich progress bar: label, bar, count, rate, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeLeft(),
    )
    started_at = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total, rate="")
        for done, item in enumerate(items, start=1):
            yield item
            rate = done / max(time.monotonic() - started_at, 1e-9)
            progress.update(task, advance=1, rate=f"{rate:.3g}/s")


def _lines(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """A line on stderr every few seconds, for logs."""
    log = logging.getLogger("progress")
    started_at = told_at = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - told_at >= SECONDS_BETWEEN_LINES:
            rate = done / (now - started_at)
            left_s = (total - done) / rate
            log.info("%s: %d/%d, %.3g/s, %.0f s left", label, done, total, rate, left_s)
            told_at = now
