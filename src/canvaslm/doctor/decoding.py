"""Is a model given, when it decodes, what it was given in training?

A sampler is run on the run's own model, and everything that it feeds the network is written down.
What is due at each forward is stated here: ids, time, guess. The hidden states are then computed
again over the whole window, as in training, and may differ by rounding alone.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canvaslm.doctor.patient import Patient
from canvaslm.doctor.probe import A_RUN, Probe, Seen
from canvaslm.model.backbone import Backbone
from canvaslm.sampling.acceptance import EntropyBound
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.sampler import CanvasSampler
from canvaslm.sampling.stopping import Never

_STEPS = 3  # of a canvas: one without a guess, two with
_TOKENS = 8  # of the twin
_LARGEST_GAP = 1e-4  # of the largest value, between two ways to the same numbers
_CHUNK = 1 << 13  # vocabulary rows at a time where a guess is embedded; changes no value


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """One denoising forward of the sampler: what went in, and what came out."""

    start: int
    noisy: Tensor
    times: Tensor
    guess: Tensor | None
    hidden: Tensor


@dataclass(kw_only=True)
class _Watch:
    """All that a sampler fed its model.

    Attributes:
        model: a copy of the run's, which writes down what it is given.
        plain: the run's.
        forwards: the denoising ones, in order.
        read: what the clean stream was given, piece by piece.
        last: its hidden states at the last position of each piece.
    """

    model: Backbone
    plain: Backbone
    forwards: list[_Forward] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)

    def clean(self) -> Tensor:
        """All clean ids (1, n) in the order in which they were read."""
        return torch.cat(self.read, dim=1)


def _look_at_decoding(patient: Patient) -> Seen:
    """A held-out prompt is continued; each forward is held against what training would give."""
    watch, layout = _watch(patient.subject.model), patient.recipe.layout
    ids = patient.held_out.gather(np.array([0]))[0]
    n_prompt = layout.canvas_tokens * (layout.canvases_per_window // 2)
    prompt, room = ids[:n_prompt].tolist(), layout.window_tokens - n_prompt
    if patient.recipe.diffusion is None:
        made = _continue_tokens(patient, watch, prompt, min(_TOKENS, room))
        due = [patient.subject.eot_id, *prompt, *made[:-1]]
        wrong, largest = _compare_tokens(watch, due)
        n_forwards = len(watch.last)
    else:
        made = _continue_canvases(patient, watch, prompt, min(2 * layout.canvas_tokens, room))
        wrong, largest = _compare_canvases(watch, [*prompt, *made])
        n_forwards = len(watch.forwards)
    told = f"{wrong[0]} ({len(wrong)} are off)" if wrong else f"within {largest:.2g} of the largest"
    return Seen(
        looked_at=f"{patient.checkpoint}: {n_forwards} forwards of its sampler, computed again",
        measured=told,
        holds=not wrong,
        next_step="the sampler gives the network something else than training did",
    )


def _continue_tokens(
    patient: Patient, watch: _Watch, prompt: list[int], n_tokens: int
) -> list[int]:
    sampler = AutoregressiveSampler(
        model=watch.model, temperature=0.0, bos_id=patient.subject.eot_id, eot_id=None
    )
    return sampler.generate([prompt], n_tokens, [patient.subject.params.seed])[0].ids


def _continue_canvases(
    patient: Patient, watch: _Watch, prompt: list[int], n_tokens: int
) -> list[int]:
    sampler = CanvasSampler(
        model=watch.model,
        acceptance=EntropyBound(bound=0.1),
        stopping=Never(),
        denoise_steps=_STEPS,
        start_temperature=0.8,
        end_temperature=0.4,
        eot_id=None,
        vocab_chunk=_CHUNK,
    )
    return sampler.generate([prompt], n_tokens, [patient.subject.params.seed])[0].ids


@torch.no_grad()
def _compare_tokens(watch: _Watch, due: list[int]) -> tuple[list[str], float]:
    """What the twin read, and its hidden state at each token, against one pass over all of it."""
    wrong = _unlike_ids(watch, due)
    if wrong:
        return wrong, 0.0
    whole = watch.plain.encode(watch.clean()).hidden[:, -len(watch.last) :]
    gaps = [_gap(whole[:, n], hidden) for n, hidden in enumerate(watch.last)]
    wrong = [f"token {n} off by {gap:.2g}" for n, gap in enumerate(gaps) if not gap <= _LARGEST_GAP]
    return wrong, max(gaps)


@torch.no_grad()
def _compare_canvases(watch: _Watch, due: list[int]) -> tuple[list[str], float]:
    """Ids that were read, then time, guess and hidden states of each forward."""
    wrong = _unlike_ids(watch, due)
    if wrong:
        return wrong, 0.0
    largest, before = 0.0, None
    for number, forward in enumerate(watch.forwards):
        step = number % _STEPS
        time = (_STEPS - step) / _STEPS
        guess = _guess_after(watch.plain, None if step == 0 else before)
        place = f"step {step} of the canvas at {forward.start}"
        if not bool((forward.times == time).all()):
            wrong.append(f"{place}: time {float(forward.times.max()):.3g} instead of {time:.3g}")
        if (guess is None) != (forward.guess is None):
            wrong.append(f"{place}: {'a' if guess is None else 'no'} guess was given")
        gap = _gap(_whole_window(watch, forward, time, guess), forward.hidden)
        if not gap <= _LARGEST_GAP:
            wrong.append(f"{place}: hidden states off by {gap:.2g} of the largest")
        largest, before = max(largest, gap), forward.hidden
    return wrong, largest


def _unlike_ids(watch: _Watch, due: list[int]) -> list[str]:
    """Where the clean stream was given other ids than the text."""
    read = watch.clean()[0].tolist()
    unlike = [n for n, (was, is_due) in enumerate(zip(read, due, strict=False)) if was != is_due]
    if len(read) != len(due):
        return [f"{len(read)} ids were read for {len(due)}"]
    return [f"id {read[n]} was read at position {n} for {due[n]}" for n in unlike]


def _guess_after(model: Backbone, hidden: Tensor | None) -> Tensor | None:
    """What a network that takes a guess is to be given after a step."""
    if hidden is None or model.self_conditioning is None:
        return None
    return model.soft_embedding(hidden, vocab_chunk=_CHUNK)


def _whole_window(watch: _Watch, forward: _Forward, time: float, guess: Tensor | None) -> Tensor:
    """The hidden states of one canvas, from one pass over all canvases up to it."""
    model, L = watch.plain, watch.plain.layout.canvas_tokens
    own = slice(forward.start, forward.start + L)
    clean = watch.clean()[:, : own.stop]
    noisy = clean.clone()
    noisy[:, own] = forward.noisy
    times = torch.full((1, own.stop // L), time, dtype=torch.float64, device=clean.device)
    everywhere = None
    if guess is not None:
        everywhere = guess.new_zeros(1, own.stop, guess.shape[-1])
        everywhere[:, own] = guess
    context = model.encode(clean)
    hidden = model.denoise(noisy, times, context=context, guess=everywhere, has_guess=None)
    return hidden[:, own]


def _watch(plain: Backbone) -> _Watch:
    """A copy of a model under watch; its passes are written over in this copy alone."""
    watch = _Watch(model=copy.deepcopy(plain), plain=plain)

    def encode(ids: Tensor, **options: Any) -> Any:
        encoded = plain.encode(ids, **options)
        watch.read.append(ids.clone())
        watch.last.append(encoded.hidden[:, -1])
        return encoded

    def encode_context(ids: Tensor, **options: Any) -> Any:
        watch.read.append(ids.clone())
        return plain.encode_context(ids, **options)

    def denoise(noisy: Tensor, times: Tensor, **options: Any) -> Tensor:
        start, guess = options["context"].start, options["guess"]
        hidden = plain.denoise(noisy, times, **options)
        watch.forwards.append(
            _Forward(start=start, noisy=noisy, times=times, guess=guess, hidden=hidden)
        )
        return hidden

    vars(watch.model).update(encode=encode, encode_context=encode_context, denoise=denoise)
    return watch


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((one - other).abs().max() / other.abs().max())


DECODING = (
    Probe(
        name="decoding_sees_what_training_sees",
        section="The sampler disagrees with a single forward",
        look=_look_at_decoding,
        rests_on=(*A_RUN, "cache_agrees_with_window"),
    ),
)
