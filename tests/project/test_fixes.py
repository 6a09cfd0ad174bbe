"""Is each fault that was put right recorded with all that the next one needs?"""

import re
from pathlib import Path

import pytest

from canvaslm.docs_gate.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/fixes.md"
PARTS = ("Symptom.", "Cause.", "Fix.", "Lesson.", "Held by")
LEAST_WORDS = 5  # of a part that says something
LEAST_ENTRIES = 8
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def entries_of(text: str) -> dict[str, list[tuple[str, str]]]:
    """By heading, each part with what it says."""
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    pairs = (section.partition("\n") for section in sections)
    part = re.compile(r"^- \*\*(.*?)\*\* ?(.*)$", re.MULTILINE)
    return {heading: part.findall(body) for heading, _, body in pairs}


def faults_of(text: str) -> list[str]:
    """What is wrong with the form of a page of fixes."""
    sources, faults = Sources(ROOT), []
    for heading, parts in entries_of(text).items():
        if tuple(name for name, _ in parts) != PARTS:
            faults.append(f"{heading}: not {', '.join(PARTS)} in this order")
            continue
        *told, (_, held_by) = parts
        faults += [f"{heading}: {x} says nothing" for x, s in told if len(s.split()) < LEAST_WORDS]
        tests = TEST.findall(held_by)
        if not tests:
            faults.append(f"{heading}: cites no test")
        faults += [
            f"{heading}: there is no {file}::{name}"
            for file, name in tests
            if not ((ROOT / file).is_file() and sources.has_symbol(file, name))
        ]
    return faults


def test_every_entry_has_its_five_parts_and_cites_a_test_that_is_there() -> None:
    text = (ROOT / PAGE).read_text()
    assert len(entries_of(text)) >= LEAST_ENTRIES
    assert faults_of(text) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("- **Lesson.**", "- Lesson:", "not Symptom., Cause., Fix., Lesson., Held by"),
        ("- **Cause.**", "- **Fix.**", "not Symptom., Cause., Fix., Lesson., Held by"),
        ("Why it was so, in words.", "", "Cause. says nothing"),
        ("::test_every_entry", "::test_no_entry", "there is no tests/project/test_fixes.py"),
        ("tests/project/test_fixes.py", "tests/project/gone.py", "there is no tests/project/gone"),
        ("`tests/project", "`src/project", "cites no test"),
    ],
)
def test_an_entry_that_lacks_something_is_noticed(old: str, new: str, told: str) -> None:
    name = test_every_entry_has_its_five_parts_and_cites_a_test_that_is_there.__name__
    whole = (
        "# Page\n\n## A fault\n- **Symptom.** What was seen, in words.\n"
        "- **Cause.** Why it was so, in words.\n- **Fix.** What was done about it.\n"
        "- **Lesson.** What follows from it, always.\n"
        f"- **Held by** `tests/project/test_fixes.py::{name}`.\n"
    )
    assert faults_of(whole) == []
    assert whole.count(old) == 1
    (fault,) = faults_of(whole.replace(old, new))
    assert told in fault


def test_the_page_can_be_found() -> None:
    assert "(fixes.md)" in (ROOT / "docs" / "index.md").read_text()
    assert "(docs/fixes.md)" in (ROOT / "CONTRIBUTING.md").read_text()
