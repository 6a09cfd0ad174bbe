"""Will this run fit, before an hour has gone into finding out that it does not?

The estimate is a sum of named terms, each in bytes. It counts what autograd keeps for the backward
pass from the operations of the block (docs/resume.md says how far it was from measured peaks), and
it leaves out what does not grow with the run: the interpreter, libraries, the data's page cache.
"""

from dataclasses import dataclass

import torch

from canvaslm.device import available_bytes
from canvaslm.errors import InputError
from canvaslm.model.shape import count_parameters
from canvaslm.training.plan import Recipe

_FLOAT32 = 4
_LOSS_COPIES = 3  # logits, their exponentials and their gradient, one vocabulary chunk at a time


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes of a training step, term by term."""

    parameters: int  # a count, not bytes
    weights: int
    gradients: int
    moments: int
    activations: int
    loss_chunk: int

    @property
    def total(self) -> int:
        """The sum of the terms."""
        return self.weights + self.gradients + self.moments + self.activations + self.loss_chunk

    def __str__(self) -> str:
        terms = ("weights", "gradients", "moments", "activations", "loss_chunk")
        told = ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in terms)
        return f"{self.total / 2**30:.2f} GiB ({told})"


def estimate_memory(recipe: Recipe, *, sliced_attention: bool) -> MemoryEstimate:
    """Estimate the peak of one optimiser step.

    Args:
        recipe: what is trained.
        sliced_attention: whether each canvas gets its own copy of the keys that it sees, as on
            the CPU; flex attention on CUDA copies them once.
    """
    n_parameters = count_parameters(recipe.model, recipe.layout)
    rows = recipe.pretrain.micro_batch_windows * recipe.layout.window_tokens
    chunk = min(recipe.pretrain.vocab_chunk, recipe.layout.vocab_size)
    return MemoryEstimate(
        parameters=n_parameters,
        weights=_FLOAT32 * n_parameters,
        gradients=_FLOAT32 * n_parameters,
        moments=2 * _FLOAT32 * n_parameters,
        activations=rows * _bytes_per_token(recipe, sliced_attention),
        loss_chunk=rows * (_LOSS_COPIES * chunk + 4 * recipe.model.width) * _FLOAT32,
    )


def refuse_what_does_not_fit(recipe: Recipe, device: torch.device) -> MemoryEstimate:
    """Estimate the run's memory and compare it with what the device has left.

    Raises:
        InputError: the estimate is larger; the message shows its terms.
    """
    estimate = estimate_memory(recipe, sliced_attention=device.type != "cuda")
    available = available_bytes(device)
    if estimate.total > available:
        raise InputError(
            "params.yaml:pretrain",
            expected=f"a run that fits into the {available / 2**30:.2f} GiB free on {device.type}",
            got=f"an estimate of {estimate}",
            fix="lower micro_batch_windows or vocab_chunk, or set gradient_checkpointing: true",
        )
    return estimate


def _bytes_per_token(recipe: Recipe, sliced_attention: bool) -> int:
    """What one token of a window keeps until the backward pass, over all streams and layers."""
    streams = _streams(recipe)
    whole = sum(_block_bytes(recipe, keys) for keys in _extra_keys(recipe, sliced_attention))
    n_layers = recipe.model.n_layers
    if recipe.pretrain.gradient_checkpointing:
        kv = 2 * recipe.model.n_kv_heads * recipe.model.head_width
        kept = streams * (recipe.model.width + kv) * _FLOAT32
        return n_layers * kept + whole // streams
    return n_layers * whole


def _streams(recipe: Recipe) -> int:
    """How many passes with gradient a window makes."""
    return 2 if recipe.diffusion and recipe.diffusion.context == "clean" else 1


def _extra_keys(recipe: Recipe, sliced_attention: bool) -> list[float]:
    """For each stream, key positions copied per token beyond its own."""
    canvases = recipe.layout.canvases_per_window
    if recipe.diffusion is None:
        return [0.0]
    copied = (canvases + 1) / 2 if sliced_attention else 2.0
    if recipe.diffusion.context == "clean":
        return [0.0, copied]
    return [0.0]  # slices of the one stream are views


def _block_bytes(recipe: Recipe, extra_keys: float) -> int:
    """What autograd keeps of one block for one token of one stream.

    Of the residual stream D: the input of each norm (float32) and each norm's result. Of the
    heads: rotated queries and keys, values and the attended result, and the halves that the
    rotation multiplied. Of the feed-forward F: gate, up, silu(gate) and their product.
    """
    model = recipe.model
    arithmetic = 2 if recipe.pretrain.precision == "bfloat16" else _FLOAT32
    queries = model.n_heads * model.head_width
    keys = model.n_kv_heads * model.head_width
    residual = 2 * model.width * (_FLOAT32 + arithmetic)
    heads = arithmetic * (2 * queries + (2 + 2 * extra_keys) * keys)
    feed_forward = arithmetic * 4 * model.ffn_width
    return int(residual + heads + feed_forward)
