"""Did the run learn from the tokens that it should have, all of them and no others?"""

import functools
import math
from collections.abc import Callable

import numpy as np

from canvaslm.run_audit.check import Check, attempt, decide
from canvaslm.run_audit.consumed import Consumed, read_all
from canvaslm.run_audit.stand_in import NO_TARGET, ReadBack, read_back
from canvaslm.run_audit.subject import Subject
from canvaslm.run_audit.tilted import position_shares

_LARGEST_Z = 5.0  # of the kept share: one clean run in two million lies further off


def check_data(subject: Subject) -> list[Check]:
    """Hold ids, inputs, targets, windows and counts of a run against what they should be."""
    samples = functools.cache(lambda: read_back(subject))
    consumed = functools.cache(lambda: read_all(subject))
    is_twin = subject.recipe.diffusion is None
    inputs = "inputs_are_shifted_by_one" if is_twin else "inputs_are_corrupted_windows"
    targets = "targets_are_next_tokens" if is_twin else "targets_are_clean_tokens"
    look_at_inputs = _check_shifted if is_twin else _check_corrupted
    makes: dict[str, Callable[[], Check]] = {
        "ids_are_in_vocabulary": lambda: _check_ids(subject, consumed()),
        inputs: lambda: look_at_inputs(subject, samples(), inputs),
        targets: lambda: _check_targets(samples(), targets),
        "no_held_out_window_consumed": lambda: _check_held_out(subject, consumed()),
        "run_reached_its_plan": lambda: _check_plan(subject),
        "skipped_steps_are_counted": lambda: _check_skipped(subject, consumed()),
        "loss_log_is_whole": lambda: _check_log(subject),
    }
    return [attempt("data", name, make) for name, make in makes.items()]


def _check_ids(subject: Subject, consumed: Consumed) -> Check:
    last = subject.recipe.layout.vocab_size - 1
    return decide(
        "data",
        "ids_are_in_vocabulary",
        holds=consumed.lowest >= 0 and consumed.highest <= last,
        measured=f"{consumed.lowest} to {consumed.highest} in {consumed.n_windows} windows",
        expected=f"ids from 0 to {last}",
        first_test="compare the vocabulary of the shards' manifest with the tokenizer's",
    )


def _check_shifted(subject: Subject, samples: list[ReadBack], name: str) -> Check:
    """The twin reads the end of text, then all but the last token."""
    wrong = 0
    for sample in samples:
        assert sample.clean is not None, "the twin reads clean ids"
        due = np.concatenate([[subject.eot_id], sample.window[:-1]])
        wrong += int((sample.clean != due).sum())
    return decide(
        "data",
        name,
        holds=wrong == 0,
        measured=f"{_share(wrong, samples)} are another id",
        expected=f"the end of text ({subject.eot_id}), then all tokens but the last",
        first_test="print the first four inputs and targets of a window side by side",
    )


def _check_corrupted(subject: Subject, samples: list[ReadBack], name: str) -> Check:
    """The clean stream is the window; of the noisy one, as much is kept as its time says."""
    layout, wrong, z = subject.recipe.layout, 0, _kept_z(subject, samples)
    for sample in samples:
        if sample.noisy is not None:  # a phase may learn the next token of clean windows alone
            wrong += int(((sample.noisy < 0) | (sample.noisy >= layout.vocab_size)).sum())
        if sample.clean is not None:
            wrong += int((sample.clean != sample.window).sum())
    return decide(
        "data",
        name,
        holds=wrong == 0 and abs(z) <= _LARGEST_Z and any(x.noisy is not None for x in samples),
        measured=f"{_share(wrong, samples)} are an id that may not stand there; the share of clean "
        f"tokens among the noisy ones is {abs(z):.1f} standard errors off that of their times",
        expected=f"clean context as in the shards; at most {_LARGEST_Z:g} standard errors",
        first_test="compare noisy ids with the window at a canvas of the first and of the last "
        "time: nearly all, and about one in the vocabulary, should agree",
    )


def _kept_z(subject: Subject, samples: list[ReadBack]) -> float:
    """By how many standard errors the number of unchanged tokens is off."""
    L, V = subject.recipe.layout.canvas_tokens, subject.recipe.layout.vocab_size
    kept = due = variance = 0.0
    for sample in samples:
        if sample.noisy is None or sample.times is None:
            continue
        each = [position_shares(float(t), L, subject.recipe.model.tilt) for t in sample.times]
        share = np.cos(np.concatenate(each) * (math.pi / 2)) ** 2
        same = share + (1 - share) / V  # a replacement is the clean token once in V
        kept += float((sample.noisy == sample.window).sum())
        due += float(same.sum())
        variance += float((same * (1 - same)).sum())
    return (kept - due) / math.sqrt(variance) if variance > 0 else 0.0


def _check_targets(samples: list[ReadBack], name: str) -> Check:
    found = [(sample.targets, _due(sample)) for sample in samples]
    found += [(x.beside, _next(x.window)) for x in samples if x.beside is not None]
    n_aimed = sum(int((targets != NO_TARGET).sum()) for targets, _ in found)
    wrong = sum(int((targets != due)[targets != NO_TARGET].sum()) for targets, due in found)
    return decide(
        "data",
        name,
        holds=wrong == 0 and n_aimed > 0,
        measured=f"{wrong} of {n_aimed} targets, read back from gradients, are another token",
        expected="each is the token of the window at its own place, or at the next one where a "
        "clean stream learns",
        first_test="shift the targets that were read back by one place either way and compare "
        "again: agreement names the shift",
    )


