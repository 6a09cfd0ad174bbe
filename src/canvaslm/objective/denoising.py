"""What does the block-diffusion model predict?

The clean token at every position of a noisy canvas, from the canvas itself and what it may see of
the earlier ones (``docs/context.md``). In training one time is drawn for each canvas and the loss
is plain cross-entropy: a diagnostic, not a likelihood. A run may begin with a phase of its own, and
its clean stream may learn the next token beside (``docs/objective.md``). The likelihood bound of
the same model sums over all times, with clean context whatever the training context was
(``docs/bound.md``).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.corruption import Noisy, draw_corruption
from canvaslm.diffusion.levels import GridLevels
from canvaslm.diffusion.schedule import Context as ContextKind
from canvaslm.diffusion.schedule import DiffusionParams, noisy_share
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.loss import chunked_cross_entropy
from canvaslm.measure import stream_flops
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Context
from canvaslm.model.shape import ModelParams
from canvaslm.objective.denoising_bound import bound_passes
from canvaslm.objective.noisy_loss import Denoised, noisy_loss
from canvaslm.objective.targets import LossSum, add
from canvaslm.randomness import stream


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Prediction of the clean tokens from corrupted canvases.

    Args:
        layout: lengths and vocabulary.
        diffusion: times, context and self-conditioning share of training.
        seed: the run's seed, from which all noise follows.
        vocab_chunk: vocabulary entries whose logits exist at one time; changes no value.
        first_phase_windows: the numbers of a run's windows that belong to its first phase are those
            below this one.
    """

    layout: Layout
    diffusion: DiffusionParams
    seed: int
    vocab_chunk: int
    first_phase_windows: int = 0

    def refuse_misfit(self, params: ModelParams) -> None:
        """Raise where what is trained and the clean mask of the model contradict.

        Raises:
            InputError: one stream, which is block-causal, is asked for with a causal clean mask,
                the next token is to be learned by a stream that sees it, or one stream is to read
                the previous token.
        """
        if self.diffusion.context != "clean" and params.clean_mask != "block":
            raise InputError(
                "params.yaml:model.clean_mask",
                expected=f"block, as diffusion.context {self.diffusion.context} trains one stream",
                got=params.clean_mask,
                fix="set model.clean_mask: block or diffusion.context: clean",
            )
        learns = self.diffusion.learns_next_token or self.diffusion.first_phase == "next_token"
        if learns and params.clean_mask != "causal":
            raise InputError(
                "params.yaml:model.clean_mask",
                expected="causal, as the clean stream learns the next token",
                got=params.clean_mask,
                fix="set model.clean_mask: causal, or next_token_weight: 0 and no first phase",
            )
        if self.diffusion.first_phase == "noisy" and params.noisy_input == "previous":
            raise InputError(
                "params.yaml:model.noisy_input",
                expected="own, as the first phase trains one stream, which reads its own tokens",
                got=params.noisy_input,
                fix="set model.noisy_input: own, or diffusion.first_phase: none or next_token",
            )

    def loss(self, model: Backbone, windows: Tensor, numbers: np.ndarray) -> LossSum:
        """What windows (B, T), corrupted once, cost under the phase that they belong to.

        Args:
            model: the denoiser.
            windows: (B, T) int64 clean ids.
            numbers: (B,) the number of each window in the run, the key of its draws.
        """
        is_first = numbers < self.first_phase_windows
        if not is_first.any():
            return self._loss(model, windows, numbers, self.diffusion.context)
        if not is_first.all():
            places = [np.flatnonzero(x) for x in (is_first, ~is_first)]
            return add([self.loss(model, windows[x.tolist()], numbers[x]) for x in places])
        if self.diffusion.first_phase == "next_token":
            return self._next_token(model.encode(windows).hidden, model, windows)
        return self._loss(model, windows, numbers, "noisy")

    def _loss(
        self, model: Backbone, windows: Tensor, numbers: np.ndarray, context: ContextKind
    ) -> LossSum:
        """The denoising loss in one context, and beside it what the clean stream learns."""
        noisy = draw_corruption(
            windows,
            numbers,
            layout=self.layout,
            diffusion=self.diffusion,
            context=context,
            tilt=model.params.tilt,
            seed=self.seed,
        )
        clean, companion = None, None
        if context == "clean":
            clean, companion = self._clean_stream(model, windows)
        hidden = self._denoised(model, noisy, clean, numbers)
        loss = noisy_loss(
            Denoised(
                hidden=hidden,
                noisy=noisy.ids,
                clean=windows,
                times=noisy.times,
                tilt=model.params.tilt,
                is_cavity=model.params.likelihood_bias,
            ),
            model.head_weight,
            diffusion=self.diffusion,
            vocab_chunk=self.vocab_chunk,
        )
        return dataclasses.replace(loss, companion=companion)

    def _clean_stream(self, model: Backbone, windows: Tensor) -> tuple[Context, Tensor | None]:
        """What noisy canvases read, and the weighed next-token nats where they are learned."""
        if not self.diffusion.learns_next_token:
            return model.encode_context(windows), None
        encoded = model.encode(windows)
        nats = self._next_token(encoded.hidden, model, windows).nats
        return encoded, self.diffusion.next_token_weight * nats

    def _next_token(self, hidden: Tensor, model: Backbone, windows: Tensor) -> LossSum:
        """Nats of each token of a window but the first, from the clean tokens before it."""
        nats = chunked_cross_entropy(
            hidden[:, :-1],
            model.head_weight,
            windows[:, 1:],
            vocab_chunk=self.vocab_chunk,
            reduction="sum",
        )
        return LossSum(nats=nats, n_targets=windows[:, 1:].numel())

    @torch.no_grad()
    def bound_nats(
        self,
        model: Backbone,
        windows: Tensor,
        numbers: np.ndarray,
        *,
        n_times: int,
        on_pass: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """The likelihood bound of windows (B, T), in nats per position summed over all times.

        One clean pass, then one noisy pass for each time; self-conditioning is off, so that each
        term is a function of the noisy tokens and the context alone.

        Args:
            model: the denoiser.
            windows: (B, T) int64 clean ids.
            numbers: (B,) the index of each window in its split, the key of its draws.
            n_times: N, in how many steps the bound walks from noise to text.
            on_pass: told each pass: times (B, T), nats of the step (B, T) float64, and plain
                cross-entropy (B, T), for diagnostics by time.

        Returns:
            (B, T) float64 nats; the mean over positions is the bound per token.
        """
        total = torch.zeros(windows.shape, dtype=torch.float64, device=windows.device)
        passes = bound_passes(
            model,
            model.encode_context(windows),
            windows,
            numbers,
            levels=GridLevels(n_times=n_times, tilt=model.params.tilt),
            conditionings=("off",),
            layout=self.layout,
            seed=self.seed,
            vocab_chunk=self.vocab_chunk,
        )
        for one in passes:
            cost = one.nats["off"]
            total += cost.bound
            if on_pass is not None:
                times = torch.from_numpy(one.levels).repeat_interleave(self.layout.canvas_tokens)
                on_pass(times.to(windows.device).expand(windows.shape), cost.bound, cost.plain)
        return total

    def flops_of_first(self, params: ModelParams, n_windows: int) -> float:
        """Floating-point operations, forward and backward, of the first windows of a run.

        The clean stream counts where there is one, and so does the first pass of
        self-conditioning, forward only, for its share of the windows.

        Args:
            params: the shape of the network.
            n_windows: how many, from the first.
        """
        n_first = min(n_windows, self.first_phase_windows)
        flops = (n_windows - n_first) * self._flops(params, self.diffusion.context)
        if n_first == 0:
            return flops
        if self.diffusion.first_phase == "next_token":
            scored = self.layout.window_tokens
            return flops + n_first * 3 * self._clean_flops(params, scored_tokens=scored)
        return flops + n_first * self._flops(params, "noisy")

    def _flops(self, params: ModelParams, context: ContextKind) -> float:
        """Operations for one window in one context."""
        tokens, vocab_size = self.layout.window_tokens, self.layout.vocab_size
        scored_tokens = tokens * noisy_share(params.tilt, self.layout.canvas_tokens)
        noisy = stream_flops(
            params,
            tokens=tokens,
            mean_keys=self._block_keys,
            scored_tokens=scored_tokens,
            vocab_size=vocab_size,
        )
        clean = 0.0
        if context == "clean":
            scored = tokens if self.diffusion.learns_next_token else 0
            clean = self._clean_flops(params, scored_tokens=scored)
        share = 0.0 if params.self_conditioning == "off" else self.diffusion.self_conditioning_share
        # A guess is made at every token: its logits, and the mean row under their softmax.
        guess = share * (noisy + 2.0 * params.width * vocab_size * (2 * tokens - scored_tokens))
        return 3 * (noisy + clean) + guess

    def _clean_flops(self, params: ModelParams, *, scored_tokens: int) -> float:
        """Operations of one forward of the clean stream."""
        tokens = self.layout.window_tokens
        is_causal = params.clean_mask == "causal"
        return stream_flops(
            params,
            tokens=tokens,
            mean_keys=(tokens + 1) / 2 if is_causal else self._block_keys,
            scored_tokens=scored_tokens,
            vocab_size=self.layout.vocab_size,
            for_context=scored_tokens == 0,
        )

    @property
    def _block_keys(self) -> float:
        """Keys that a token of a block-causal stream attends to, on average."""
        return self.layout.canvas_tokens * (self.layout.canvases_per_window + 1) / 2

    def _denoised(
        self, model: Backbone, noisy: Noisy, clean: Context | None, numbers: np.ndarray
    ) -> Tensor:
        """Final hidden states (B, T, D): a first pass gives some rows a guess, a second all."""
        has_guess = self._draw_guess_rows(model.params, numbers).to(noisy.ids.device)
        if not bool(has_guess.any()):
            return self._noisy_pass(model, noisy, clean, guess=None, has_guess=None)
        rows = has_guess.nonzero().squeeze(1)
        some = Noisy(ids=noisy.ids[rows], times=noisy.times[rows])
        with torch.no_grad():
            context = None if clean is None else clean.rows(rows)
            hidden = self._noisy_pass(model, some, context, guess=None, has_guess=None)
            part = model.soft_embedding(hidden, vocab_chunk=self.vocab_chunk)
        guess = part.new_zeros(len(noisy.ids), *part.shape[1:]).index_copy(0, rows, part)
        return self._noisy_pass(model, noisy, clean, guess=guess, has_guess=has_guess)

    def _noisy_pass(
        self,
        model: Backbone,
        noisy: Noisy,
        clean: Context | None,
        *,
        guess: Tensor | None,
        has_guess: Tensor | None,
    ) -> Tensor:
        """One forward of the noisy stream, against the clean stream where there is one."""
        times = noisy.times.double() / self.diffusion.n_times
        if clean is None:
            return model.denoise_one_stream(noisy.ids, times, guess=guess, has_guess=has_guess)
        return model.denoise(noisy.ids, times, context=clean, guess=guess, has_guess=has_guess)

    def _draw_guess_rows(self, params: ModelParams, numbers: np.ndarray) -> Tensor:
        """(B,) bool: which windows get a guess, drawn by window number."""
        if params.self_conditioning == "off":
            return torch.zeros(len(numbers), dtype=torch.bool)
        share = self.diffusion.self_conditioning_share
        coins = [stream(self.seed, "self_conditioning", int(n)).random() < share for n in numbers]
        return torch.tensor(coins, dtype=torch.bool)
