"""Which experiments of an ablation are still to be run, and how is each of them run?

One after another, each by ``dvc exp run --temp`` in a checkout of its own, so that the working tree
may be edited meanwhile. What has a whole result is not run again, so a programme that was killed
goes on where it stopped; within a training, the stage itself does.
"""

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML

from canvaslm.ablation.arms import Trial, as_overrides, find_arms, find_trials
from canvaslm.ablation.experiments import find_revisions, forget, read_committed, unpacked
from canvaslm.ablation.rows import Row, collect, find_row
from canvaslm.ablation.spec import Fixed, Spec, frozen, read_spec, spec_path
from canvaslm.code_fingerprint import fingerprint
from canvaslm.errors import InputError
from canvaslm.leftovers import mend
from canvaslm.params import read_yaml
from canvaslm.reporting.collected import read_whole_metrics
from canvaslm.reporting.files import to_json, write_bytes
from canvaslm.reporting.progress import Track

_log = logging.getLogger(__name__)
_LAST_LINES = 5
_HEADING = "fixed:"

Validate = Callable[[Path], None]
"""Raises where a params file holds a value that some stage would refuse."""


def freeze(root: Path, spec: Spec, *, validate: Validate) -> Fixed:
    """Write down in an ablation's file what may not change: the data of its profile, and the code.

    The data are made in an experiment, up to the audit of the windows, since the working tree may
    be at another profile. Nothing else in the file is touched.

    Raises:
        InputError: a value does not fit, or that part of the pipeline does not run.
    """
    trials = find_trials(find_arms(root, spec), spec)
    _refuse_values(trials, validate)
    first = trials[0]
    name = f"{spec.id}-data"
    forget(root, name)
    _run(root, spec, name, first.params, ["audit_windows"])
    with unpacked(root, name, find_revisions(root, name)[0]) as experiment:
        audit = read_whole_metrics(experiment.folder / "reports")[0]["audit_windows"]
    forget(root, name)
    fixed = Fixed(
        data_manifest_sha256=audit["manifest_sha256"],
        code={script: code_md5(root, script) for script in spec.guarded},
    )
    _write(spec_path(root, spec.id), fixed, root)
    return fixed


def run_programme(root: Path, spec: Spec, *, validate: Validate, track: Track) -> list[Row]:
    """Run every experiment that has no whole result yet.

    Args:
        root: the repository.
        spec: a frozen and committed ablation.
        validate: looks at every value of every arm before the first one runs.
        track: shows how many are done, and how long the rest will take.

    Returns:
        The row of every experiment, those that were there before among them.

    Raises:
        InputError: the file is not committed as it lies here, code is not the frozen one, a value
            does not fit, an experiment ended with an error, or one is not what it says.
    """
    refuse_unready(root, spec)
    trials = find_trials(find_arms(root, spec), spec)
    _refuse_values(trials, validate)
    missing = [trial for trial in trials if find_row(root, spec, trial) is None]
    _log.info(
        "%s: %d of %d experiments are there", spec.id, len(trials) - len(missing), len(trials)
    )
    for trial in track(missing, total=len(missing), label=f"{spec.id}: experiments"):
        _run(root, spec, trial.name, trial.params, spec.targets)
        if find_row(root, spec, trial) is None:
            raise InputError(
                trial.name, expected="an experiment of this name", got="none", fix="see its log"
            )
    return collect(root, spec, trials)


def refuse_unready(root: Path, spec: Spec) -> None:
    """Raise unless an ablation is frozen, committed, and of the code that lies here.

    Raises:
        InputError: it is not.
    """
    path = spec_path(root, spec.id)
    fixed = frozen(root, spec)
    freeze_it = f"run `python stages/ablate.py --id {spec.id} --do freeze`, and commit the file"
    committed = read_committed(root, "HEAD", path.relative_to(root).as_posix())
    if committed != path.read_bytes():
        got = "none" if committed is None else "another"
        raise InputError(
            path, expected="the file as it is committed", got=got, fix="commit it before the run"
        )
    if set(fixed.code) != set(spec.guarded):
        got = ", ".join(fixed.code)
        raise InputError(
            path, expected=f"code of {', '.join(spec.guarded)}", got=got, fix=freeze_it
        )
    for script, md5 in fixed.code.items():
        found = code_md5(root, script)
        if found != md5:
            raise InputError(
                f"stages/{script}.py",
                expected=f"the frozen code ({md5})",
                got=found,
                fix=f"go back to that code, or {freeze_it}; all arms then run anew",
            )


def code_md5(root: Path, script: str) -> str:
    """The hash of the file that ``fingerprint_code`` writes of a stage, as ``dvc.lock`` has it."""
    content = to_json(fingerprint(root / "stages" / f"{script}.py", root)).encode()
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _run(root: Path, spec: Spec, name: str, params: Mapping[str, Any], targets: list[str]) -> None:
    """One experiment, to its end; what it says goes to a log of its own."""
    for line in mend(root, copy=root / ".work" / "dvc.lock"):
        _log.info("%s", line)
    log = root / ".work" / "ablations" / spec.id / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = ["exp", "run", "--temp", "--name", name]
    for change in as_overrides(params, read_yaml(root / "params.yaml")):
        words += ["--set-param", change]
    with log.open("wb") as said:
        ran = subprocess.run(
            [sys.executable, "-m", "dvc", *words, *targets],
            cwd=root,
            env=_environment(),
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if ran.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise InputError(
            name,
            expected="an experiment that ends well",
            got=" / ".join(lines[-_LAST_LINES:]),
            fix=f"see {log.relative_to(root)}, put it right and run the same command again",
        )


def _environment() -> dict[str, str]:
    """This process's, without what another DVC has told it, and with its own tools first."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("DVC_")}
    tools = str(Path(sys.executable).parent)
    return own | {"PATH": os.pathsep.join([tools, own.get("PATH", os.defpath)])}


def _refuse_values(trials: list[Trial], validate: Validate) -> None:
    """Look at the params of every experiment as the stages will."""
    with TemporaryDirectory(prefix="params-") as place:
        for trial in trials:
            file = Path(place) / trial.name
            with file.open("w", encoding="utf-8") as opened:
                YAML().dump(dict(trial.params), opened)
            validate(file)


def _write(path: Path, fixed: Fixed, root: Path) -> None:
    """Put ``fixed`` at the end of the file, in place of an older one."""
    text = path.read_text(encoding="utf-8")
    before = read_spec(root, path.stem)
    head = text.partition(f"\n{_HEADING}")[0].rstrip("\n") + "\n"
    code = "".join(f'    {script}: "{md5}"\n' for script, md5 in sorted(fixed.code.items()))
    block = f'\n{_HEADING}\n  data_manifest_sha256: "{fixed.data_manifest_sha256}"\n  code:\n{code}'
    write_bytes(path, (head + block).encode())
    after = read_spec(root, path.stem)
    if after != before.model_copy(update={"fixed": fixed}):
        write_bytes(path, text.encode())
        raise InputError(
            path, expected=f"`{_HEADING}` as the last key", got="keys after it", fix="move them up"
        )
