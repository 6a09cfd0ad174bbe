"""How long does an optimiser step of each arm take, where none of them has the machine to itself?

All arms take their steps in turn, in one process, on the same shards: a machine that slows down
slows all of them, which the wall clocks of trainings that ran on different days cannot promise. A
run may change its ways as it goes, so steps are taken at numbers spread over it.
"""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from canvaslm.ablation.arms import Arm
from canvaslm.ablation.experiments import unpacked
from canvaslm.ablation.rows import Row, training_recipe
from canvaslm.ablation.seconds import read_seconds, timed_arms, write_seconds
from canvaslm.ablation.spec import SEED, Spec, report_folder, with_changes
from canvaslm.device import describe_machine, pick_device
from canvaslm.measure import interleaved_seconds
from canvaslm.reporting.progress import Track
from canvaslm.training.job import make_job
from canvaslm.training.learner import Learner
from canvaslm.training.loader import gather, window_numbers


def measure_seconds(root: Path, spec: Spec, row: Row, track: Track) -> None:
    """Time the steps of all arms, unless those of this ablation lie in its report already.

    Args:
        root: the repository, whose code must be the frozen one.
        spec: the ablation.
        row: any row of it, for the shards that all arms read.
        track: shows how far it is.
    """
    folder = report_folder(root, spec)
    if read_seconds(root, spec, folder):
        return
    with (
        TemporaryDirectory(prefix="shards-") as place,
        unpacked(root, row.trial.name, row.rev) as experiment,
    ):
        shards = Path(place)
        experiment.link_folder("data/shards", shards)
        learners = [_Timed(arm, spec, shards) for arm in timed_arms(root, spec)]
        found: dict[str, list[float]] = {timed.name: [] for timed in learners}
        positions = range(spec.timing.steps)
        label = f"{spec.id}: steps timed"
        for position in track(positions, total=len(positions), label=label):
            timings = interleaved_seconds(
                {timed.name: timed.step_at(position, of=len(positions)) for timed in learners},
                device=learners[0].device,
                rounds=spec.timing.rounds,
                warmup_rounds=spec.timing.warmup_rounds,
            )
            for name, timing in timings.items():
                found[name].append(timing.median_s)
    machine = describe_machine(learners[0].device)
    write_seconds(root, spec, folder, medians_s=found, machine=machine)


class _Timed:
    """A learner of one arm, with the windows of any of its steps."""

    def __init__(self, arm: Arm, spec: Spec, shards: Path) -> None:
        params = with_changes(arm.params, {SEED: spec.seeds[0]}, where=arm.name)
        plan = training_recipe(params, arm.name)
        job = make_job(plan, shards=shards, code_digest="")
        self.name = arm.name
        self.device = pick_device(plan.pretrain.device)
        self._params = plan.pretrain
        self._windows = job.windows
        self._learner = Learner(job.recipe, job.objective, self.device)

    def step_at(self, position: int, *, of: int) -> functools.partial[Any]:
        """The step in the middle of one of so many equal parts of the run."""
        step = (2 * position + 1) * self._params.steps // (2 * of)
        numbers = window_numbers(step, self._params.windows_per_step)
        windows = gather(self._windows, numbers, self._params.seed)
        return functools.partial(self._learner.take_step, step, windows, numbers)
