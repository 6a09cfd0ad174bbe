"""Which tokens may reach which logits, and do they in the model that was trained?

Of a denoiser: nothing later, never the clean copy of a canvas' own tokens (which holds the answer),
no other noisy canvas; but the clean canvases before it, its own noisy tokens both ways, its time.
Of the twin: earlier tokens and no later one. ``docs/context.md`` gives the reasons.
"""

from collections.abc import Sequence

from canvaslm.model.backbone import Backbone
from canvaslm.run_audit.check import Check, attempt
from canvaslm.run_audit.interventions import Trial, Window
from canvaslm.run_audit.reading import Part, Reading, fresh_model
from canvaslm.run_audit.subject import Subject

_MASKS = (
    "python -m pytest -q "
    "tests/model/test_attention.py::test_only_a_forbidden_key_leaves_a_query_bit_equal"
)
_TOKENS = (
    "python -m pytest -q "
    "tests/model/test_backbone.py::test_only_a_token_that_a_position_sees_moves_its_logits"
)
_OWN_COPY = (
    "python -m pytest -q "
    "tests/model/test_backbone.py::test_own_clean_copy_never_reaches_a_noisy_canvas"
)
_TIMES = (
    "python -m pytest -q "
    "tests/model/test_layers.py::test_neighbouring_times_have_different_features"
)


def check_influence(subject: Subject, model: Backbone, reading: Reading) -> list[Check]:
    """Try what may be seen and what may not, for the objective that the run has.

    Args:
        subject: the run.
        model: its model, on the CPU.
        reading: the window to change.
    """
    window = Window(model, fresh_model(subject), reading, seed=subject.params.seed)
    if subject.recipe.diffusion is None:
        return [
            _unseen(window, "later_tokens_are_unseen", _later_tokens(window), _MASKS),
            _seen(window, "earlier_tokens_are_seen", _earlier_tokens(window), _MASKS),
        ]
    later, earlier = _later_canvases(window), _earlier_canvases(window)
    if subject.recipe.diffusion.context != "clean":
        later, earlier = later + _later_noisy(window), earlier + _earlier_noisy(window)
    # A canvas of one token that reads the token before reads none of its own.
    has_own = window.canvas_tokens > 1 or subject.recipe.model.noisy_input == "own"
    own_noisy = _own_noisy(window) if has_own else []
    checks = [
        _unseen(window, "later_canvases_are_unseen", later, _TOKENS),
        _unseen(window, "own_clean_copy_is_unseen", _own_copies(window), _OWN_COPY),
        _unseen(window, "other_noisy_canvases_are_unseen", _other_noisy(window), _TOKENS),
        _seen(window, "earlier_canvases_are_seen", earlier, _TOKENS),
        _seen(window, "own_noisy_tokens_are_seen", own_noisy, _TOKENS),
    ]
    if subject.recipe.model.clean_mask == "causal":
        later_tokens = _later_tokens(window)
        checks.insert(3, _unseen(window, "later_tokens_are_unseen", later_tokens, _MASKS))
    if subject.recipe.model.time_width:
        checks.append(_seen(window, "times_are_seen", _own_times(window), _TIMES))
    return checks


def _unseen(window: Window, name: str, trials: Sequence[Trial], first_test: str) -> Check:
    return attempt("flow", name, lambda: window.unseen(name, trials, first_test))


def _seen(window: Window, name: str, trials: Sequence[Trial], first_test: str) -> Check:
    return attempt("flow", name, lambda: window.seen(name, trials, first_test))


def _later_tokens(window: Window) -> list[Trial]:
    """In the clean stream all tokens from one place on, before which nothing may move."""
    return [
        Trial(path="clean stream", part="clean", where=slice(p, None), watched=slice(p))
        for p in window.some(1, window.n_tokens)
    ]


def _earlier_tokens(window: Window) -> list[Trial]:
    """In the clean stream all tokens before one."""
    return [
        Trial(path="clean stream", part="clean", where=slice(p), watched=slice(p, p + 1))
        for p in window.some(1, window.n_tokens)
    ]


def _later_canvases(window: Window) -> list[Trial]:
    """Everything from one boundary of canvases on: clean tokens, noisy tokens, times."""
    trials = []
    for b in window.some(1, window.n_canvases):
        end = b * window.canvas_tokens
        places: dict[Part, int] = {"noisy": end, "clean": end, "times": b}
        trials += [
            Trial(path="noisy canvases", part=part, where=slice(at, None), watched=slice(end))
            for part, at in places.items()
        ]
        trials.append(
            Trial(path="clean stream", part="clean", where=slice(end, None), watched=slice(end))
        )
    return trials


def _later_noisy(window: Window) -> list[Trial]:
    """In one stream, all noisy tokens from a boundary on."""
    ends = [b * window.canvas_tokens for b in window.some(1, window.n_canvases)]
    return [
        Trial(path="one stream", part="noisy", where=slice(end, None), watched=slice(end))
        for end in ends
    ]


def _own_copies(window: Window) -> list[Trial]:
    return [
        _between(window, "clean", changed=b, watched=b) for b in window.some(0, window.n_canvases)
    ]


def _other_noisy(window: Window) -> list[Trial]:
    """A noisy canvas is read by itself alone: those after it read its clean copy."""
    return [
        _between(window, "noisy", changed=b - 1, watched=b)
        for b in window.some(1, window.n_canvases)
    ]


def _earlier_canvases(window: Window) -> list[Trial]:
    """The clean canvas just before, and the first one from the last."""
    last = window.n_canvases - 1
    pairs = [(b - 1, b) for b in window.some(1, window.n_canvases)]
    pairs += [(0, last)] if last > 1 else []
    return [_between(window, "clean", changed=a, watched=b) for a, b in pairs]


def _earlier_noisy(window: Window) -> list[Trial]:
    """In one stream, the noisy canvas just before."""
    return [
        _between(window, "noisy", changed=b - 1, watched=b, path="one stream")
        for b in window.some(1, window.n_canvases)
    ]


def _own_noisy(window: Window) -> list[Trial]:
    """What stands after the first token of a canvas reaches it too: a canvas sees both ways."""
    trials, L = [], window.canvas_tokens
    for b in window.some(0, window.n_canvases):
        rest = slice(b * L + min(1, L - 1), (b + 1) * L)
        watched = slice(b * L, b * L + 1)
        trials.append(Trial(path="noisy canvases", part="noisy", where=rest, watched=watched))
    return trials


def _own_times(window: Window) -> list[Trial]:
    return [
        Trial(path="noisy canvases", part="times", where=slice(b, b + 1), watched=window.canvas(b))
        for b in window.some(0, window.n_canvases)
    ]


def _between(
    window: Window, part: Part, *, changed: int, watched: int, path: str = "noisy canvases"
) -> Trial:
    """One canvas is changed, one is watched."""
    return Trial(path=path, part=part, where=window.canvas(changed), watched=window.canvas(watched))
