"""What does each copy of the sources make of a run, trained and audited by itself?

Run as ``python run_copies.py CASES``, in a process of its own. CASES is JSON: for each name a
folder with ``src``, ``stages`` and the inputs of a run, and the stages to run there one after
another, as the words of their commands. What copies share, the packages that they import, is
imported once, before a process is forked for each copy; nothing of the library is. Each child
leaves ``status.json`` in its folder: the exit status of each stage.
"""

import contextlib
import functools
import importlib
import json
import os
import runpy
import sys
import warnings
from pathlib import Path

SHARED = (
    "torch", "torch._dynamo", "torch.nn.attention.flex_attention", "numpy", "pydantic",
    "safetensors.torch", "ruamel.yaml", "typer", "rich", "jinja2", "matplotlib.figure",
    "matplotlib.backends.backend_svg", "tiktoken", "pyarrow.parquet", "psutil",
)  # fmt: skip
# (torch._dynamo is what every optimiser of torch imports when it is made.)
# Functions of files that no stage here changes: called for each stage, and each section.
READ_OFTEN = (
    ("canvaslm.code_fingerprint", "fingerprint"),
    ("canvaslm.params", "read_yaml"),
)
AT_ONCE = 2


def run_one(folder: Path, lines: list[list[str]]) -> None:
    """Run the stages of one copy in this process."""
    os.chdir(folder)
    os.environ |= {"DVC_STAGE": "copied", "DVC_ROOT": str(folder)}
    sys.path[:0] = [str(folder / "stages"), str(folder / "src")]
    for module, name in READ_OFTEN:
        inside = importlib.import_module(module)
        setattr(inside, name, functools.cache(getattr(inside, name)))
    statuses = []
    with (folder / "told.txt").open("w") as told, contextlib.redirect_stderr(told):
        for script, *options in lines:
            sys.argv, status = [script, *options], 0
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as left:
                status = int(left.code or 0)
            statuses.append(status)
            if status and "audit_run" not in script:
                break
    library = sys.modules["canvaslm"].__file__
    assert library is not None
    assert library.startswith(str(folder)), library
    (folder / "status.json").write_text(json.dumps(statuses))


def run_all(cases: dict[str, tuple[str, list[list[str]]]]) -> None:
    """Run the copies, a few at a time."""
    for name in SHARED:
        importlib.import_module(name)
    running: set[int] = set()
    for folder, lines in cases.values():
        if len(running) == AT_ONCE:
            running.discard(os.wait()[0])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_one(Path(folder), lines)
                status = 0
            finally:
                os._exit(status)
        running.add(child)
    while running:
        running.discard(os.wait()[0])


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    run_all(json.loads(sys.argv[1]))
