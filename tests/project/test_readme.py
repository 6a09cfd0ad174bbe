"""Is what the pages say still so?"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from canvaslm.docs_gate import DocsGateParams
from canvaslm.docs_gate.gate import DocsReport, check_docs
from canvaslm.params import load_section

ROOT = Path(__file__).resolve().parents[2]
FRONT = ("Makefile", "dvc.yaml", "params.yaml", "pyproject.toml", "constraints.txt", ".ci/run")


@pytest.fixture(scope="module")
def report() -> DocsReport:
    return check_docs(load_section(ROOT / "params.yaml", "docs_gate", DocsGateParams), ROOT)


@pytest.mark.parametrize(
    "kind", ["page", "citation", "line_citation", "link", "command", "figure", "uncited_symbol"]
)
def test_no_page_says_what_is_not_so(report: DocsReport, kind: str) -> None:
    told = [f"{x.file}:{x.line}: {x.message}" for x in report.faults if x.kind == kind]
    assert told == []


def test_the_readme_shows_commands_and_they_are_checked(report: DocsReport) -> None:
    assert "```bash" in (ROOT / "README.md").read_text()
    assert report.n_checked["command_blocks"] > 0


def tree() -> dict[str, str]:
    """The lines of the README's tree: path and what is said of it."""
    text = (ROOT / "README.md").read_text()
    match = re.search(r"^## The tree\n+```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert match
    lines = [line.split(maxsplit=1) for line in match[1].splitlines()]
    assert all(len(line) == 2 for line in lines), "a line is a path and what it is"
    paths = [path for path, _ in lines]
    assert sorted(set(paths)) == sorted(paths), "a path stands twice"
    return dict(lines)


def promise(file: str) -> str | None:
    """What a file's docstring starts with, else its command's; None where there is none."""
    if not file.endswith(".py"):
        return None
    module = ast.parse((ROOT / file).read_text())
    commands = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == Path(file).stem
    ]
    texts = [text for node in (module, *commands) if (text := ast.get_docstring(node))]
    return texts[0].split("\n\n")[0].replace("\n", " ").removesuffix(".") if texts else None


def tracked() -> list[str]:
    """Every file of the rooms that the tree describes file by file."""
    ran = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "src/canvaslm", "stages", "bench", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        pytest.skip("no git checkout")
    files = [file for file in ran.stdout.splitlines() if (ROOT / file).exists()]
    return sorted(file for file in files if not file.endswith("__init__.py"))


def test_the_tree_has_a_line_for_every_file() -> None:
    assert [file for file in [*tracked(), *FRONT] if file not in tree()] == []


def test_the_tree_names_nothing_that_is_not_there() -> None:
    assert [path for path in tree() if not (ROOT / path).exists()] == []


def test_the_tree_says_of_a_file_what_the_file_says() -> None:
    wrong = {path: promise(path) for path, said in tree().items() if (ROOT / path).is_file()
             and path.startswith(("src/", "stages/", "bench/"))
             and promise(path) not in (None, said)}  # fmt: skip
    assert wrong == {}
