"""Do the guide and the doctor speak of the same tests?"""

import re
from pathlib import Path

from canvaslm.docs_gate.pages import read_page
from canvaslm.doctor.examination import PROBES

ROOT = Path(__file__).parents[2]
GUIDE = "docs/guides/debugging.md"


def probes_by_section() -> dict[str, list[str]]:
    """The probes that each section of the guide names on its line *Probe*, in its order."""
    _, *sections = re.split(r"^## ", (ROOT / GUIDE).read_text(), flags=re.MULTILINE)
    found = {}
    for section in sections:
        heading, _, body = section.partition("\n")
        lines = re.findall(r"^\*Probes?\* (.*)$", body, re.MULTILINE)
        found[heading] = [name for line in lines for name in re.findall(r"`(\w+)`(?=:)", line)]
    return found


def test_every_section_names_its_probes_and_every_probe_its_section() -> None:
    of_doctor: dict[str, list[str]] = {}
    for probe in PROBES:
        of_doctor.setdefault(probe.section, []).append(probe.name)
    assert probes_by_section() == of_doctor


def test_a_finding_leads_to_the_place_in_the_guide() -> None:
    anchors = read_page(ROOT, GUIDE).anchors
    wrong = [
        probe.anchor for probe in PROBES if probe.anchor.removeprefix(f"{GUIDE}#") not in anchors
    ]
    assert wrong == []


def test_a_probe_rests_on_probes_that_come_before_it() -> None:
    before: dict[str, bool] = {}
    for probe in PROBES:
        assert probe.name not in before, "a name stands for one probe"
        assert set(probe.rests_on) <= set(before), probe.name
        if probe.is_shared:
            assert all(before[name] for name in probe.rests_on), "what is shared needs no one run"
        before[probe.name] = probe.is_shared
