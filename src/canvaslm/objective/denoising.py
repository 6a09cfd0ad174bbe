"""What does the block-diffusion model predict?

The clean token at every position of a noisy canvas, from the canvas itself and what it may see of
the earlier ones (``docs/context.md``). In training one time is drawn for each canvas and the loss
is plain cross-entropy: a diagnostic, not a likelihood. The likelihood bound of the same model sums
over all times, with clean context whatever the training context was (``docs/bound.md``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.diffusion.corruption import Noisy, draw_corruption
from canvaslm.diffusion.levels import GridLevels
from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.loss import IGNORED, chunked_cross_entropy
from canvaslm.measure import stream_flops
from canvaslm.model.backbone import Backbone
from canvaslm.model.kv_cache import Context
from canvaslm.model.shape import ModelParams
from canvaslm.objective.denoising_bound import bound_passes
from canvaslm.objective.targets import LossSum
from canvaslm.randomness import stream


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Prediction of the clean tokens from corrupted canvases.

    Args:
        layout: lengths and vocabulary.
        diffusion: times, context and self-conditioning share of training.
        seed: the run's seed, from which all noise follows.
        vocab_chunk: vocabulary entries whose logits exist at one time; changes no value.
    """

    layout: Layout
    diffusion: DiffusionParams
    seed: int
    vocab_chunk: int

    def refuse_misfit(self, params: ModelParams) -> None:
        """Raise where the training context and the clean mask of the model contradict.

        Raises:
            InputError: one stream, which is block-causal, is asked for with a causal clean mask.
        """
        if self.diffusion.context != "clean" and params.clean_mask != "block":
            raise InputError(
                "params.yaml:model.clean_mask",
                expected=f"block, as diffusion.context {self.diffusion.context} trains one stream",
                got=params.clean_mask,
                fix="set model.clean_mask: block or diffusion.context: clean",
            )

    def loss(self, model: Backbone, windows: Tensor, numbers: np.ndarray) -> LossSum:
        """Nats of the clean tokens of windows (B, T) corrupted once.

        Args:
            model: the denoiser.
            windows: (B, T) int64 clean ids.
            numbers: (B,) the number of each window in the run, the key of its draws.
        """
        noisy = draw_corruption(
            windows,
            numbers,
            layout=self.layout,
            n_times=self.diffusion.train_times,
            context=self.diffusion.context,
            seed=self.seed,
        )
        hidden = self._denoised(model, windows, noisy, numbers)
        carries = noisy.carries_loss.repeat_interleave(self.layout.canvas_tokens, dim=1)  # (B, T)
        nats = chunked_cross_entropy(
            hidden,
            model.head_weight,
            windows.masked_fill(~carries, IGNORED),
            vocab_chunk=self.vocab_chunk,
            reduction="sum",
        )
        return LossSum(nats=nats, n_targets=int(carries.sum()))

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
            levels=GridLevels(n_times=n_times),
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

    def flops_per_window(self, params: ModelParams) -> float:
        """Floating-point operations of forward and backward for one window, on average.

        The clean stream counts where there is one, and so does the first pass of
        self-conditioning, forward only, for its share of the windows.
        """
        tokens, n_canvases = self.layout.window_tokens, self.layout.canvases_per_window
        vocab_size = self.layout.vocab_size
        block_keys = self.layout.canvas_tokens * (n_canvases + 1) / 2
        noisy = stream_flops(
            params,
            tokens=tokens,
            mean_keys=block_keys,
            scored_tokens=tokens,
            vocab_size=vocab_size,
        )
        clean = 0.0
        if self.diffusion.context == "clean":
            clean_keys = (tokens + 1) / 2 if params.clean_mask == "causal" else block_keys
            clean = stream_flops(
                params,
                tokens=tokens,
                mean_keys=clean_keys,
                scored_tokens=0,
                vocab_size=vocab_size,
                for_context=True,
            )
        share = 0.0 if params.self_conditioning == "off" else self.diffusion.self_conditioning_share
        guess = share * (noisy + 2.0 * params.width * vocab_size * tokens)
        return 3 * (noisy + clean) + guess

    def _denoised(
        self, model: Backbone, windows: Tensor, noisy: Noisy, numbers: np.ndarray
    ) -> Tensor:
        """Final hidden states (B, T, D): a first pass gives some rows a guess, a second all."""
        clean = model.encode_context(windows) if self.diffusion.context == "clean" else None
        has_guess = self._draw_guess_rows(model.params, numbers).to(windows.device)
        if not bool(has_guess.any()):
            return self._noisy_pass(model, noisy, clean, guess=None, has_guess=None)
        rows = has_guess.nonzero().squeeze(1)
        some = Noisy(ids=noisy.ids[rows], times=noisy.times[rows])
        with torch.no_grad():
            context = None if clean is None else clean.rows(rows)
            hidden = self._noisy_pass(model, some, context, guess=None, has_guess=None)
            part = model.soft_embedding(hidden, vocab_chunk=self.vocab_chunk)
        guess = part.new_zeros(len(windows), *part.shape[1:]).index_copy(0, rows, part)
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
        times = noisy.times / self.diffusion.train_times
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
