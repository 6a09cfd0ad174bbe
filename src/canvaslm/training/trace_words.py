"""How is the first place that went wrong told in words?"""

from collections.abc import Sequence

from canvaslm.training.trace_values import STANDING, TracedTensor

_STREAMS = {
    "clean": " in the clean stream",
    "first": " in the first pass of self-conditioning",
    "noisy": " in the noisy stream",
}
_SHOWN = 8  # window numbers in a sentence


def find_first(tensors: Sequence[TracedTensor]) -> TracedTensor | None:
    """The first tensor of the passes, forward and back, that is not finite; None if all are."""
    passed = (each for each in tensors if not each.stood_before)
    return next((each for each in passed if each.values.n_nonfinite), None)


def say_first_place(tensors: Sequence[TracedTensor], *, cause: str) -> str:
    """Name the first place that went wrong.

    Args:
        tensors: all that was seen of the bad step, in the order of time.
        cause: the step's fault when it was run again; empty for none.
    """
    parts = [_say_state(tensors, name) for name in STANDING]
    first = find_first(tensors)
    if first is not None:
        opening = "the first to show it is " if any(parts) else ""
        parts.append(opening + _say_tensor(first, tensors))
    elif not cause:
        parts.append(
            "run again, the step is finite: its windows and their noise do not bring the fault back"
        )
    elif cause.startswith("gradient norm"):
        parts.append(_say_norm(tensors))
    else:
        parts.append(f"no tensor of the passes: {cause}")
    return "; ".join(filter(None, parts))


def say_alone(alone: Sequence[tuple[int, str]], *, micro_batch: int | None, n_windows: int) -> str:
    """Say which windows of the first bad micro-batch go wrong when they are run alone."""
    if micro_batch is None:
        return "not tried: no micro-batch went wrong when the step was run again"
    if not alone:
        return f"none of the {n_windows} windows of micro-batch {micro_batch} does it alone"
    causes: dict[str, list[int]] = {}
    for window, cause in alone:
        causes.setdefault(cause, []).append(window)
    told = "; ".join(
        f"{cause} with {_say_windows(windows)} alone" for cause, windows in causes.items()
    )
    if len(alone) == n_windows > 1:
        return f"{told}: every window of micro-batch {micro_batch}, so look at weights first"
    return f"{told}, of {n_windows} windows of micro-batch {micro_batch}"


def _say_windows(windows: Sequence[int]) -> str:
    """Name some windows by their numbers in the run."""
    shown = ", ".join(map(str, windows[:_SHOWN]))
    rest = len(windows) - _SHOWN
    return f"window{'s' if len(windows) > 1 else ''} {shown}" + (
        f" and {rest} more" if rest > 0 else ""
    )


def _say_state(tensors: Sequence[TracedTensor], name: str) -> str:
    """Name the first weight or moment that was not finite before the step began."""
    spoilt = [each for each in tensors if each.tensor == name and each.values.n_nonfinite]
    if not spoilt:
        return ""
    what = "parameter" if name == "weight" else f"{name} of parameter"
    others = f", and of {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
    return (
        f"before the step, {what} {spoilt[0].module} was not finite ({_count(spoilt[0])}){others}"
    )


def _say_tensor(first: TracedTensor, tensors: Sequence[TracedTensor]) -> str:
    """Name a tensor of the passes, and what was finite just before it."""
    place = f"micro-batch {first.micro_batch} ({_say_windows(first.windows)})"
    before = _last_finite(first, tensors)
    if first.stream == "loss":
        return f"the loss of {place}, though every module was finite; {before} came before it"
    if first.stream == "parameters":
        return f"the gradient of parameter {first.module}, {place}: {_count(first)}; {before}"
    name = f"{_name(first)}, {place}: {_count(first)}"
    if first.tensor == "input":
        return f"{name}; it was computed there, as {before}"
    if first.tensor == "gradient":
        return f"{name}; all outputs and the loss were finite; {before}"
    return f"{name}; {_input_of(first, tensors) or before}"


def _input_of(output: TracedTensor, tensors: Sequence[TracedTensor]) -> str:
    """Say what a module was given, which stands just before what it made."""
    given = tensors[tensors.index(output) - 1]
    if (given.module, given.tensor) != (output.module, "input"):
        return ""
    return f"its input was finite, {_size(given)}"


def _last_finite(first: TracedTensor, tensors: Sequence[TracedTensor]) -> str:
    """Say what the passes came through just before, if they had begun."""
    passed = [
        each
        for each in tensors[: tensors.index(first)]
        if not each.stood_before and each.values.n_values
    ]
    if not passed:
        return "nothing came before it"
    return f"{_name(passed[-1])} was finite ({_size(passed[-1])})"


def _say_norm(tensors: Sequence[TracedTensor]) -> str:
    """Every value is finite, and their squares are not."""
    gradients = [
        each for each in tensors if each.stream == "parameters" and each.tensor == "gradient"
    ]
    largest = max(gradients, key=lambda each: each.values.abs_max or 0.0)
    return (
        "the norm of the gradient: every value is finite and the sum of their squares is not; "
        f"the largest is in the gradient of parameter {largest.module}, {_size(largest)} "
        "(of the sum over the targets)"
    )


def _name(tensor: TracedTensor) -> str:
    if tensor.stream == "loss":
        return "the loss"
    if tensor.stream == "parameters":
        return f"the gradient of parameter {tensor.module}"
    what = "the gradient of the output" if tensor.tensor == "gradient" else f"the {tensor.tensor}"
    return f"{what} of {tensor.module}{_STREAMS.get(tensor.stream, '')}"


def _count(tensor: TracedTensor) -> str:
    values = tensor.values
    finite = f", {_size(tensor)} of the others" if values.abs_max is not None else ""
    return f"{values.n_nonfinite} of {values.n_values} values not finite{finite}"


def _size(tensor: TracedTensor) -> str:
    return f"absolute maximum {tensor.values.abs_max:.4g}"
