"""What did the training of the run come to, from its first weights to its last?

A finished run may have learned little: a short one on hard text hardly moves, and no figure of its
loss is a contract. But every parameter has moved, and nothing has been unlearned.
"""

from canvaslm.run_audit.check import Check, decide
from canvaslm.run_audit.own_loss import has_guess
from canvaslm.run_audit.reading import fresh_model
from canvaslm.run_audit.subject import Subject

_RISE = 0.1  # of the first logged loss, by which the last may lie above it
_SHOWN = 4
_FORKED = "the run began from another run's weights, which are not at hand"
_MOVED = (
    "see gradients_reach_every_parameter: a parameter that has a gradient there and never moved "
    "is missing from the optimiser of the run, or was put back"
)
_LEARN = (
    "python -m pytest -q "
    "tests/training/test_learner.py::test_a_few_steps_on_the_same_windows_learn_them"
)


def check_moved(subject: Subject, name: str) -> Check:
    """The finished weights against those that the seed draws, parameter by parameter."""
    expected = "every one differs from the initial draw of the seed"
    progress = subject.state.progress
    if subject.state.identity.parent is not None:
        return _not_measured(name, _FORKED, expected, _MOVED)
    if progress.step == len(progress.skipped):
        return _not_measured(name, "no step of the run changed anything", expected, _MOVED)
    finished = dict(subject.model.named_parameters())
    fresh = dict(fresh_model(subject).named_parameters())
    still = [key for key, value in fresh.items() if bool((finished[key].cpu() == value).all())]
    excused = _never_used(subject, still)
    stuck = [key for key in still if key not in excused]
    measured = f"{len(fresh) - len(still)} of {len(fresh)} parameters"
    if stuck:
        measured += f"; not {', '.join(stuck[:_SHOWN])}"
    if excused:
        measured += "; the guess's projection did not, since no window had a guess"
    return decide(
        "updates",
        name,
        holds=not stuck,
        measured=measured,
        expected=expected,
        first_test=_MOVED,
    )


def check_loss(subject: Subject, name: str) -> Check:
    """The last row of the loss log against the first."""
    expected = f"a last logged loss that is not more than {_RISE:.0%} above the first"
    rows = [row for row in subject.loss_rows if row["loss_nats"]]
    if subject.state.identity.parent is not None:
        return _not_measured(name, _FORKED, expected, _LEARN)
    if len(rows) < 2:
        return _not_measured(name, "loss.csv has fewer than two losses", expected, _LEARN)
    first, last = float(rows[0]["loss_nats"]), float(rows[-1]["loss_nats"])
    return decide(
        "updates",
        name,
        holds=last <= first * (1 + _RISE),
        measured=f"{first:.4f} nats per target in the first row of loss.csv, {last:.4f} in the "
        f"last: {abs(first - last):.4f} {'less' if last < first else 'more'}",
        expected=expected,
        first_test=_LEARN,
    )


def _never_used(subject: Subject, names: list[str]) -> list[str]:
    """Of these parameters, those of the guess, in a run none of whose windows had one."""
    guess = [name for name in names if name.startswith("self_conditioning.")]
    consumed = range(subject.state.progress.windows_consumed)
    return [] if not guess or any(has_guess(subject, n) for n in consumed) else guess


def _not_measured(name: str, why: str, expected: str, first_test: str) -> Check:
    return Check(
        group="updates",
        name=name,
        measured=why,
        expected=expected,
        verdict="not_measured",
        first_test=first_test,
    )
