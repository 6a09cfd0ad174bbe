"""What do the sources offer: symbols, options of commands, make targets, stages, keys?"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvaslm.errors import InputError
from canvaslm.params import read_yaml

_NO_SYMBOLS = {"TypeVar", "ParamSpec", "getLogger"}  # calls whose result is not for users


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options that a script's command line knows."""

    known: frozenset[str]
    required: frozenset[str]


class Sources:
    """The sources of a repository, read from syntax trees and never executed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}

    def tree(self, file: str) -> ast.Module:
        """The syntax tree of a file of the repository.

        Raises:
            InputError: it is not Python.
        """
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse((self.root / file).read_bytes())
            except SyntaxError as error:
                raise InputError(
                    f"{file}:{error.lineno}",
                    expected="Python",
                    got=error.msg,
                    fix="correct that line",
                ) from None
        return self._trees[file]

    def has_symbol(self, file: str, dotted: str) -> bool:
        """Whether the file defines the name; ``Class.member`` for what a class holds."""
        body: list[ast.stmt] = self.tree(file).body
        for part in dotted.split("."):
            definition = dict(_definitions(body)).get(part)
            if definition is None:
                return False
            body = definition.body if isinstance(definition, ast.ClassDef) else []
        return True

    def public_symbols(self) -> list[tuple[str, str, int]]:
        """Every public top-level symbol of the library: file, name, line."""
        return [
            (file, name, node.lineno)
            for file in self._python_files("src/canvaslm")
            for name, node in _definitions(self.tree(file).body)
            if not name.startswith("_") and not _is_plumbing(node)
        ]

    def options_of(self, script: str) -> CommandOptions:
        """The options of a stage (from its typer signature) or of a script (from its literals)."""
        known, required = {"--help"}, set()
        for function in self._commands(script):
            for argument, default in _with_defaults(function):
                names = self._option_names(argument, script)
                known |= names
                if default is None and names:
                    required |= {sorted(names)[-1]}
        if len(known) == 1:
            for file in (script, *self._harness_of(script)):
                literals = (
                    x.value for x in ast.walk(self.tree(file)) if isinstance(x, ast.Constant)
                )
                known |= {x for x in literals if isinstance(x, str) and x.startswith("--")}
        return CommandOptions(known=frozenset(known), required=frozenset(required))

    @functools.cached_property
    def make_targets(self) -> frozenset[str]:
        """The targets of the Makefile."""
        text = (self.root / "Makefile").read_text(encoding="utf-8")
        return frozenset(re.findall(r"^([A-Za-z][\w-]*):(?!=)", text, flags=re.MULTILINE))

    @functools.cached_property
    def stage_names(self) -> frozenset[str]:
        """The stages of the pipeline, with ``stage@item`` for each item of a matrix."""
        names = set()
        for name, stage in read_yaml(self.root / "dvc.yaml")["stages"].items():
            names.add(name)
            for items in stage.get("matrix", {}).values():
                names |= {f"{name}@{item}" for item in items}
        return frozenset(names)

    @functools.cached_property
    def knobs(self) -> frozenset[str]:
        """The keys of the params file, dotted."""
        return frozenset(_dotted(read_yaml(self.root / "configs" / "base.yaml")))

    def _python_files(self, folder: str) -> list[str]:
        below = (self.root / folder).rglob("*.py")
        return sorted(file.relative_to(self.root).as_posix() for file in below)

    def _harness_of(self, script: str) -> list[str]:
        """The file beside a script that gives it the options which all such scripts share."""
        harness = f"{Path(script).parent.as_posix()}/harness.py"
        imports = [x for x in ast.walk(self.tree(script)) if isinstance(x, ast.Import)]
        names = {alias.name for node in imports for alias in node.names}
        froms = (x for x in ast.walk(self.tree(script)) if isinstance(x, ast.ImportFrom))
        names |= {node.module or "" for node in froms}
        is_used = "harness" in names and (self.root / harness).is_file()
        return [harness] if is_used else []

    def _commands(self, script: str) -> list[ast.FunctionDef]:
        """The function of a stage that ``main`` turns into a command: it has the file's name."""
        return [
            node
            for node in self.tree(script).body
            if isinstance(node, ast.FunctionDef) and node.name == Path(script).stem
        ]

    def _option_names(self, argument: ast.arg, script: str) -> set[str]:
        annotation: ast.expr | None = argument.annotation
        if isinstance(annotation, ast.Name):
            door = f"{Path(script).parent.as_posix()}/door.py"
            if (self.root / door).is_file():
                annotation = getattr(
                    dict(_definitions(self.tree(door).body)).get(annotation.id), "value", annotation
                )
        if annotation is None or "typer.Argument" in ast.unparse(annotation):
            return set()
        spelled = {
            name.value
            for call in ast.walk(annotation)
            if isinstance(call, ast.Call)
            for name in call.args
            if isinstance(name, ast.Constant) and isinstance(name.value, str)
        }
        if spelled:
            return {name for group in spelled for name in group.split("/")}
        name = argument.arg.replace("_", "-")
        is_flag = re.match(r"(Annotated\[)?bool\b", ast.unparse(annotation))
        return {f"--{name}", f"--no-{name}"} if is_flag else {f"--{name}"}


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that statements define, also those under an ``if``."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _definitions([*node.body, *node.orelse])


def _is_plumbing(node: ast.stmt) -> bool:
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Call):
        return False
    return ast.unparse(value.func).rpartition(".")[2] in _NO_SYMBOLS


def _with_defaults(function: ast.FunctionDef) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    plain = function.args.args
    n_required = len(plain) - len(function.args.defaults)
    yield from zip(plain, [*[None] * n_required, *function.args.defaults], strict=True)
    yield from zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)


def _dotted(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
