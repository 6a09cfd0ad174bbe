"""How is a copy of the checkout run, and what has a training made there?"""

import math
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from canvaslm.params import read_yaml
from torn_run import Place

LIMIT_S = 900.0
STEPS = 100  # about as many
KEEP_LAST = 2


def choose_cadence(base: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Windows per step and steps per save for which an epoch ends inside a save's span, and on one.

    Returns the knobs, and in words what they come to.
    """
    manifest = read_yaml(base / "data/shards/manifest.json")
    layout = read_yaml(base / "params.yaml")["layout"]
    tokens = layout["canvas_tokens"] * layout["canvases_per_window"]
    n = sum(shard["tokens"] // tokens for shard in manifest["splits"]["train"])
    fitting = [
        (abs(epochs * n // per_step - STEPS), per_step, save_every, epochs)
        for per_step in range(4, 13)
        for save_every in range(3, 9)
        for epochs in (2, 3)
        if epochs * n % (per_step * save_every) == 0 and n % (per_step * save_every)
    ]
    _, per_step, save_every, epochs = min(fitting, default=(0, 6, 3, 0))
    steps = (epochs * n // per_step or STEPS) + 2 * save_every + 1
    knobs = {
        "steps": steps,
        "windows_per_step": per_step,
        "micro_batch_windows": per_step - 2,
        "save_every": save_every,
        "keep_last": KEEP_LAST,
        "log_every": 2,
    }
    own = read_yaml(base / "params.yaml")["pretrain"]
    knobs |= {"keep_best": 0} if own.get("keep_best") else {}
    facts = {
        "steps": steps,
        "windows a step in two micro-batches": per_step,
        "steps a save": save_every,
        "windows an epoch": n,
        "epochs end": math.floor(steps * per_step / n),
        "of them on a save": int(epochs > 0),
    }
    return knobs, facts


def hashes(place: Place) -> dict[str, str]:
    """Hash what a command of DVC made in the checkout."""
    files = {
        "model.safetensors": place.root / "checkpoints" / place.objective / "model.safetensors",
        "loss.csv": place.root / "reports/pretrain" / place.objective / "loss.csv",
        "dvc.lock": place.root / "dvc.lock",
    }
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def hashes_of_experiment(place: Place, said: str) -> dict[str, str]:
    """Hash what an experiment made: its commit holds dvc.lock, and the cache what that names."""
    name = said.partition("Ran experiment(s): ")[2].split()[0]
    refs = call(place.root, "git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
    ref = next(ref for ref in refs if ref.endswith(f"/{name}"))
    lock = call(place.root, "git", "show", f"{ref}:dvc.lock")
    call(place.root, "git", "clone", "--quiet", "--no-checkout", ".", place.root.name + ".out")
    out = place.root / (place.root.name + ".out")
    try:
        call(out, "git", "fetch", "--quiet", "origin", ref)
        call(out, "git", "checkout", "--quiet", "FETCH_HEAD")
        call(out, "dvc", "cache", "dir", "--local", str(place.root / ".dvc/cache"))
        call(out, "dvc", "checkout", "--quiet", f"pretrain@{place.objective}")
        assert (out / "dvc.lock").read_text() == lock
        found = Place(**{**vars(place), "root": out})
        return hashes(found)
    finally:
        shutil.rmtree(out)


def change(base: Path, **sections: dict[str, Any]) -> None:
    """Set knobs in the params file of a copy."""
    values = read_yaml(base / "params.yaml")
    for section, knobs in sections.items():
        values[section] |= knobs
    with (base / "params.yaml").open("w") as file:
        YAML().dump(values, file)


def environment() -> dict[str, str]:
    """This process's, without what DVC or git would take for a command; the checkout's tools."""
    own = {key: os.environ[key] for key in os.environ if not key.startswith(("DVC_", "GIT_"))}
    roles = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    who = {f"GIT_{role}": "kill" for role in roles}
    safe = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    return own | who | safe | {"PATH": path, "OMP_NUM_THREADS": "1"}


def call(place: Path, *words: str) -> str:
    """Run a command to its end; what it said, or the end of this test with that."""
    ran = subprocess.run(
        words,
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
        check=False,
        start_new_session=True,  # Ctrl-C is for this test, which then ends them all
    )
    if ran.returncode:
        sys.exit(f"{' '.join(words)} ended with {ran.returncode}:\n{ran.stdout[-4000:]}")
    return ran.stdout
