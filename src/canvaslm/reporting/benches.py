"""What does a bench write, and can a file of it be believed?

A bench compares pieces of work that ran in turn in one process, so what it found are ratios;
seconds beside them say what the machine was like on that day and are compared with nothing.
"""

import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, model_validator

from canvaslm.errors import InputError
from canvaslm.params import Params, parse_section

Scalar: TypeAlias = str | bool | int | float | None
_Said: TypeAlias = Annotated[str, Field(min_length=4)]  # a word, and not a letter of every id


class BenchResult(Params):
    """One file below ``reports/bench/``: what was compared, on what, and what could not be."""

    bench: str = Field(min_length=1, description="the bench's name, as its file's")
    machine: dict[str, str | int] = Field(description="processor, cores, threads, versions")
    versions: dict[str, str] = Field(description="of torch and of every peer that ran")
    threads: int = Field(ge=1, description="threads of one operation")
    tiny: bool = Field(description="whether the sizes were such that figures mean nothing")
    rounds: int = Field(ge=1, description="rounds whose medians were taken")
    rows: list[dict[str, Scalar]] = Field(description="what was measured, units in the keys")
    ratios: dict[str, Annotated[float, Field(ge=0)] | None] = Field(
        description="by id; none where nothing was measured"
    )
    not_measured: dict[_Said, _Said] = Field(description="why, by a part of the id or by a peer")
    fallbacks: list[str] = Field(description="what fell back, from what to what")

    @model_validator(mode="after")
    def _says_where_it_ran(self) -> "BenchResult":
        if "processor" not in self.machine:
            raise ValueError("a processor among what the machine is")
        return self

    @model_validator(mode="after")
    def _every_gap_has_a_reason(self) -> "BenchResult":
        for name, ratio in self.ratios.items():
            if ratio is None and self.reason(name) is None:
                raise ValueError(f"a reason in not_measured for {name}, which is null")
        return self

    def reason(self, name: str) -> str | None:
        """Why the ratio of that id was not measured: the reason whose key is a part of the id."""
        return next((why for key, why in self.not_measured.items() if key in name), None)


def read_bench(file: Path) -> BenchResult:
    """Read one file that a bench has written.

    Raises:
        InputError: it is missing, no strict JSON, or does not hold what a bench writes.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            file, expected="what a bench wrote", got=str(error), fix="run `make bench`"
        ) from None
    return parse_section(content, BenchResult, where=str(file))


def read_benches(folder: Path) -> dict[str, BenchResult]:
    """Read every result that lies in a folder, by the file's name without ending.

    Raises:
        InputError: a file is not what a bench writes, or the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(
            folder,
            expected="the folder of the results",
            got="a file",
            fix="name the folder that it lies in",
        )
    return {file.stem: read_bench(file) for file in sorted(folder.glob("*.json"))}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
