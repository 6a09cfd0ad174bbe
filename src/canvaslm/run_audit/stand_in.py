"""What does an objective feed a model, and what does it ask of it, whatever its loss is?

A stand-in takes the model's place: it remembers the ids that it is given and hands out hidden
states of its own. The gradient of the loss at a hidden state points away from the target's row of
the head, for cross-entropy and for what a mistake may have made of it, so the target can be read
off the gradient without believing in the loss.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import CleanContext, Context, Encoded
from canvaslm.randomness import stream
from canvaslm.run_audit.subject import Subject
from canvaslm.training.loader import open_reader

NO_TARGET = -1
_WIDTH = 256  # random rows of this width are far from each other, whatever the vocabulary


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """What an objective did with one window.

    Attributes:
        number: the window's number in the run.
        is_twin: whether the run is the autoregressive one.
        window: (T,) its ids.
        clean: (T,) the ids of the clean stream, or None where the model was given none.
        noisy: (T,) the ids of the noisy stream, or None.
        times: (C,) the canvases' times as shares of 1, or None.
        targets: (T,) the id that each position is drawn to; NO_TARGET where it carries no loss.
        beside: (T,) the same of what the clean stream learns beside, or None.
    """

    number: int
    is_twin: bool
    window: np.ndarray
    clean: np.ndarray | None
    noisy: np.ndarray | None
    times: np.ndarray | None
    targets: np.ndarray
    beside: np.ndarray | None


def read_back(subject: Subject) -> list[ReadBack]:
    """Send some of the windows that the run consumed, spread over it, through its objective."""
    consumed = subject.state.progress.windows_consumed
    numbers = np.unique(np.linspace(0, consumed - 1, subject.params.n_windows).astype(np.int64))
    rows, V = _head(subject), subject.recipe.layout.vocab_size
    assert rows.shape == (V, _WIDTH)
    return [_read_one(subject, rows, int(number)) for number in numbers]


def _head(subject: Subject) -> Tensor:
    """A head of random rows of length 1, (V, D)."""
    draws = stream(subject.params.seed, "run_audit/head")
    shape = (subject.recipe.layout.vocab_size, _WIDTH)
    rows = torch.from_numpy(draws.standard_normal(shape, dtype=np.float32))
    return torch.nn.functional.normalize(rows, dim=1)


def _read_one(subject: Subject, head: Tensor, number: int) -> ReadBack:
    numbers, window = np.array([number]), _window(subject, number)
    model = _StandIn(subject, head)
    loss = subject.job.objective.loss(cast(Backbone, model), torch.from_numpy(window), numbers)
    return ReadBack(
        number=number,
        is_twin=subject.recipe.diffusion is None,
        window=window[0],
        clean=_one(model.clean),
        noisy=_one(model.noisy),
        times=_one(model.times),
        targets=_targets(loss.nats, model.hidden, head),
        beside=None if loss.companion is None else _targets(loss.companion, model.encoded, head),
    )


def _targets(nats: Tensor, hidden: Tensor, head: Tensor) -> np.ndarray:
    """(T,) what the gradient of a loss draws hidden states (1, T, D) to."""
    (gradient,) = torch.autograd.grad(nats, hidden)
    pulls = -gradient[0] @ head.T  # (T, V): largest where a position is drawn to
    return pulls.argmax(1).masked_fill(gradient[0].abs().amax(1) == 0, NO_TARGET).numpy()


def _window(subject: Subject, number: int) -> np.ndarray:
    """The ids (1, T) of one window, gathered as the run gathers them."""
    params = subject.recipe.pretrain
    with open_reader(subject.train, params) as reader:
        windows, _ = reader.read(number // params.windows_per_step)
    place = number % params.windows_per_step
    return windows[place : place + 1]


class _StandIn:
    """In the model's place: what it was given stays, what it hands out is all the same."""

    def __init__(self, subject: Subject, head: Tensor) -> None:
        self.params = subject.recipe.model.model_copy(update={"self_conditioning": "off"})
        self.layout = subject.recipe.layout
        self.head_weight = head
        self.clean: Tensor | None = None
        self.noisy: Tensor | None = None
        self.times: Tensor | None = None
        self.hidden = self.encoded = torch.zeros(())

    def encode(self, ids: Tensor) -> Encoded:
        self.clean = ids
        self.encoded = self._hand_out(ids)
        return Encoded(ids=ids, hidden=self.encoded, keys=(), values=())

    def encode_context(self, ids: Tensor) -> Context:
        self.clean = ids
        return Context(ids=ids, keys=(), values=())

    def denoise(
        self, noisy: Tensor, times: Tensor, *, context: CleanContext, guess: None, has_guess: None
    ) -> Tensor:
        del context
        return self.denoise_one_stream(noisy, times, guess=guess, has_guess=has_guess)

    def denoise_one_stream(
        self, noisy: Tensor, times: Tensor, *, guess: None, has_guess: None
    ) -> Tensor:
        del guess, has_guess
        self.noisy, self.times = noisy, times
        return self._hand_out(noisy)

    def _hand_out(self, ids: Tensor) -> Tensor:
        self.hidden = torch.zeros(*ids.shape, _WIDTH, requires_grad=True)
        return self.hidden


def _one(values: Tensor | None) -> np.ndarray | None:
    """The only row of a batch."""
    return None if values is None else values[0].numpy()
