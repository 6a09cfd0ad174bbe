"""Do the pages say anything about the sources that is no longer so?

Pages are held against sources, never the other way round, and nothing is executed: symbols and
options come from syntax trees, targets from the Makefile, stages from ``dvc.yaml``, figures from
the snapshots in ``docs/measured``.
"""

from pydantic import Field

from canvaslm.params import Params


class DocsGateParams(Params):
    """Section ``docs_gate``."""

    roots: list[str] = Field(min_length=1, description="pages, and folders of pages, to check")
