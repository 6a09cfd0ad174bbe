"""A repository with the stages of the pipeline, each a few lines that train nothing.

Its shards are real and its params are the project's, so that an ablation can be frozen, run by DVC
and timed in it within seconds. A training "learns" from its own params alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from canvaslm.params import read_yaml
from canvaslm.reporting.files import write_json

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0

_START = """
import hashlib, json, os, sys, time
from pathlib import Path
from ruamel.yaml import YAML
params = YAML(typ="safe", pure=True).load(Path("params.yaml").read_text())
def read(name):
    return json.loads(Path(name).read_text())
def write(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
"""
_STAGES = {
    "fingerprint_code": "",
    "pack_shards": """
import shutil
shutil.copytree("texts", "data/shards")
""",
    "audit_windows": """
digest = hashlib.sha256(Path("data/shards/manifest.json").read_bytes()).hexdigest()
write("reports/audit_windows/metrics.json", {"manifest_sha256": digest, "verdict": "pass"})
""",
    "pretrain": """
kind = sys.argv[1]
while kind == "diffusion" and os.environ.get("HANGS"):
    Path(os.environ["HANGS"]).touch()
    time.sleep(0.01)
learned = {"width": params["model"]["ffn_width"], "seed": params["pretrain"]["seed"],
           "steps": params["pretrain"]["steps"], "kind": kind}
text = json.dumps(learned)
digest = hashlib.sha256(text.encode()).hexdigest()
write(f"checkpoints/{kind}/model", text)
write(f"reports/pretrain/{kind}/metrics.json", {
    "steps": learned["steps"], "flops": 1e6 * learned["steps"] * learned["width"],
    "model_sha256": digest, "verdict": "pass", "verdict_reason": ""})
""",
    "eval_loss_parity": """
models = {x: read(f"checkpoints/{x}/model") for x in ("diffusion", "autoregressive")}
trained = {x: {"trained_model_sha256": read(f"reports/pretrain/{x}/metrics.json")["model_sha256"]}
           for x in models}
m = models["diffusion"]
rows = [(d, 10 + d, (10 + d) * 3.0,
         (10 + d) * (6 - 0.5 * (m["width"] > 16) - 0.001 * m["steps"] + 0.01 * (m["seed"] % 3)
                     + 0.2 * d + 0.002 * (d * m["seed"] % 5) * (m["width"] / 16)))
        for d in range(6)]
text = "document,tokens,twin_nats,bound_nats\\n"
text += "".join(",".join(map(repr, row)) + "\\n" for row in rows)
write("reports/eval_loss_parity/by_document.csv", text)
n = sum(row[1] for row in rows)
bound = sum(row[3] for row in rows) / n
write("reports/eval_loss_parity/metrics.json", {
    "diffusion": {"bound_nats_per_token": bound} | trained["diffusion"],
    "autoregressive": {"nats_per_token": 3.0} | trained["autoregressive"],
    "gap_percent": 100 * (bound / 3 - 1), "verdict": "fail"})
""",
}
_PLAN: dict[str, Any] = {
    "fingerprint_code": {
        "cmd": f"{sys.executable} {ROOT}/stages/fingerprint_code.py",
        "deps": ["stages", "constraints.txt"],
        "outs": ["reports/code"],
    },
    "pack_shards": {"deps": ["texts"], "params": ["pack_shards"], "outs": ["data/shards"]},
    "audit_windows": {
        "deps": ["data/shards"],
        "metrics": [{"reports/audit_windows/metrics.json": {"cache": False}}],
    },
    "pretrain": {
        "matrix": {"objective": ["diffusion", "autoregressive"]},
        "cmd": f"{sys.executable} stages/pretrain.py ${{item.objective}}",
        "deps": ["data/shards", "reports/audit_windows/metrics.json", "reports/code/pretrain.json"],
        "params": ["layout", "model", "diffusion", "pretrain"],
        "outs": ["checkpoints/${item.objective}"],
        "metrics": [{"reports/pretrain/${item.objective}/metrics.json": {"cache": False}}],
    },
    "eval_loss_parity": {
        "deps": [
            "checkpoints/autoregressive",
            "checkpoints/diffusion",
            "reports/pretrain/autoregressive/metrics.json",
            "reports/pretrain/diffusion/metrics.json",
            "reports/code/eval_loss_parity.json",
        ],
        "params": ["eval_loss_parity"],
        "outs": ["reports/eval_loss_parity/by_document.csv"],
        "metrics": [{"reports/eval_loss_parity/metrics.json": {"cache": False}}],
    },
}


def environment() -> dict[str, str]:
    """This process's, without what another DVC has told it."""
    own = {key: os.environ[key] for key in os.environ if not key.startswith(("DVC_", "GIT_"))}
    roles = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    return own | {f"GIT_{role}": "tester@example.org" for role in roles} | {"OMP_NUM_THREADS": "1"}


def call(place: Path, *words: str) -> str:
    """Run a command to its end; what it said."""
    ran = subprocess.run(
        words,
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def commit(place: Path, message: str) -> None:
    """Commit all that lies there."""
    call(place, "git", "add", "--all")
    call(place, "git", "commit", "--quiet", "--message", message)


def lay_pipeline(place: Path, *, shards: Path, params: Path) -> Path:
    """Make the repository.

    Args:
        place: where; it does not exist.
        shards: packed shards, which stand for the texts.
        params: the base of all profiles; the profile `tiny` is it with a name of its own.
    """
    place.mkdir()
    shutil.copytree(shards, place / "texts")
    shutil.copy(ROOT / "constraints.txt", place)
    for name, text in _STAGES.items():
        (place / "stages").mkdir(exist_ok=True)
        (place / "stages" / f"{name}.py").write_text(_START + text)
    stages = {name: {"cmd": f"{sys.executable} stages/{name}.py"} | x for name, x in _PLAN.items()}
    dump(place / "dvc.yaml", {"stages": stages})
    base = read_yaml(params)
    base["pretrain"] |= {"device": "cpu", "steps": 20, "warmup_steps": 2, "decay_steps": 0,
                         "windows_per_step": 2, "micro_batch_windows": 2}  # fmt: skip
    dump(place / "params.yaml", base)
    dump(place / "configs/base.yaml", base)
    dump(place / "configs/tiny.yaml", {"profile": "tiny"})
    (place / ".gitignore").write_text(
        "/data/\n/checkpoints/\n/.work/\n/reports/code/\n/reports/**\n!/reports/**/\n"
        "!/reports/**/metrics.json\n"
    )
    call(place, "git", "init", "--quiet")
    call(place, sys.executable, "-m", "dvc", "init", "--quiet")
    (place / ".dvc/config").write_text((ROOT / ".dvc/config").read_text())
    for name in ("user.name", "user.email"):
        call(place, "git", "config", name, "tester@example.org")
    for report in ("audit_windows", "pretrain/diffusion", "pretrain/autoregressive",
                   "eval_loss_parity"):  # fmt: skip
        write_json(place / "reports" / report / "metrics.json", {"of": "another run"})
    commit(place, "Begin")
    return place


def dump(path: Path, content: dict[str, Any]) -> None:
    """Write YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        YAML().dump(content, file)
