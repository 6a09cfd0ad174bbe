"""Is a model given, when it decodes, what it was given in training?

A sampler is run on the run's own model, and everything that it feeds the network is written down.
The same is then computed over the whole window, as in training. The two hidden states may differ by
rounding alone.
"""

import copy
from dataclasses import dataclass
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
_LARGEST_GAP = 1e-4  # of the largest value, between two ways to the same numbers
_CHUNK = 1 << 13  # vocabulary rows at a time where a guess is embedded; changes no value
_NEXT = "tell the cache from the rule: the first test of this section does"


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One denoising forward of the sampler: what went in, and what came out."""

    start: int
    noisy: Tensor
    times: Tensor
    hidden: Tensor


def _look_at_decoding(patient: Patient) -> Seen:
    """A held-out prompt is continued, and each forward is computed again as training does."""
    subject = patient.subject
    ids = subject.held_out.gather(np.array([0]))[0]
    n_canvases = patient.recipe.layout.canvases_per_window
    prompt = ids[: len(ids) // n_canvases * (n_canvases // 2)].tolist()
    if subject.recipe.diffusion is None:
        prompt = ids[: len(ids) // 2].tolist()
        return _look_at_tokens(patient, prompt)
    return _look_at_canvases(patient, prompt)


def _look_at_canvases(patient: Patient, prompt: list[int]) -> Seen:
    model, calls = _watched(patient.subject.model)
    asked = min(2 * model.layout.canvas_tokens, model.layout.window_tokens - len(prompt))
    sampler = CanvasSampler(
        model=model,
        acceptance=EntropyBound(bound=0.1),
        stopping=Never(),
        denoise_steps=_STEPS,
        start_temperature=0.8,
        end_temperature=0.4,
        eot_id=None,
        vocab_chunk=_CHUNK,
    )
    [made] = sampler.generate([prompt], asked, [patient.subject.params.seed])
    if made.reason == "not_finite":
        return _seen(patient, len(calls), ["the model's numbers stopped being finite"], 0.0)
    del model.denoise  # the watched method; the plain one below it stays
    clean = torch.tensor([prompt + made.ids], device=patient.subject.device)
    wrong, largest, before = [], 0.0, None
    for number, call in enumerate(calls):
        step = number % _STEPS
        time = (_STEPS - step) / _STEPS
        if not bool((call.times == time).all()):
            wrong.append(f"time {float(call.times.flatten()[0]):.3g} at step {step} for {time:.3g}")
        due = None if step == 0 else before
        gap = _gap(_whole_window(model, clean, call, time, due), call.hidden)
        largest = max(largest, gap)
        if not gap <= _LARGEST_GAP:
            wrong.append(f"step {step} of the canvas at {call.start} off by {gap:.2g}")
        before = call.hidden
    return _seen(patient, len(calls), wrong, largest)


@torch.no_grad()
def _whole_window(
    model: Backbone, clean: Tensor, call: _Call, time: float, before: Tensor | None
) -> Tensor:
    """The hidden states of one canvas, from one pass over the window with the guess that is due."""
    L = model.layout.canvas_tokens
    own = slice(call.start, call.start + L)
    length = own.stop
    noisy = clean[:, :length].clone()
    noisy[:, own] = call.noisy
    times = torch.full((1, length // L), time, dtype=torch.float64, device=clean.device)
    guess = None
    if before is not None and model.self_conditioning is not None:
        part = model.soft_embedding(before, vocab_chunk=_CHUNK)
        guess = part.new_zeros(1, length, part.shape[-1])
        guess[:, own] = part
    context = model.encode(clean[:, :length])
    hidden = model.denoise(noisy, times, context=context, guess=guess, has_guess=None)
    return hidden[:, own]


def _look_at_tokens(patient: Patient, prompt: list[int]) -> Seen:
    """The twin's argmax, token by token, against the logits of one pass behind an end of text."""
    subject = patient.subject
    sampler = AutoregressiveSampler(
        model=subject.model, temperature=0.0, bos_id=subject.eot_id, eot_id=None
    )
    n_tokens = min(8, patient.recipe.layout.window_tokens - len(prompt))
    [made] = sampler.generate([prompt], n_tokens, [subject.params.seed])
    given = torch.tensor([[subject.eot_id, *prompt, *made.ids[:-1]]], device=subject.device)
    with torch.no_grad():
        logits = subject.model.logits(subject.model.encode(given).hidden)[0, len(prompt) :]
    chosen = logits.gather(1, torch.tensor(made.ids, device=subject.device)[:, None])[:, 0]
    short = (logits.amax(1) - chosen) / logits.abs().max()  # how far below the largest
    gaps = short.tolist()
    wrong = [
        f"token {number} is not the likeliest, by {gap:.2g} of the largest logit"
        for number, gap in enumerate(gaps)
        if not gap <= _LARGEST_GAP
    ]
    return _seen(patient, n_tokens, wrong, max(gaps))


def _seen(patient: Patient, n_forwards: int, wrong: list[str], largest: float) -> Seen:
    told = wrong[0] if wrong else f"within {largest:.2g} of the largest value"
    return Seen(
        looked_at=f"{patient.checkpoint}: {n_forwards} forwards of its sampler, computed again",
        measured=f"{told} ({len(wrong)} are off)" if wrong else told,
        holds=not wrong,
        next_step=_NEXT,
    )


def _watched(model: Backbone) -> tuple[Backbone, list[_Call]]:
    """A copy of a model that writes down what its noisy pass is given."""
    watched, calls, plain = copy.deepcopy(model), [], model.denoise

    def denoise(noisy: Tensor, times: Tensor, **options: Any) -> Tensor:
        hidden, start = plain(noisy, times, **options), options["context"].start
        calls.append(_Call(start=start, noisy=noisy, times=times, hidden=hidden))
        return hidden

    setattr(watched, "denoise", denoise)  # noqa: B010 - over the method, in this copy alone
    return watched, calls


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
