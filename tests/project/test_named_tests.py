"""Is every test that the code tells its reader to run a test that is there?"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from canvaslm.docs_gate.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("src", "stages", "bench")
TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(test_\w+))?")
LEAST_NAMED = 20


def named(source: str) -> Iterator[tuple[str, str]]:
    """File and test in each text of some source; of a file alone the name is empty."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from TEST.findall(node.value)


def is_there(file: str, name: str) -> bool:
    if not (ROOT / file).is_file():
        return False
    return not name or Sources(ROOT).has_symbol(file, name)


def test_every_test_that_the_code_names_is_there() -> None:
    files = [file for place in PLACES for file in (ROOT / place).rglob("*.py")]
    found = {pair for file in files for pair in named(file.read_text(encoding="utf-8"))}
    assert len(found) >= LEAST_NAMED
    assert [f"{file}::{name}" for file, name in sorted(found) if not is_there(file, name)] == []


def test_a_name_in_two_lines_is_read_and_one_that_is_gone_is_noticed() -> None:
    source = 'x = ("python -m pytest -q tests/project/test_named_tests.py::"\n     "test_no_such")'
    assert list(named(source)) == [("tests/project/test_named_tests.py", "test_no_such")]
    assert not is_there("tests/project/test_named_tests.py", "test_no_such")
    assert is_there(
        "tests/project/test_named_tests.py", "test_every_test_that_the_code_names_is_there"
    )
    assert not is_there("tests/project/gone.py", "")
