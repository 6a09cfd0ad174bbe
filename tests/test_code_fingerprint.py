import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from canvaslm.code_fingerprint import fingerprint, source_digests
from canvaslm.errors import InputError

FILES = {
    "constraints.txt": "numpy==2.4.6\nruamel.yaml==0.19.1\ntorch==2.13.0\n",
    "stages/door.py": "def main(stage):\n    pass\n",
    "stages/work.py": "import door\ndef work():\n    from canvaslm.room.tool import use\n",
    "stages/other.py": "from door import main\n",
    "src/canvaslm/__init__.py": "",
    "src/canvaslm/unused.py": "import torch\n",
    "src/canvaslm/room/__init__.py": "",
    "src/canvaslm/room/tool.py": (
        "from canvaslm.room import table\nfrom . import chair\nimport numpy\n"
    ),
    "src/canvaslm/room/table.py": 'import os\nimport ruamel.yaml\n\n\ndef lay():\n    """Lay."""\n',
    "src/canvaslm/room/chair.py": "from ..floor import plank\n",
    "src/canvaslm/floor.py": "plank = 1\n",
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def of(house: Path, stage: str = "work") -> dict[str, Any]:
    return fingerprint(house / "stages" / f"{stage}.py", house)


def test_the_closure_holds_what_imports_reach_and_nothing_else(house: Path) -> None:
    assert set(of(house)["files"]) == {
        "stages/door.py",
        "stages/work.py",
        "src/canvaslm/__init__.py",
        "src/canvaslm/floor.py",
        "src/canvaslm/room/__init__.py",
        "src/canvaslm/room/chair.py",
        "src/canvaslm/room/table.py",
        "src/canvaslm/room/tool.py",
    }
    assert set(of(house, "other")["files"]) == {"stages/door.py", "stages/other.py"}


@pytest.mark.parametrize(
    "text",
    [
        "if a:\n    pass\nelif b:\n    {}\n",
        "try:\n    pass\nexcept OSError:\n    {}\n",
        "try:\n    pass\nfinally:\n    {}\n",
        "match a:\n    case 1:\n        {}\n",
        "class A:\n    async def f(self):\n        with a:\n            {}\n",
        "for a in b:\n    pass\nelse:\n    {}\n",
    ],
)
def test_an_import_is_found_wherever_a_statement_may_stand(house: Path, text: str) -> None:
    (house / "stages/work.py").write_text(text.format("import canvaslm.floor"))
    assert "src/canvaslm/floor.py" in of(house)["files"]


def test_pinned_versions_of_imported_packages_belong_to_it(house: Path) -> None:
    before = of(house)
    assert before["packages"] == {"numpy": "2.4.6", "ruamel.yaml": "0.19.1"}
    pins = house / "constraints.txt"
    pins.write_text(pins.read_text().replace("torch==2.13.0", "torch==2.14.1"))
    assert of(house) == before
    pins.write_text(pins.read_text().replace("numpy==2.4.6", "numpy==2.5.0"))
    assert of(house)["digest"] != before["digest"]


@pytest.mark.parametrize(
    "name",
    sorted(set(FILES) - {"constraints.txt", "stages/other.py", "src/canvaslm/unused.py"}),
)
def test_an_edit_of_code_in_the_closure_changes_it(house: Path, name: str) -> None:
    before = of(house)
    (house / name).write_text(FILES[name] + "added = 1\n")
    after = of(house)
    changed = {file for file in after["files"] if after["files"][file] != before["files"][file]}
    assert changed == {name}
    assert after["digest"] != before["digest"]


def test_comments_docstrings_and_layout_do_not_change_it(house: Path) -> None:
    before = of(house)
    (house / "src/canvaslm/room/table.py").write_text(
        '"""A module."""\n\n# why\nimport os\n'
        'import ruamel.yaml  # reads\n\ndef lay(\n):\n    """Lay it well."""\n'
    )
    assert of(house) == before


def test_an_edit_outside_the_closure_does_not_change_it(house: Path) -> None:
    before = of(house)
    (house / "src/canvaslm/unused.py").write_text("import torch\nadded = 1\n")
    assert of(house) == before


def test_a_value_and_its_type_both_count(house: Path) -> None:
    digests = set()
    for value in ("1", "1.0", "True", "'1'", "b'1'", "-1"):
        (house / "src/canvaslm/floor.py").write_text(f"plank = {value}\n")
        digests.add(of(house)["digest"])
    assert len(digests) == 6


def test_a_data_file_beside_its_module_belongs_to_it(house: Path) -> None:
    before = of(house)
    (house / "src/canvaslm/room/table.html").write_text("<p>")
    with_file = of(house)
    assert set(with_file["files"]) - set(before["files"]) == {"src/canvaslm/room/table.html"}
    (house / "src/canvaslm/room/table.html").write_text("<b>")
    assert of(house)["digest"] != with_file["digest"]


def test_a_module_named_in_a_string_is_not_followed(house: Path) -> None:
    (house / "stages/other.py").write_text('PLACE = "canvaslm.room.tool"\n')
    assert set(of(house, "other")["files"]) == {"stages/other.py"}


def test_an_import_for_type_checkers_only_is_not_followed(house: Path) -> None:
    (house / "stages/other.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n"
    )
    assert set(of(house, "other")["packages"]) == {"numpy"}


def test_circular_imports_end(house: Path) -> None:
    (house / "src/canvaslm/floor.py").write_text("import canvaslm.room.tool\n")
    assert "src/canvaslm/floor.py" in of(house)["files"]


@pytest.mark.parametrize(
    ("text", "where", "got"),
    [
        ("plank = 1\ndef broken(:\n", "floor.py:2", "invalid syntax"),
        ("import os\nimport canvaslm.cellar\n", "floor.py:2", "canvaslm.cellar"),
        ("import unpinned_thing\n", "floor.py:1", "unpinned_thing"),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_line(
    house: Path, text: str, where: str, got: str
) -> None:
    (house / "src/canvaslm/floor.py").write_text(text)
    with pytest.raises(InputError) as caught:
        of(house)
    assert caught.value.where.endswith(where)
    assert got in caught.value.got


def test_it_does_not_depend_on_where_the_repository_lies(house: Path, tmp_path: Path) -> None:
    shutil.copytree(house, tmp_path / "elsewhere" / "copy")
    moved = fingerprint(
        tmp_path / "elsewhere" / "copy" / "stages" / "work.py", tmp_path / "elsewhere" / "copy"
    )
    assert json.dumps(moved, sort_keys=True) == json.dumps(of(house), sort_keys=True)


def test_digests_of_all_sources_hold_code_and_no_comment(house: Path) -> None:
    test_file = house / "tests/test_table.py"
    test_file.parent.mkdir()
    test_file.write_text("def test_it_stands():\n    pass\n")
    before = source_digests(house)
    assert set(before) == {name for name in FILES if name.endswith(".py")} | {"tests/test_table.py"}
    test_file.write_text("# why\n" + test_file.read_text())
    assert source_digests(house) == before
    test_file.write_text(test_file.read_text().replace("stands", "holds"))
    changed = {name for name, digest in source_digests(house).items() if digest != before[name]}
    assert changed == {"tests/test_table.py"}
