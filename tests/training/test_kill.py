"""Does a run that is killed at random moments, by the kernel and with no warning, end the same?

Every trainer here is a process of its own that is ended by SIGKILL. They come from a server that
has imported torch once, so that a start costs milliseconds.
"""

import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from canvaslm.training.identity import identity_name
from canvaslm.training.plan import Recipe
from runs import OUTS, finish, job_of

LIMIT_S = 60.0
N_RANDOM = 3  # kills at random moments, in each of the three runs; as many in a save
# 10 windows, 4 a step in two micro-batches of 2: epochs end within every fifth step, and exactly
# after every save.
SIZES: dict[str, Any] = {"steps": 20, "save_every": 5}
# By window numbers, of which step k has 4k to 4k + 3.
RUNS = {
    "straight on": ("diffusion", ()),
    "two steps skipped": ("autoregressive", (18, 57)),
    "rolled back, three steps marked": ("diffusion", range(48, 60)),
    "under muon, with an average": ("diffusion", (18,)),
}
KNOBS: dict[str, dict[str, Any]] = {
    "under muon, with an average": {"optimizer": "muon", "ema_decay": 0.9}
}


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["canvaslm.training.run", "canvaslm.training.job", "runs"])
    return context


def _train(recipe: Recipe, shards: Path, place: Path, poison: tuple[int, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    finish(job_of(recipe, shards, poison=poison), place)


@dataclass
class Torn:
    """A run that is killed and started again."""

    recipe: Recipe
    shards: Path
    place: Path
    poison: tuple[int, ...]
    checkpoints: Path = field(init=False)

    def __post_init__(self) -> None:
        identity = job_of(self.recipe, self.shards).identity
        self.checkpoints = self.place / "work" / identity_name(identity) / "checkpoints"

    def start(self) -> BaseProcess:
        arguments = (self.recipe, self.shards, self.place, self.poison)
        process: BaseProcess = _server().Process(target=_train, args=arguments)
        process.start()
        return process

    def finish(self) -> dict[str, bytes]:
        process = self.start()
        process.join(LIMIT_S)
        assert process.exitcode == 0
        return {name: (self.place / name).read_bytes() for name in OUTS}

    def forget(self) -> None:
        """Start anew: the next trainer finds nothing."""
        self.place = self.place.with_name(f"{self.place.name}.")
        self.__post_init__()

    def half_saves(self) -> list[Path]:
        return sorted(self.checkpoints.glob(".step_*.partial"))

    def saved(self) -> int:
        steps = [int(path.name[5:]) for path in self.checkpoints.glob("step_*")]
        return max(steps, default=0)


def _kill_after(torn: Torn, seconds: float) -> bool:
    """Whether it was still running."""
    process = torn.start()
    process.join(seconds)
    was_running = process.is_alive()
    process.kill()
    process.join(LIMIT_S)
    return was_running


def _kill_in_a_save(torn: Torn, delay_s: float, *, is_first: bool) -> bool:
    """Whether a save was left half: the trainer's first, or a later one."""
    saved_before = torn.saved()
    process = torn.start()
    until = time.monotonic() + LIMIT_S
    while process.is_alive():
        if torn.half_saves() and (is_first or torn.saved() > saved_before):
            break
        assert time.monotonic() < until
    until = time.monotonic() + delay_s
    while time.monotonic() < until:
        pass
    process.kill()
    process.join(LIMIT_S)
    return bool(torn.half_saves())


def _tear(torn: Torn, draws: random.Random, longest_s: float) -> Iterator[tuple[str, int, bytes]]:
    """Kill it at random moments and in saves; what a run that ends in between writes is compared.

    Yields how, the newest checkpoint, and the weights of a run that ended before its kill.
    """
    is_first = True  # of the saves that are hit; after a later one a checkpoint is left
    for how in draws.sample(["at random", "in a save"] * N_RANDOM, 2 * N_RANDOM):
        for _ in range(20):
            hit = (
                _kill_after(torn, draws.uniform(0, longest_s))
                if how == "at random"
                else _kill_in_a_save(torn, draws.uniform(0, 0.003), is_first=is_first)
            )
            if hit:
                is_first = is_first and how == "at random"
                yield how, torn.saved(), b""
                break
            if torn.saved() == torn.recipe.pretrain.steps:
                yield "ended", torn.saved(), torn.finish()[OUTS[0]]
                torn.forget()
        else:
            pytest.fail(f"20 trainers were not hit {how}")


@pytest.mark.slow
@pytest.mark.timeout(400)  # a dozen processes, on a machine that may have other things to do
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    tiny_recipe: Any, shards: Path, tmp_path: Path, name: str
) -> None:
    """BR-15..17, 37, 41, 47, 49: six kills each, of which three leave a half-written checkpoint."""
    kind, poison = RUNS[name]
    recipe = tiny_recipe(kind, model={"n_layers": 1}, **SIZES, **KNOBS.get(name, {}))
    straight = Torn(recipe, shards, tmp_path / "straight", tuple(poison))
    started_at = time.monotonic()
    expected = straight.finish()
    took_s = time.monotonic() - started_at
    progress = json.loads(expected["out/state.json"])["progress"]
    assert len(progress["skipped"]) == (3 if name.startswith("rolled back") else len(poison))
    assert len(progress["rollbacks"]) == int(name.startswith("rolled back"))
    torn = Torn(recipe, shards, tmp_path / "torn", tuple(poison))
    kills, resumed_from = [], set()
    for how, step, weights in _tear(torn, random.Random(name), took_s):
        assert weights in (b"", expected[OUTS[0]])
        kills += [how] if not weights else []
        resumed_from.add(step)
    assert sorted(kills) == ["at random"] * N_RANDOM + ["in a save"] * N_RANDOM
    last = recipe.pretrain.steps
    assert any(0 < step < last for step in resumed_from), "no trainer went on from a checkpoint"
    assert torn.finish() == expected
