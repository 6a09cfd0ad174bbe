"""Would the commands on a page be understood, were they typed as they stand?"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from dvc.cli import DvcParserError
from dvc.cli.parser import get_main_parser

from canvaslm.docs_gate.pages import Block, Fault, Page
from canvaslm.docs_gate.sources import Sources

_SHELLS = {"sh", "shell", "console", "zsh"}
_PLAIN = {
    "cat",
    "cd",
    "cp",
    "echo",
    "export",
    "git",
    "head",
    "ls",
    "mkdir",
    "nproc",
    "rm",
    "source",
    "tail",
}
_TOOLS = {"ruff", "pyright", "lint-imports", "pre-commit", "pip"}
_SEPARATORS = {"&&", "||", ";", "|"}
_OURS = ("stages/", "src/", "tests/", "bench/", "configs/", "docs/", "requirements/", ".ci/")


def check_commands(page: Page, sources: Sources) -> Iterator[Fault]:
    """Find commands in ``bash`` blocks with an unknown target, stage, option, key or file."""
    for block in page.blocks:
        if block.language in _SHELLS:
            message = f"a block of commands is headed bash, not {block.language}"
            yield Fault(file=page.file, line=block.line, kind="command", message=message)
        if block.language != "bash":
            continue
        for line, text in _logical_lines(block):
            for message in _wrong_with(text, sources):
                yield Fault(file=page.file, line=line, kind="command", message=message)


def _logical_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Lines with their continuations joined, each with the number of its first line."""
    started, text = block.line, ""
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if not text:
            started = number
        text += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield started, text
            text = ""
    if text:
        yield started, text


def _wrong_with(text: str, sources: Sources) -> Iterator[str]:
    """What is wrong with one line of shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        yield f"{text!r} is not shell: {error}"
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word not in _SEPARATORS:
            command.append(word)
            continue
        while command and re.fullmatch(r"[A-Za-z_]\w*=.*", command[0]):
            command = command[1:]
        if command:
            yield from _wrong_with_command(command, sources)
        command = []


def _wrong_with_command(words: list[str], sources: Sources) -> Iterator[str]:
    name, arguments = Path(words[0]).name, words[1:]
    for word in words:
        if word.startswith(_OURS) and not (sources.root / word.partition("::")[0]).exists():
            yield f"there is no {word.partition('::')[0]}"
    if name == "make":
        yield from _wrong_with_make(arguments, sources)
    elif name == "dvc":
        yield from _wrong_with_dvc(arguments, sources)
    elif name in {"python", "python3", "python3.11"}:
        yield from _wrong_with_python(arguments, sources)
    elif name == "pytest":
        return
    elif name not in _PLAIN | _TOOLS and not (sources.root / words[0]).is_file():
        yield f"{words[0]!r} is no command that this project knows"


def _wrong_with_make(arguments: list[str], sources: Sources) -> Iterator[str]:
    for word in arguments:
        variable, is_assigned, value = word.partition("=")
        if is_assigned and variable == "NAME":
            if not (sources.root / "configs" / f"{value}.yaml").is_file():
                yield f"there is no profile {value} in configs/"
        elif not is_assigned and not word.startswith("-") and word not in sources.make_targets:
            yield f"there is no make target {word}"


def _wrong_with_dvc(arguments: list[str], sources: Sources) -> Iterator[str]:
    """Ask DVC's own parser, then look up the stages and keys that the command names."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where the parser prints its help
            parsed = get_main_parser().parse_args(arguments)
    except DvcParserError:
        yield f"DVC does not understand `dvc {' '.join(arguments)}`"
        return
    except SystemExit:  # --help and --version
        return
    if arguments[0] in {"repro", "status"} or arguments[:2] == ["exp", "run"]:
        for target in parsed.targets or []:
            if target not in sources.stage_names:
                yield f"there is no stage {target} in dvc.yaml"
    for change in getattr(parsed, "set_param", None) or []:
        key = change.partition("=")[0].lstrip("+~").removeprefix("params.yaml:")
        if key not in sources.knobs:
            yield f"there is no key {key} in params.yaml"


def _wrong_with_python(arguments: list[str], sources: Sources) -> Iterator[str]:
    """Hold the options of a script against its signature."""
    if not arguments or arguments[0].startswith("-"):
        return
    script = arguments[0]
    if not (sources.root / script).is_file():
        if not script.startswith(_OURS):  # else it is told already
            yield f"there is no {script}"
        return
    options = sources.options_of(script)
    given = {word.partition("=")[0] for word in arguments[1:] if re.match(r"--?[A-Za-z]", word)}
    for option in sorted(given - options.known):
        yield f"{script} has no option {option}; it has {', '.join(sorted(options.known))}"
    for option in sorted(options.required - given):
        if "--help" not in given:
            yield f"{script} needs {option}"
