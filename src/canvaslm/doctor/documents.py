"""Do the pages of this checkout still say what is so?"""

from canvaslm.docs_gate import DocsGateParams
from canvaslm.docs_gate.gate import check_docs
from canvaslm.doctor.patient import Patient
from canvaslm.doctor.probe import Probe, Seen
from canvaslm.params import load_section


def _look_at_docs(patient: Patient) -> Seen:
    """The checks of the stage `docs_gate`, of which nothing is written."""
    params = load_section(patient.places.params, "docs_gate", DocsGateParams)
    report = check_docs(params, patient.places.root)
    faults = report.faults
    first = f"; {faults[0].file}:{faults[0].line}: {faults[0].message}" if faults else ""
    return Seen(
        looked_at=f"{report.n_checked['pages']} pages",
        measured=f"{len(faults)} faults{first}",
        holds=not faults,
        next_step="run `python stages/docs_gate.py`, which lists them, and let the page follow",
    )


DOCUMENTS = (
    Probe(
        name="docs_cite_what_exists",
        section="The docs gate names dead citations",
        look=_look_at_docs,
        rests_on=("params_are_valid",),
        is_shared=True,
    ),
)
