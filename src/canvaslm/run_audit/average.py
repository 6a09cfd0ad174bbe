"""Does the average of the weights follow them as it should, and is it what is judged?"""

from collections.abc import Sequence

import torch
from safetensors.torch import load_file

from canvaslm.checkpoint import load_model
from canvaslm.checkpoint_state import TENSOR_FILES
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.digest import Digest
from canvaslm.run_audit.subject import Subject

_LARGEST_STRAY = 0.01  # of the way that an average should go
_SHOWN = 4
_OPTIMIZER = TENSOR_FILES[1]


def check_average(subject: Subject, steps: Sequence[Digest], name: str) -> Check:
    """After each drilled step the averages are where the definition takes them.

    Args:
        subject: the run.
        steps: drilled steps, of fresh weights and of the finished ones.
        name: of the check.
    """
    strays = [step.stray for step in steps if step.stray is not None]
    decay = subject.recipe.pretrain.ema_decay
    return decide(
        "updates",
        name,
        holds=len(strays) == len(steps) and max(strays) <= _LARGEST_STRAY,
        measured=f"off by up to {max(strays):.2g} of their way, beyond what float32 rounds, in "
        f"{len(strays)} steps",
        expected=f"a memory of {decay:g}, shorter while the updates are few, within "
        f"{_LARGEST_STRAY:g}, for every parameter",
        first_test="python -m pytest -q "
        "tests/training/test_weight_average.py::test_the_average_follows_its_definition",
    )


def check_judged(subject: Subject) -> Check:
    """What evaluations load is the average in the file, value by value."""
    moments = load_file(subject.checkpoint / _OPTIMIZER)
    judged = dict(load_model(subject.checkpoint).named_parameters())
    wrong = [
        name
        for name, weight in judged.items()
        if f"ema/{name}" not in moments or not torch.equal(moments[f"ema/{name}"], weight)
    ]
    trained = dict(subject.model.named_parameters())
    n_apart = sum(not torch.equal(trained[name].cpu(), judged[name]) for name in judged)
    return decide(
        "state",
        "average_is_what_is_judged",
        holds=not wrong,
        measured=f"{len(judged) - len(wrong)} of {len(judged)} parameters"
        + (f"; not {', '.join(wrong[:_SHOWN])}" if wrong else "")
        + f"; {n_apart} of the averages differ from the trained weights",
        expected="evaluations load the averages that the checkpoint holds",
        first_test="python -m pytest -q tests/checkpoint/test_restoring.py::"
        "test_what_is_judged_is_the_average_where_the_run_kept_one",
    )
