"""How does a prompt become text, canvas by canvas?

The prompt is read once into the cache. Each canvas starts as uniform noise and is denoised over a
fixed number of forwards at most, at times going down from 1. These forwards read the cache and
never write it. One more forward reads the finished canvas, clean, and appends it. Which positions
keep their token, when a canvas is done, and what a noisy token is evidence of are questions for
three rule objects.

Every row is on its own: its draws come from its own seed, it is frozen when its rule says so, and
it leaves the batch when its text has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from canvaslm.errors import InputError
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import KVCache
from canvaslm.randomness import stream
from canvaslm.sampling.acceptance import Acceptance
from canvaslm.sampling.evidence import Evidence, Posterior, excess
from canvaslm.sampling.one_pass import Asked, answer
from canvaslm.sampling.prediction import (
    Prediction,
    temperature_at,
    uniform_ids,
    uniform_numbers,
)
from canvaslm.sampling.request import (
    Generated,
    Group,
    Prompts,
    Row,
    answer_groups,
    group_request,
    keep_live,
)
from canvaslm.sampling.stopping import Stopping
from canvaslm.sampling.tilted import accept, keep


@dataclass(frozen=True, kw_only=True)
class CanvasStep:
    """What can be watched after each step.

    Attributes:
        rows: numbers of the rows that took the step, in the caller's order of prompts.
        canvas: number of the canvas, from 0.
        step: number of the step, from 0.
        n_steps: the most steps that a canvas may take.
        noisy: ids that the step read, (B', L).
        tokens: what would be emitted if the canvas ended here, (B', L).
        accepted: which of them the acceptance rule stands by, (B', L) bool.
        is_done: rows whose canvas ends here, (B',) bool.
    """

    rows: list[int]
    canvas: int
    step: int
    n_steps: int
    noisy: Tensor
    tokens: Tensor
    accepted: Tensor
    is_done: Tensor


OnStep = Callable[[CanvasStep], None]


def unwatched(state: CanvasStep) -> None:
    """Look at nothing: the null object of ``on_step``."""


@dataclass(frozen=True, kw_only=True)
class CanvasSampler:
    """Denoises canvas after canvas behind a prompt.

    Args:
        model: a backbone trained with the denoising objective.
        acceptance: which positions keep their token after a step.
        stopping: when a row's canvas is done before its last step.
        denoise_steps: the most forwards that a canvas takes.
        start_temperature: τ of the first step; 0 takes the argmax.
        end_temperature: τ of the last step, linear between.
        eot_id: the id that ends a text; ``None`` where a text has no end.
        vocab_chunk: vocabulary entries whose logits exist at one time; changes no value.
        evidence: what the noisy token of a position is evidence of.
        on_step: is shown every step.
    """

    model: Backbone
    acceptance: Acceptance
    stopping: Stopping
    denoise_steps: int
    start_temperature: float
    end_temperature: float
    eot_id: int | None
    vocab_chunk: int
    evidence: Evidence = field(default_factory=Posterior)
    on_step: OnStep = unwatched

    def generate(
        self, prompt_ids: Prompts, max_new_tokens: int | None, seeds: Sequence[int]
    ) -> list[Generated]:
        """Answer each prompt.

        The last canvas may reach beyond the asked number, and then by less than a canvas beyond
        the trained window; what lies beyond is dropped.

        Args:
            prompt_ids: a list of lists of ids, or one (B, P) tensor; a prompt may be empty.
            max_new_tokens: tokens asked for, returned exactly unless the text ends before;
                ``None`` goes on to the end of the trained window.
            seeds: one for each prompt; a row's draws depend on nothing else.

        Raises:
            InputError: an id is not in the vocabulary, the seeds are not as many as the prompts,
                a prompt and its answer do not fit in the trained window, or under
                ``clean_mask: block`` a prompt is not made of whole canvases.
        """
        groups = group_request(prompt_ids, max_new_tokens, seeds, layout=self.model.layout)
        for group in groups:
            self._check_mask(group)
        return answer_groups(groups, self._answer)

    def _check_mask(self, group: Group) -> None:
        canvas_tokens = self.model.layout.canvas_tokens
        prompt_tokens = group.prompts.shape[1]
        if self.model.params.clean_mask == "block" and prompt_tokens % canvas_tokens:
            raise InputError(
                f"prompt {group.rows[0].number}",
                expected=f"a multiple of {canvas_tokens} tokens, since clean_mask is block",
                got=str(prompt_tokens),
                fix="cut the prompt to whole canvases, or train with clean_mask: causal",
            )

    def _answer(self, group: Group) -> None:
        """Fill the rows of one group."""
        canvas_tokens = self.model.layout.canvas_tokens
        n_canvases = -(-group.limit.n_tokens // canvas_tokens)
        live = group.rows
        cache = KVCache.for_model(
            self.model, len(live), group.prompts.shape[1] + n_canvases * canvas_tokens
        )
        self._prefill(group, cache)
        for canvas in range(n_canvases):
            finished = self._denoise(live, cache, canvas)
            live, finished = keep_live(live, cache, finished)
            if not live:
                return
            self._commit(live, cache, finished, group)
            live, finished = keep_live(live, cache, finished)
            if not live:
                return

    def _prefill(self, group: Group, cache: KVCache) -> None:
        """Read the prompts into the cache."""
        prompt_tokens = group.prompts.shape[1]
        if prompt_tokens == 0:
            return
        self.model.encode_context(group.prompts.to(self.model.head_weight.device), cache=cache)
        for row in group.rows:
            row.count_prefill(prompt_tokens)

    def _commit(self, live: list[Row], cache: KVCache, finished: Tensor, group: Group) -> None:
        """Append finished canvases to the cache and to the answers."""
        self.model.encode_context(finished, cache=cache)
        for row, ids in zip(live, finished.tolist(), strict=True):
            row.count_encoding(len(ids))
            row.canvases += 1
            row.extend(ids, eot_id=self.eot_id, limit=group.limit)

    def _denoise(self, rows: list[Row], cache: KVCache, canvas: int) -> Tensor:
        """Denoise one canvas of each row; a row whose numbers fail gets its reason here.

        Returns:
            (B, L) int64; what stands in a failed row means nothing.
        """
        state = _Canvas.begin(rows, canvas, model=self.model)
        finished = state.noisy.clone()
        for step in range(self.denoise_steps):
            now = self._look(state, cache, step)
            now = state.drop_not_finite(now)
            if not state.rows:
                break
            state.take(now, self.acceptance, self.model)
            is_done = self._is_done(state, now)
            finished[state.places] = state.emitted
            self.on_step(state.seen(canvas, now, is_done))
            state.keep(~is_done)
            if not state.rows:
                break
            state.renoise(self.model.layout.vocab_size)
        return finished

    def _look(self, state: "_Canvas", cache: KVCache, step: int) -> Prediction:
        """One forward over the canvases that are not done."""
        n_rows, canvas_tokens = state.noisy.shape
        time = (self.denoise_steps - step) / self.denoise_steps
        hidden = self.model.denoise(
            state.noisy,
            state.noisy.new_full((n_rows, 1), time, dtype=torch.float64),
            context=state.context(cache),
            guess=self._guess(state),
            has_guess=None,
        )
        for row in state.rows:
            row.count_forward(canvas_tokens)
        asked = self._asked(hidden, state, cache, step)
        if asked.table is None and self._may_skip(state):
            return _skip_accepted(asked, state, step, self.denoise_steps)
        now, state.guess = answer(asked, step=step, n_steps=self.denoise_steps)
        return now

    def _asked(self, hidden: Tensor, state: "_Canvas", cache: KVCache, step: int) -> Asked:
        """What is to be known about the canvases at this step."""
        temperature = temperature_at(
            step, n_steps=self.denoise_steps, start=self.start_temperature, end=self.end_temperature
        )
        too_much = excess(
            self.evidence,
            state.accepted,
            t=self.denoise_steps - step,
            n_times=self.denoise_steps,
            model=self.model,
        )
        shows_guess = self.model.params.self_conditioning != "off"
        is_last = step == self.denoise_steps - 1
        return Asked(
            hidden=hidden,
            head=cache.head(self.model),
            noisy=state.noisy,
            excess=too_much,
            temperature=temperature,
            uniforms=state.uniforms() if temperature else None,
            vocab_chunk=self.vocab_chunk,
            table=cache.table(self.model) if shows_guess and not is_last else None,
        )

    def _may_skip(self, state: "_Canvas") -> bool:
        """Whether nobody asks what the logits of an accepted position are."""
        nobody = self.acceptance.is_monotone and not self.stopping.reads_every_position
        return nobody and state.before is not None and bool(state.accepted.any())

    def _guess(self, state: "_Canvas") -> Tensor | None:
        """The step before, embedded, where the model was trained to be shown it."""
        return None if state.guess is None else state.guess.to(self.model.head_weight.dtype)

    def _is_done(self, state: "_Canvas", now: Prediction) -> Tensor:
        """Which rows end their canvas here: by their rule, or at the last step."""
        state.streak = self.stopping.extend(state.streak, now, state.before)
        state.before = now
        if now.step == now.n_steps - 1:
            return torch.ones_like(state.streak, dtype=torch.bool)
        return self.stopping.is_done(state.streak, now)


@dataclass(kw_only=True)
class _Canvas:
    """The canvases that are being denoised: B' rows that are not done, of B in the cache."""

    rows: list[Row]
    draws: list[np.random.Generator]  # candidates, one generator a row
    noise: list[np.random.Generator]  # replacements, one generator a row
    n_cached: int  # B, rows of the cache
    places: Tensor  # (B',) rows of the cache
    noisy: Tensor  # (B', L) what the next forward reads
    tokens: Tensor  # (B', L) candidates, as of the step that accepted them
    accepted: Tensor  # (B', L) bool
    emitted: Tensor  # (B', L) accepted tokens, argmax elsewhere
    streak: Tensor  # (B',)
    before: Prediction | None = None
    guess: Tensor | None = None
    some: KVCache | None = None  # the cache of these rows alone, where they are not all

    @classmethod
    def begin(cls, rows: list[Row], canvas: int, *, model: Backbone) -> "_Canvas":
        """Uniform noise from each row's own stream."""
        shape = (len(rows), model.layout.canvas_tokens)
        device = model.head_weight.device
        noise = [stream(row.seed, "renoise", canvas) for row in rows]
        noisy = uniform_ids(noise, shape[1], model.layout.vocab_size, device)
        return cls(
            rows=list(rows),
            draws=[stream(row.seed, "sample", canvas) for row in rows],
            noise=noise,
            n_cached=len(rows),
            places=torch.arange(len(rows), device=device),
            noisy=noisy,
            tokens=noisy,
            accepted=torch.zeros(shape, dtype=torch.bool, device=device),
            emitted=noisy,
            streak=torch.zeros(shape[0], dtype=torch.int64, device=device),
        )

    def context(self, cache: KVCache) -> KVCache:
        """What these rows may see of what is finished, with room behind it for a canvas."""
        if len(self.rows) == self.n_cached:
            return cache
        if self.some is None:
            self.some = cache.some_rows(self.places, room=self.noisy.shape[1])
        return self.some

    def uniforms(self) -> Tensor:
        """One number in [0, 1) for each position, (B', L) float64."""
        return uniform_numbers(self.draws, self.noisy.shape[1], self.noisy.device)

    def drop_not_finite(self, now: Prediction) -> Prediction:
        """End the rows whose numbers are not finite; they keep what they had before."""
        finite = now.entropy.isfinite().all(-1)
        flags = finite.tolist()
        if all(flags):
            return now
        for row, is_finite in zip(self.rows, flags, strict=True):
            if not is_finite:
                row.reason = "not_finite"
        self.keep(finite)
        return now.rows(finite)

    def take(self, now: Prediction, acceptance: Acceptance, model: Backbone) -> None:
        """Let the rule choose positions and write this step's candidates there."""
        accepted = accept(acceptance, now, self.before, self.accepted, model=model)
        stays = keep(acceptance, now, self.accepted, accepted, model=model)
        self.tokens = torch.where(stays, self.tokens, now.candidates)
        self.accepted = accepted
        self.emitted = torch.where(accepted, self.tokens, now.argmax)

    def renoise(self, vocab_size: int) -> None:
        """Draw anew, uniformly, wherever nothing was accepted."""
        noise = uniform_ids(self.noise, self.noisy.shape[1], vocab_size, self.noisy.device)
        self.noisy = torch.where(self.accepted, self.tokens, noise)

    def seen(self, canvas: int, now: Prediction, is_done: Tensor) -> CanvasStep:
        """What ``on_step`` is shown."""
        return CanvasStep(
            rows=[row.number for row in self.rows],
            canvas=canvas,
            step=now.step,
            n_steps=now.n_steps,
            noisy=self.noisy,
            tokens=self.emitted,
            accepted=self.accepted,
            is_done=is_done,
        )

    def keep(self, chosen: Tensor) -> None:
        """Go on with some of the rows, ``chosen`` (B',) bool."""
        flags = chosen.tolist()
        if all(flags):
            return
        self.rows = [row for row, flag in zip(self.rows, flags, strict=True) if flag]
        self.draws = [draw for draw, flag in zip(self.draws, flags, strict=True) if flag]
        self.noise = [noise for noise, flag in zip(self.noise, flags, strict=True) if flag]
        self.places = self.places[chosen]
        self.noisy = self.noisy[chosen]
        self.tokens = self.tokens[chosen]
        self.accepted = self.accepted[chosen]
        self.emitted = self.emitted[chosen]
        self.streak = self.streak[chosen]
        self.before = None if self.before is None else self.before.rows(chosen)
        self.guess = None if self.guess is None else self.guess[chosen]
        self.some = None


def _skip_accepted(asked: Asked, state: _Canvas, step: int, n_steps: int) -> Prediction:
    """Ask about the positions that are not accepted; of the others the token is certain.

    A position whose hidden state is not finite is asked about whatever it is, so that it is told.
    """
    is_open = ~state.accepted | ~asked.hidden.isfinite().all(-1)
    now = Prediction(
        step=step,
        n_steps=n_steps,
        candidates=state.tokens.clone(),
        argmax=state.tokens.clone(),
        confidence=torch.ones(is_open.shape, dtype=torch.float64, device=is_open.device),
        entropy=torch.zeros(is_open.shape, dtype=torch.float64, device=is_open.device),
    )
    if not bool(is_open.any()):
        return now
    found, _ = answer(asked.flat().some(is_open.flatten()), step=step, n_steps=n_steps)
    for name in ("candidates", "argmax", "confidence", "entropy"):
        getattr(now, name)[is_open] = getattr(found, name)[0]
    return now
