"""Will this run fit, before an hour has gone into finding out that it does not?

The estimate is a sum of named terms, each in bytes; what autograd keeps is counted operation by
operation. Against the peak resident size of two steps of the base configuration (33 MB of state,
micro-batches of 32 windows, torch 2.13 on CPU) it was 6 % and 22 % over in float32 for diffusion
and its twin, 8 % under with gradient checkpointing and 14 % under in bfloat16.
"""

from dataclasses import dataclass

import torch

from canvaslm.device import available_bytes
from canvaslm.errors import InputError
from canvaslm.model.shape import count_parameters
from canvaslm.training.plan import Recipe
from canvaslm.training.trace_ring import LEAST_VALUES
from canvaslm.training.trace_values import SAMPLED_ROWS

_TERMS = (
    "weights",
    "gradients",
    "moments",
    "activations",
    "windows",
    "loss_chunk",
    "trace",
    "runtime",
)
_FLOAT32 = 4
_RUNTIME = 2**27  # measured on a batch of one window: 96 to 160 MB above the terms
_LOSS_COPIES = 4  # of one vocabulary chunk: logits, exponentials, gradient, and one on the way


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes of a training step, term by term."""

    parameters: int  # a count, not bytes
    weights: int
    gradients: int
    moments: int
    activations: int
    windows: int  # ids of one step, and of those that are read ahead
    loss_chunk: int
    trace: int  # samples of the last good steps
    runtime: int  # what libraries take on first use, whatever the model

    @property
    def total(self) -> int:
        """The sum of the terms."""
        return sum(getattr(self, term) for term in _TERMS)

    def __str__(self) -> str:
        told = ", ".join(f"{term} {getattr(self, term) / 2**30:.2f}" for term in _TERMS)
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
        weights=_FLOAT32 * n_parameters + _cast_bytes(recipe, n_parameters),
        gradients=_FLOAT32 * n_parameters,
        moments=2 * _FLOAT32 * n_parameters,
        activations=rows * _bytes_per_token(recipe, sliced_attention),
        windows=_window_bytes(recipe),
        loss_chunk=rows * (_LOSS_COPIES * chunk + 4 * recipe.model.width) * _FLOAT32,
        trace=_trace_bytes(recipe),
        runtime=_RUNTIME,
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
    """What one token of a window keeps until the backward pass, and what that pass adds to it."""
    blocks = [_block_bytes(recipe, keys) for keys in _seen_keys(recipe, sliced_attention)]
    in_flight = max(blocks)  # gradients of the block that the backward pass is in
    if recipe.pretrain.gradient_checkpointing:
        keys_values = 2 * recipe.model.n_kv_heads * recipe.model.head_width
        kept = len(blocks) * (recipe.model.width + keys_values) * _FLOAT32
        return recipe.model.n_layers * kept + 2 * in_flight  # once more forward, then backward
    return recipe.model.n_layers * sum(blocks) + in_flight


def _seen_keys(recipe: Recipe, sliced_attention: bool) -> list[float]:
    """For each stream with gradient, how many key positions one token keeps a copy of."""
    if recipe.diffusion is None or recipe.diffusion.context != "clean":
        return [1.0]  # what the canvases of one stream see are views of it
    copied = (recipe.layout.canvases_per_window + 1) / 2 if sliced_attention else 2.0
    return [1.0, copied]


def _block_bytes(recipe: Recipe, seen_keys: float) -> int:
    """What autograd keeps of one block for one token of one stream.

    Of the residual stream D: for each of two norms its input and its normed input in float32, and
    its result. Of the heads: rotated queries, the attended result before and after its heads are
    joined, and keys and values. Of the feed-forward F: gate, up, silu(gate) and their product.
    """
    model = recipe.model
    arithmetic = _arithmetic_bytes(recipe)
    queries = model.n_heads * model.head_width
    keys = model.n_kv_heads * model.head_width
    residual = 2 * model.width * (2 * _FLOAT32 + arithmetic)
    heads = arithmetic * (3 * queries + 2 * seen_keys * keys)
    feed_forward = arithmetic * 4 * model.ffn_width
    return int(residual + heads + feed_forward)


def _window_bytes(recipe: Recipe) -> int:
    """Ids are int64, and each thread reads two steps ahead."""
    steps = 1 + 2 * recipe.pretrain.loader_workers
    return 8 * steps * recipe.pretrain.windows_per_step * recipe.layout.window_tokens


def _trace_bytes(recipe: Recipe) -> int:
    """Room for samples: of each tensor between two modules, and of its gradient, a few positions.

    A block has about eight such tensors of width D and three of width F. The first pass of
    self-conditioning has no gradients, so it counts half.
    """
    params, model = recipe.pretrain, recipe.model
    if not params.trace_steps or params.compile:
        return 0
    values = 2 * (8 * model.width + 3 * model.ffn_width)
    streams = len(_seen_keys(recipe, False)) + (model.self_conditioning != "off") / 2
    step = int(SAMPLED_ROWS * model.n_layers * streams * values)
    return (params.trace_steps + 1) * max(step, LEAST_VALUES) * _FLOAT32


def _arithmetic_bytes(recipe: Recipe) -> int:
    return 2 if recipe.pretrain.precision == "bfloat16" else _FLOAT32


def _cast_bytes(recipe: Recipe, n_parameters: int) -> int:
    """Copies of the weights in the passes' arithmetic, one for each stream that keeps them."""
    if recipe.pretrain.precision == "float32":
        return 0
    return _arithmetic_bytes(recipe) * n_parameters * len(_seen_keys(recipe, False))
