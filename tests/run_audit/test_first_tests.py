"""Is every test that a failed check points at one that there is?"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cited():
    """Each test that the audit names, as file and function."""
    for file in sorted((ROOT / "src/canvaslm/run_audit").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for path, name in re.findall(r"(tests/\S+?\.py)(?:::(\w+))?", node.value):
                    yield file.name, path, name


def test_every_cited_test_exists():
    found = list(cited())
    assert len(found) >= 15
    for where, path, name in found:
        assert (ROOT / path).is_file(), (where, path)
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, (where, path, name)
