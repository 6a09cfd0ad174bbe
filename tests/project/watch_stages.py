"""Which files of a checkout does each stage open?

Run as ``python watch_stages.py CHECKOUT LINES``, in a process of its own, since an audit hook never
comes off again. LINES is JSON: for each name of a stage of the pipeline the words of its command.
Prints, as JSON and for each name, the exit status and the files opened, but for imports.
"""

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


class Watch:
    """Collects what is opened under a folder, and renames what was written aside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: set[str] = set()

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            name = None if _lies_elsewhere(*arguments) else self._name(arguments[0])
            if name and "importlib" not in sys._getframe(1).f_code.co_filename:
                self.opened.add(name)
        if event == "os.rename":
            old, new = self._name(arguments[0]), self._name(arguments[1])
            if old and new:
                self.opened = {_moved(name, old, new) for name in self.opened}

    def _name(self, path: Any) -> str | None:
        full = os.path.realpath(os.fsdecode(path))
        inside = full.startswith(f"{self.folder}{os.sep}")
        return full[len(str(self.folder)) + 1 :] if inside else None


def _lies_elsewhere(path: Any, mode: str | None, flags: int) -> bool:
    """Whether a name is below a folder that the hook is not told, as where a tree is removed."""
    return mode is None and not flags & os.O_CREAT and not os.path.lexists(path)


def _moved(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name == old or name.startswith(f"{old}/") else name


def _tell_native_opens() -> None:
    """Parquet files are opened by C++, which tells no hook."""
    import pyarrow.parquet as pq

    for kind in (pq.ParquetFile, pq.ParquetWriter):

        def opened(self: Any, source: Any, *rest: Any, _plain: Any = kind.__init__, **more: Any):
            sys.audit("open", source, "b", 0)
            _plain(self, source, *rest, **more)

        setattr(kind, "__init__", opened)  # noqa: B010  types of classes are closed to assignment


def watch(folder: Path, lines: dict[str, list[str]]) -> dict[str, Any]:
    """Run the commands one after another in the folder."""
    os.chdir(folder)
    os.environ |= {"DVC_STAGE": "watched", "DVC_ROOT": str(folder)}
    _tell_native_opens()
    found: dict[str, Any] = {}
    watched = Watch(folder)
    sys.addaudithook(watched.hear)
    for name, (script, *options) in lines.items():
        watched.opened = set()
        sys.argv, status = [script, *options], 0
        sys.path.insert(0, str(folder / "stages"))
        try:
            with contextlib.redirect_stdout(sys.stderr):
                runpy.run_path(script, run_name="__main__")
        except SystemExit as left:
            status = int(left.code or 0)
        files = sorted(file for file in watched.opened if not Path(file).is_dir())
        found[name] = {"status": status, "opened": files}
    return found


if __name__ == "__main__":
    place, commands = sys.argv[1:]
    print(json.dumps(watch(Path(place).resolve(), json.loads(commands))))