def _due(sample: ReadBack) -> np.ndarray:
    """(T,) the targets that a sample should have."""
    learns_next = sample.noisy is None and not sample.is_twin
    return _next(sample.window) if learns_next else sample.window


def _next(window: np.ndarray) -> np.ndarray:
    """(T,) the token after each place of a window; nothing after the last."""
    return np.append(window[1:], NO_TARGET)


def _check_held_out(subject: Subject, consumed: Consumed) -> Check:
    n_held_out = len(subject.held_out)
    return decide(
        "data",
        "no_held_out_window_consumed",
        holds=not consumed.held_out,
        measured=f"{len(consumed.held_out)} of {consumed.n_windows - consumed.n_unused} windows "
        f"that were learned from are held out; {len(consumed.held_out_unused)} of "
        f"{consumed.n_unused} in steps that changed nothing",
        expected=f"none of the {n_held_out} held-out windows, by hash of their ids",
        first_test="hash the training shards' files against the manifest: other hashes mean other "
        "files, equal ones that the run reads another split",
    )


def _check_plan(subject: Subject) -> Check:
    """Steps, windows and tokens, by the state and by the last row of the log, and epochs."""
    params, progress = subject.recipe.pretrain, subject.state.progress
    n_windows = params.steps * params.windows_per_step
    due = (params.steps, n_windows, n_windows * subject.recipe.layout.window_tokens)
    done = (progress.step, progress.windows_consumed, progress.tokens)
    last = subject.loss_rows[-1] if subject.loss_rows else {}
    logged = tuple(last.get(key) for key in ("step", "windows", "tokens"))
    epochs = progress.windows_consumed / len(subject.train)
    return decide(
        "data",
        "run_reached_its_plan",
        holds=done == due and logged == tuple(map(str, due)),
        measured=f"{_counts(done)}, {epochs:.4g} epochs; the log ends at {_counts(logged)}",
        expected=f"{_counts(due)}, {n_windows / len(subject.train):.4g} epochs",
        first_test="compare `steps` and `windows_per_step` of params.yaml with the identity in "
        "state.json: other values mean another run's checkpoint",
    )


def _check_skipped(subject: Subject, consumed: Consumed) -> Check:
    """Steps that changed nothing, by the state and by the log."""
    progress = subject.state.progress
    marked = {step for back in progress.rollbacks for step in back.marked}
    skipped = [skip.step for skip in progress.skipped]
    logged = sum(int(row["skipped_steps"]) for row in subject.loss_rows)
    return decide(
        "data",
        "skipped_steps_are_counted",
        holds=logged == len(skipped)
        and skipped == sorted(set(skipped))
        and marked <= set(skipped)
        and all(step < progress.step for step in skipped),
        measured=f"{len(skipped)} skipped by the state and {logged} by the log, with "
        f"{consumed.n_unused} windows; {len(progress.rollbacks)} rollbacks marked {len(marked)}",
        expected="one number, each step once, every marked step among the skipped",
        first_test="count the rows of loss.csv whose skipped_steps is above 0 and compare their "
        "steps with the list in state.json",
    )


def _check_log(subject: Subject) -> Check:
    """Each row stands once and in order, counts what its step says, and holds finite figures."""
    params = subject.recipe.pretrain
    due = [*range(params.log_every, params.steps, params.log_every), params.steps]
    steps = [row["step"] for row in subject.loss_rows]
    broken = [row["step"] for row in subject.loss_rows if not _is_sound(row, subject)]
    found = f"{len(steps)} rows; {len(broken)} do not count what their step says or are not finite"
    if broken:
        found += f", the first at step {broken[0]}"
    return decide(
        "data",
        "loss_log_is_whole",
        holds=steps == list(map(str, due)) and not broken,
        measured=found,
        expected=f"{len(due)} rows, one after every {params.log_every} steps and after the last",
        first_test="look for a step that stands twice: a log that was not cut back on resume",
    )


def _is_sound(row: dict[str, str], subject: Subject) -> bool:
    """Whether a row counts rightly and its loss is a number if it has one."""
    params, window_tokens = subject.recipe.pretrain, subject.recipe.layout.window_tokens
    windows = int(row["step"]) * params.windows_per_step
    if (row["windows"], row["tokens"]) != (str(windows), str(windows * window_tokens)):
        return False
    if float(row["flops"]) != subject.job.flops_of_first(windows):
        return False
    if not row["loss_nats"]:
        return int(row["targets"]) == 0 and int(row["skipped_steps"]) > 0
    figures = (row[key] or "0" for key in ("loss_nats", "gradient_norm", "learning_rate", "flops"))
    return int(row["targets"]) > 0 and all(0 <= float(text) < math.inf for text in figures)


def _share(wrong: int, samples: list[ReadBack]) -> str:
    return f"{wrong} of {sum(len(sample.window) for sample in samples)} input ids"


def _counts(counts: tuple[int | str | None, ...]) -> str:
    return "{} steps, {} windows, {} tokens".format(*counts)
