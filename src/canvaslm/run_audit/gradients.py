"""Does the loss reach every parameter, whole, finite and however a step is cut?"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from canvaslm.objective.targets import LossSum, add
from canvaslm.run_audit.applied import norm
from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.digest import Digest, Drilled, digest_all
from canvaslm.run_audit.drill import drill, drill_numbers
from canvaslm.run_audit.own_loss import has_guess
from canvaslm.run_audit.subject import Subject
from canvaslm.training.learner import Objective

_LARGEST_GAP = 1e-5  # of the whole gradient's norm, for one parameter, between two cuts of a step
_SHOWN = 4
_REACH = (
    "python -m pytest -q "
    "tests/training/test_learner.py::test_bfloat16_arithmetic_reaches_every_parameter"
)
_CUT = (
    "python -m pytest -q "
    "tests/training/test_learner.py::test_gradients_do_not_depend_on_the_cut_into_micro_batches"
)


def check_reach(subject: Subject, steps: Sequence[Digest], name: str) -> Check:
    """Every parameter asks for a gradient, gets one that is not 0, and is listed once to be moved.

    Args:
        subject: the run.
        steps: drilled steps; one gradient in any of them is enough.
        name: of the check.
    """
    faults = {parameter: _fault(parameter, steps) for parameter in steps[0].norms}
    without = {parameter: fault for parameter, fault in faults.items() if fault is not None}
    excused = without.keys() & _without_guess(subject)
    missing = {key: told for key, told in without.items() if key not in excused}
    n_due = len(faults) - len(excused)
    told = "; ".join(f"{key} {fault}" for key, fault in list(missing.items())[:_SHOWN])
    return decide(
        "updates",
        name,
        holds=not missing,
        measured=f"{n_due - len(missing)} of {n_due} parameters in {len(steps)} steps"
        + (f"; {told}" if missing else f", {_spread(steps[-1])}"),
        expected="every parameter is trainable, listed once by the optimiser, and has a gradient "
        "other than 0 in one of the steps"
        + (", but for the guess's projection, since no window has a guess" if excused else ""),
        first_test=_REACH,
    )


def check_finite(steps: Sequence[Digest], name: str) -> Check:
    """No gradient of any parameter holds NaN or infinity; norms as they are before clipping."""
    broken = sorted(
        {
            parameter
            for step in steps
            for parameter, size in step.norms.items()
            if size is not None and not math.isfinite(size)
        }
    )
    causes = [step.record.cause for step in steps if step.record.cause]
    norms = [step.record.gradient_norm for step in steps if step.record.gradient_norm is not None]
    told = f"norms before clipping {min(norms):.3g} to {max(norms):.3g}" if norms else "no norm"
    if broken:
        told += f"; not finite: {', '.join(broken[:_SHOWN])}"
    if causes:
        told += f"; a step was refused, first since its {causes[0]}"
    return decide(
        "updates",
        name,
        holds=not broken and not causes,
        measured=f"{told}, in {len(steps)} steps, of fresh weights and of the finished ones",
        expected="every gradient finite, and no step refused",
        first_test="run one step on one window with torch.autograd.detect_anomaly, which names "
        "the operation whose gradient is the first that is not finite",
    )


def check_accumulation(subject: Subject, whole: Drilled, cut: Drilled, name: str) -> Check:
    """One pass over n windows, or n passes over one: the same sums, divided once.

    It is tried on the windows as they are, and with some of them counted three times, so that a
    mean of means could not pass for the mean.

    Args:
        subject: the run.
        whole: a drill of one pass for each step.
        cut: the same drill, a pass for each window.
        name: of the check.
    """
    n, params = len(drill_numbers(subject)), subject.recipe.pretrain
    if n < 2:
        return Check(
            group="updates",
            name=name,
            measured="a step of this run has one window, which cannot be cut",
            expected="equal gradients from one pass and from many",
            verdict="not_measured",
            first_test=_CUT,
        )
    uneven, steps = _Uneven(subject.job.objective), [whole.steps[0].record.step]
    drills = [drill(subject, steps=steps, passes=k, objective=uneven) for k in (2, n)]
    few, many = (digest_all(steps_seen, params) for steps_seen in drills)
    pairs = [(whole, cut), (few, many)]
    gap = max(_gap(a.gradients, b.gradients) for a, b in pairs)
    targets = [(a.steps[0].record.targets, b.steps[0].record.targets) for a, b in pairs]
    return decide(
        "updates",
        name,
        holds=gap <= _LARGEST_GAP and all(a == b for a, b in targets),
        measured=f"gradients of few passes and of {n} differ by up to {gap:.2g} of the norm of "
        "all, with uneven targets too; targets: " + ", ".join(f"{a} and {b}" for a, b in targets),
        expected=f"at most {_LARGEST_GAP:g}, and equal numbers of targets",
        first_test=_CUT,
    )


class _Uneven:
    """An objective in which every third window counts three times, nats and targets alike.

    Windows go through one by one, so that no other difference between the cuts is left.
    """

    def __init__(self, inner: Objective) -> None:
        self._inner = inner

    def loss(self, model: Backbone, windows: Tensor, numbers: np.ndarray) -> LossSum:
        parts = []
        for row, number in enumerate(numbers):
            part = self._inner.loss(model, windows[row : row + 1], numbers[row : row + 1])
            parts += [part] * (3 if number % 3 == 0 else 1)
        return add(parts)

    def flops_of_first(self, params: ModelParams, n_windows: int) -> float:
        return self._inner.flops_of_first(params, n_windows)


def _fault(parameter: str, steps: Sequence[Digest]) -> str | None:
    """What keeps a parameter from being learned, in words."""
    if not steps[0].trainable[parameter]:
        return "asks for no gradient"
    if steps[0].n_listed[parameter] != 1:
        return f"is listed {steps[0].n_listed[parameter]} times by the optimiser"
    norms = [step.norms[parameter] for step in steps]
    if all(size is None for size in norms):
        return "has no gradient"
    return None if any(norms) else "has a gradient of exactly 0"


def _without_guess(subject: Subject) -> set[str]:
    """Parameters that this run gives no gradient: the guess's, where no window has a guess."""
    if any(has_guess(subject, int(number)) for number in drill_numbers(subject)):
        return set()
    names = (name for name, _ in subject.model.named_parameters())
    return {name for name in names if name.startswith("self_conditioning.")}


def _spread(step: Digest) -> str:
    """The parameters with the smallest and the largest gradient."""
    finite = {
        name: size for name, size in step.norms.items() if size is not None and math.isfinite(size)
    }
    if not finite:
        return "none of them finite"
    low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    return f"norms from {finite[low]:.2g} ({low}) to {finite[high]:.2g} ({high})"


def _gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of one parameter's gradient, as a share of the norm of all."""
    total = norm(first)
    worst = max(
        float((gradient.double() - second[name]).norm()) if name in second else math.inf
        for name, gradient in first.items()
    )
    return worst / total if total > 0 else worst
