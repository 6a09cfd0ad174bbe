"""Would this run work here, before any of its outs is touched?"""

import logging
import tempfile
from pathlib import Path

import torch

from canvaslm.checkpoint import load_trained_model, restore, save_checkpoint
from canvaslm.device import pick_device
from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import count_parameters
from canvaslm.training.job import Job, make_job
from canvaslm.training.learner import Learner
from canvaslm.training.loader import gather, window_numbers
from canvaslm.training.loop import advance, start
from canvaslm.training.memory import estimate_memory, refuse_what_does_not_fit
from canvaslm.training.plan import Recipe

_log = logging.getLogger(__name__)


def dry_run(recipe: Recipe, *, shards: Path, code_digest: str) -> str:
    """Take two steps, save them in a temporary place, load them, and say what was found.

    A run that does not fit this machine is only built, on the meta device, where tensors have
    shapes and no bytes; its shards need not exist.

    Raises:
        InputError: the run fits, and its shards do not.
    """
    parameters = count_parameters(recipe.model, recipe.layout)
    try:
        device = pick_device(recipe.pretrain.device)
        estimate = refuse_what_does_not_fit(recipe, device)
    except InputError as error:
        _build_without_bytes(recipe, parameters)
        estimate = estimate_memory(recipe, sliced_attention=False)
        return (
            f"{parameters:,} parameters, estimated peak {estimate} on a GPU; not run here: {error}"
        )
    _log.info("%s parameters, estimated peak %s", f"{parameters:,}", estimate)
    job = make_job(recipe, shards=shards, code_digest=code_digest)
    with tempfile.TemporaryDirectory() as place:
        n_steps = _train_save_load(job, device, Path(place))
    return (
        f"{parameters:,} parameters, estimated peak {estimate}; "
        f"{n_steps} steps trained, saved and loaded"
    )


def _build_without_bytes(recipe: Recipe, expected: int) -> None:
    """Build the model from shapes alone and count its parameters."""
    with torch.device("meta"):
        model = Backbone(recipe.model, recipe.layout)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == expected, f"{built} parameters built, {expected} in closed form"


def _train_save_load(job: Job, device: torch.device, place: Path) -> int:
    """Do once everything that a run does; return how many steps were taken."""
    params = job.recipe.pretrain
    learner = Learner(job.recipe, job.objective, device)
    progress = start()
    for step in range(min(2, params.steps)):
        numbers = window_numbers(step, params.windows_per_step)
        record = learner.take_step(step, gather(job.windows, numbers, params.seed), numbers)
        progress = advance(progress, record, params, job.recipe.layout, job.flops_of_first)
    directory = save_checkpoint(
        place,
        model=learner.model,
        optimizer=learner.optimizer,
        progress=progress,
        identity=job.identity,
        keep_last=None,
    )
    load_trained_model(directory)
    assert restore(directory, model=learner.model, optimizer=learner.optimizer) == progress
    return progress.step
