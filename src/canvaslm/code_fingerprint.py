"""Which code can a stage reach, and has any of it changed in a way that could change a result?

DVC hashes the files that a stage declares and follows no import. This room follows them, from the
syntax trees alone (nothing is executed): a stage file, every first-party module that it or its
imports name, the packages on the way to them, and the data files that share a module's stem. Each
file gets a digest of its syntax tree without comments, docstrings and positions, and each pinned
third-party package that is imported anywhere on the way is listed with its version. A module that
is named only in a string, for :func:`importlib.import_module`, or only for type checkers, is not
followed.
"""

import ast
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvaslm.errors import InputError

_PACKAGE = "canvaslm"
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_DISTRIBUTIONS = {"markdown_it": "markdown-it-py", "ruamel": "ruamel.yaml", "yaml": "pyyaml"}


def fingerprint(stage_file: Path, root: Path) -> dict[str, Any]:
    """Describe all the code that a stage can reach.

    Args:
        stage_file: the stage, for example ``stages/pretrain.py``.
        root: the repository, which holds ``src/canvaslm``, ``stages`` and ``constraints.txt``.

    Returns:
        ``stage``; ``files``, a digest for each first-party file; ``packages``, the pinned version
        of each third-party package; ``digest``, one hash over the three.

    Raises:
        InputError: a file is not Python, a first-party module does not exist, or a third-party
            package has no pin.
    """
    pins = _read_pins(root / "constraints.txt")
    files: dict[str, str] = {}
    packages: dict[str, str] = {}
    waiting = [stage_file.resolve()]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(root.resolve()).as_posix()
        if name in files:
            continue
        source = _read(file, root, file.read_bytes())
        files[name] = source.digest
        files |= _data_files(file, root)
        for mention in source.mentions:
            if mention.top in sys.stdlib_module_names:
                continue
            found = _first_party(mention, root)
            if found:
                waiting.extend(found)
            else:
                distribution = _DISTRIBUTIONS.get(mention.top, mention.top).lower()
                packages[distribution] = _pin(distribution, pins, mention)
    content = {"stage": stage_file.stem, "files": files, "packages": packages}
    return content | {"digest": _digest(json.dumps(content, sort_keys=True).encode())}


def source_digests(root: Path) -> dict[str, str]:
    """Digest every Python file of the library, the stages and the tests, as fingerprints do.

    This is what the docs gate reads: which symbols, tests and options there are. A comment changes
    none of them, so the gate depends on these digests and not on the files' bytes.

    Args:
        root: the repository.

    Raises:
        InputError: a file is not Python.
    """
    files = (file for room in ("src", "stages", "tests") for file in (root / room).rglob("*.py"))
    return {
        file.relative_to(root).as_posix(): _read(file, root, file.read_bytes()).digest
        for file in files
    }


@dataclass(frozen=True, kw_only=True)
class _Mention:
    """One module that an import statement names, and where."""

    module: str
    names: tuple[str, ...]  # what `from module import names` takes: perhaps submodules
    where: str

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What counts of one file: the digest of its syntax tree, and what it imports."""

    digest: str
    mentions: tuple[_Mention, ...]


@functools.cache
def _read(file: Path, root: Path, content: bytes) -> _Source:
    """Read a file once, however many stages reach it."""
    tree = _parse(file, content)
    return _Source(
        digest=_digest(_canonical(tree).encode()), mentions=tuple(_mentions(tree, file, root))
    )


def _parse(file: Path, content: bytes) -> ast.Module:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        message = getattr(error, "msg", str(error))
        raise InputError(
            f"{file}:{line}", expected="Python", got=message, fix="correct that line"
        ) from None


def _canonical(node: Any) -> str:
    """Spell a syntax tree without positions, docstrings and empty fields.

    Unlike :func:`ast.dump` this does not depend on the fields that a Python version adds.
    """
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != [] and name != "kind"
        )
        if isinstance(node, ast.Constant):
            fields = iter([repr(node.value)])
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(item) for item in node if not _is_text(item))}]"
    return repr(node)


def _is_text(node: object) -> bool:
    """A statement that is only a string: a docstring, or a comment in its shape."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _data_files(file: Path, root: Path) -> dict[str, str]:
    """Digest what belongs to a module without being one: ``page.py`` brings ``page.html``."""
    return {
        other.resolve().relative_to(root.resolve()).as_posix(): _digest(other.read_bytes())
        for other in file.parent.glob(f"{file.stem}.*")
        if other.suffix not in {".py", ".pyc"} and other.is_file()
    }


def _mentions(tree: ast.Module, file: Path, root: Path) -> Iterator[_Mention]:
    """List every import statement that can run, at any depth."""
    for node in _running(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Mention(module=alias.name, names=(), where=f"{file}:{node.lineno}")
        elif isinstance(node, ast.ImportFrom):
            yield _Mention(
                module=_absolute(node, file, root),
                names=tuple(alias.name for alias in node.names),
                where=f"{file}:{node.lineno}",
            )


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the statements of a tree, but not into what stands there for type checkers only."""
    yield node
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = node.orelse
    for child in children:
        if isinstance(child, _STATEMENTS):  # no expression holds an import
            yield from _running(child)


def _absolute(node: ast.ImportFrom, file: Path, root: Path) -> str:
    """The module of ``from module import``, also of a relative one."""
    if node.level == 0:
        return node.module or ""
    source = (root / "src").resolve()
    if not file.is_relative_to(source):
        raise InputError(
            f"{file}:{node.lineno}",
            expected="an absolute import in a stage",
            got="a relative one",
            fix="name the module in full",
        )
    package = file.relative_to(source).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _first_party(mention: _Mention, root: Path) -> list[Path]:
    """The files that importing the module runs: packages on the way, itself, submodules."""
    stage = root / "stages" / f"{mention.module}.py"
    if stage.is_file():
        return [stage.resolve()]
    if mention.top != _PACKAGE:
        return []
    parts = mention.module.split(".")
    found = [_module_file(root, parts[:depth], mention) for depth in range(1, len(parts) + 1)]
    for name in mention.names:
        submodule = root.joinpath("src", *parts, name)
        for file in (submodule.with_suffix(".py"), submodule / "__init__.py"):
            if file.is_file():
                found.append(file.resolve())
    return found


def _module_file(root: Path, parts: list[str], mention: _Mention) -> Path:
    base = root.joinpath("src", *parts)
    for file in (base / "__init__.py", base.with_suffix(".py")):
        if file.is_file():
            return file.resolve()
    raise InputError(
        mention.where,
        expected="a module of this project",
        got=f"{'.'.join(parts)}, which no file defines",
        fix="correct the import, or give the package an __init__.py",
    )


def _read_pins(file: Path) -> dict[str, str]:
    """Read ``name==version`` lines."""
    pins = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==([^\s;#]+)", line)
        if match:
            pins[match[1].lower()] = match[2]
    return pins


def _pin(distribution: str, pins: dict[str, str], mention: _Mention) -> str:
    if distribution not in pins:
        raise InputError(
            mention.where,
            expected="a third-party package that constraints.txt pins",
            got=mention.module,
            fix=f"add {distribution}==VERSION to constraints.txt",
        )
    return pins[distribution]
