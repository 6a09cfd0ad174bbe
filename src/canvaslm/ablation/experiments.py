"""What did an experiment of DVC leave behind?

A commit under ``refs/exps``, which holds its params, its ``dvc.lock`` and its metrics, and objects
in the cache, which the lock names by hash. Nothing is read from the working tree: what lies there
is of another run.
"""

import functools
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dvc.repo import Repo

from canvaslm.errors import InputError
from canvaslm.params import read_yaml

_KEPT = ("params.yaml", "dvc.lock", "reports")
_DIRECTORY = ".dir"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment, unpacked.

    Attributes:
        name: the experiment's.
        rev: its commit.
        root: the repository.
        folder: what the commit holds of params, lock and reports.
    """

    name: str
    rev: str
    root: Path
    folder: Path

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The params that it was run with."""
        return read_yaml(self.folder / "params.yaml")

    @functools.cached_property
    def stages(self) -> Mapping[str, Any]:
        """What its ``dvc.lock`` records of each stage."""
        return read_yaml(self.folder / "dvc.lock").get("stages") or {}

    def file_before(self, path: str) -> bytes | None:
        """A file of the commit that it was started from; None where that has none."""
        return read_committed(self.root, f"{self.rev}^", path)

    def cached(self, path: str) -> bytes:
        """The content of a file that DVC keeps in its cache.

        Raises:
            InputError: its lock knows of no such file, or the cache has lost it.
        """
        return self._read(self._hash_of(path), path)

    def link_folder(self, path: str, into: Path) -> None:
        """Lay out a folder that DVC keeps in its cache, as links to what lies there.

        Raises:
            InputError: its lock knows of no such folder, or the cache has lost it.
        """
        for entry in json.loads(self._read(self._hash_of(path), path)):
            link = into / entry["relpath"]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(self._object(entry["md5"], path))

    def _hash_of(self, path: str) -> str:
        outs = (out for stage in self.stages.values() for out in stage.get("outs", []))
        found = next((out.get("md5") for out in outs if out["path"] == path), None)
        if found is None:
            raise InputError(
                self.name, expected=f"{path} in its dvc.lock", got="none", fix=self.fix
            )
        return found

    def _read(self, md5: str, path: str) -> bytes:
        content = self._object(md5, path).read_bytes()
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5.removesuffix(_DIRECTORY):
            raise InputError(
                self.name, expected=f"{path} as it was written", got="other bytes", fix=self.fix
            )
        return content

    def _object(self, md5: str, path: str) -> Path:
        file = _cache(self.root) / md5[:2] / md5[2:]
        if not file.is_file():
            raise InputError(self.name, expected=f"{path} in DVC's cache", got="none", fix=self.fix)
        return file

    @property
    def fix(self) -> str:
        """What to do about one that cannot be used."""
        return f"`dvc exp remove {self.name}`, then run the ablation again"


def find_revisions(root: Path, name: str) -> list[str]:
    """The commits of all experiments of a name, the newest first."""
    return [rev for rev, _ in _references(root, name)]


def forget(root: Path, name: str) -> None:
    """Remove the experiments of a name, which was one of our own for a passing purpose."""
    for _, reference in _references(root, name):
        run_git(root, "update-ref", "-d", reference)


@contextmanager
def unpacked(root: Path, name: str, rev: str) -> Iterator[Experiment]:
    """An experiment, laid out in a folder of its own as long as the block lasts.

    Raises:
        InputError: the commit has no params, no lock or no reports.
    """
    with TemporaryDirectory(prefix="experiment-") as place:
        try:
            content = run_git(root, "archive", "--format=tar", rev, *_KEPT)
        except InputError as error:
            raise InputError(
                name, expected=f"a commit with {', '.join(_KEPT)}", got=error.got,
                fix=f"`dvc exp remove {name}`, then run the ablation again",
            ) from None  # fmt: skip
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            # Python before 3.11.4 has no filters, and takes no argument of that name.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(place)
        yield Experiment(name=name, rev=rev, root=root, folder=Path(place))


def read_committed(root: Path, rev: str, path: str) -> bytes | None:
    """A file as a commit holds it; None where it holds none."""
    try:
        return run_git(root, "cat-file", "blob", f"{rev}:{path}")
    except InputError:
        return None


def run_git(root: Path, *arguments: str) -> bytes:
    """What git says.

    Raises:
        InputError: git refuses.
    """
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip() or f"status {ran.returncode}"
        raise InputError(
            f"git {arguments[0]}", expected="success", got=said, fix="run it in a git repository"
        )
    return ran.stdout


def _references(root: Path, name: str) -> list[tuple[str, str]]:
    told = run_git(root, "for-each-ref", "--sort=-committerdate",
                   "--format=%(objectname) %(refname)", "refs/exps")  # fmt: skip
    rows = (line.split(maxsplit=1) for line in told.decode().splitlines())
    return [(rev, ref) for rev, ref in rows if ref.rpartition("/")[2] == name]


@functools.cache
def _cache(root: Path) -> Path:
    with Repo(str(root)) as repo:
        return Path(repo.cache.local.path)
