"""Will this run fit, before an hour has gone into finding out that it does not?

The estimate is a sum of named terms, each in bytes. What autograd keeps is counted operation by
operation; what the heap holds besides is a share of it. ``bench/step.py`` holds the sum against the
peak of fresh processes.
"""

from dataclasses import dataclass

import torch

from canvaslm.device import available_bytes
from canvaslm.errors import InputError
from canvaslm.model.shape import count_parameters
from canvaslm.model.sliced import Slices
from canvaslm.training.optimizer import moment_values
from canvaslm.training.plan import Recipe
from canvaslm.training.trace_ring import LEAST_VALUES
from canvaslm.training.trace_values import SAMPLED_ROWS

_TERMS = (
    "weights",
    "gradients",
    "moments",
    "activations",
    "heap",
    "windows",
    "loss",
    "trace",
    "runtime",
)
_FLOAT32 = 4
_RUNTIME = 2**27  # with the smallest of models; most is what torch's optimiser imports
_SCORED_ROWS = 512  # tokens whose scores are in memory at once, at most on a CPU
# Of causal attention on a CPU: queries under one mask, masks in a window at least, and the scores
# below which the library does it, which keeps its result twice, and all of it in float32.
_CAUSAL_BLOCK, _CAUSAL_BLOCKS, _FEW_SCORES = 64, 4, 2**19
_CASTS = 5  # of normed tensors in a block: each layer that reads one keeps a cast of its own
# What the heap holds beyond what is in use, in blocks of one stream: glibc finds no room for an
# aligned tensor in a hole of just its size, so not all that the backward pass frees is used again.
# Measured with one stream and with two, at four, six and twelve layers.
_HOLES, _HOLES_PER_LAYER = 0.3, 0.5
# The same a layer under gradient checkpointing, with one stream and with two: glibc's heap leaves
# holes where recomputed blocks were freed, between what is kept of the other layers. Measured at
# two widths and two micro-batches, at four and twelve layers.
_RECOMPUTED_HOLES_PER_LAYER = (0.3, 1.15)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes of a training step, term by term."""

    parameters: int  # a count, not bytes
    weights: int
    gradients: int
    moments: int
    activations: int
    heap: int  # holes between them
    windows: int  # ids of one step, and of those that are read ahead
    loss: int  # scores of a block of tokens, and gradients made on the way forward
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
        sliced_attention: whether a canvas reads slices of the keys, as on the CPU, where the
            heap has holes, too; flex attention on CUDA copies the keys of two streams once.
    """
    n_parameters = count_parameters(recipe.model, recipe.layout)
    rows = recipe.pretrain.micro_batch_windows * recipe.layout.window_tokens
    return MemoryEstimate(
        parameters=n_parameters,
        weights=_FLOAT32 * n_parameters + _cast_bytes(recipe, n_parameters),
        gradients=_FLOAT32 * n_parameters,
        moments=_FLOAT32 * moment_values(recipe),
        activations=rows * _bytes_per_token(recipe, sliced_attention),
        heap=rows * _hole_bytes(recipe) if sliced_attention else 0,
        windows=_window_bytes(recipe),
        loss=_loss_bytes(recipe, rows),
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
            fix="lower micro_batch_windows, or set gradient_checkpointing: true",
        )
    return estimate


def _bytes_per_token(recipe: Recipe, sliced_attention: bool) -> int:
    """What one token of a window keeps until the backward pass, and what that pass adds to it."""
    model, blocks = recipe.model, _streams(recipe, sliced_attention)
    in_flight = max(blocks)  # gradients of the block that the backward pass is in
    ends = (2 if recipe.diffusion is None else 3) * model.width * _FLOAT32  # last norm, a guess
    if _learns_next_token(recipe):
        ends += 3 * model.width * _FLOAT32  # a second last norm, and the gradient made for it
    keys_values = 2 * model.n_kv_heads * model.head_width
    if recipe.pretrain.gradient_checkpointing:
        kept = model.n_layers * len(blocks) * (model.width + keys_values) * _FLOAT32
        return kept + 2 * in_flight + ends  # once more forward, then backward
    kept = model.n_layers * sum(blocks)
    if len(blocks) == 2 and not _learns_next_token(recipe):
        # Of the last clean block, nobody reads more than keys and values.
        kept -= blocks[0] - _normed_bytes(recipe) // 2 - keys_values * _arithmetic_bytes(recipe)
    return kept + in_flight + ends


def _learns_next_token(recipe: Recipe) -> bool:
    """Whether the clean stream of a denoiser goes through the head as well."""
    return recipe.diffusion is not None and recipe.diffusion.learns_next_token


def _hole_bytes(recipe: Recipe) -> int:
    """What the heap of a CPU holds beyond what is in use, for one token."""
    blocks = _streams(recipe, True)
    if recipe.pretrain.gradient_checkpointing:
        holes = _RECOMPUTED_HOLES_PER_LAYER[len(blocks) - 1] * recipe.model.n_layers
    else:
        holes = _HOLES if len(blocks) == 1 else _HOLES_PER_LAYER * recipe.model.n_layers
    return int(holes * max(blocks))


def _streams(recipe: Recipe, sliced_attention: bool) -> list[int]:
    """What autograd keeps of one block for one token, for each stream with gradient."""
    noisy = _block_bytes(recipe, _kept_by_canvas(recipe) if sliced_attention else 0)
    if recipe.diffusion is not None and recipe.diffusion.context != "clean":
        return [noisy]
    is_causal = recipe.diffusion is None or recipe.model.clean_mask == "causal"
    kept_by_clean = _kept_by_causal(recipe) if is_causal else _kept_by_canvas(recipe)
    clean = _block_bytes(recipe, kept_by_clean if sliced_attention else 0)
    if recipe.diffusion is None:
        return [clean]
    keys_values = 2 * recipe.model.n_kv_heads * recipe.model.head_width
    copied = 0 if sliced_attention else 2 * keys_values * _arithmetic_bytes(recipe)
    return [clean, noisy + copied]


def _kept_by_canvas(recipe: Recipe) -> int:
    """Bytes that the queries of one token keep where a canvas reads a slice of the keys."""
    return _probabilities(recipe, recipe.layout.canvas_tokens)


def _kept_by_causal(recipe: Recipe) -> int:
    """Bytes that the queries of one token keep of causal attention."""
    model, tokens = recipe.model, recipe.layout.window_tokens
    scores = recipe.pretrain.micro_batch_windows * model.n_heads * tokens**2
    kept = _probabilities(recipe, max(1, min(_CAUSAL_BLOCK, tokens // _CAUSAL_BLOCKS)))
    if kept and scores >= _FEW_SCORES:
        return kept
    widened = (model.n_heads + 2 * model.n_kv_heads) * (_FLOAT32 - _arithmetic_bytes(recipe))
    return model.head_width * (model.n_heads * _FLOAT32 + widened)


def _probabilities(recipe: Recipe, block_tokens: int) -> int:
    """Bytes of the probabilities that the queries of one token keep; none in a long window."""
    model, tokens = recipe.model, recipe.layout.window_tokens
    slices = Slices(block_tokens=block_tokens, start=0, causal=False)
    queries = torch.empty(1, model.n_heads, tokens, model.head_width, device="meta")
    if not slices.are_short(queries):
        return 0
    return model.n_heads * (tokens + block_tokens) // 2 * _FLOAT32


def _block_bytes(recipe: Recipe, kept_by_attention: int) -> int:
    """What autograd keeps of one block for one token of one stream.

    Of the residual stream: the input of each of two norms, and its result. Of the heads: rotated
    queries, keys, values, the attended result, and what attention keeps besides. Of the
    feed-forward: gate, up and their product.
    """
    model = recipe.model
    heads = 2 * (model.n_heads + model.n_kv_heads) * model.head_width
    of_products = heads + 3 * model.ffn_width
    return _normed_bytes(recipe) + _arithmetic_bytes(recipe) * of_products + kept_by_attention


def _normed_bytes(recipe: Recipe) -> int:
    """Inputs and results of the two norms of a block, for one token."""
    casts = 2 * _FLOAT32 if recipe.pretrain.precision == "float32" else _CASTS * 2
    return recipe.model.width * (2 * _FLOAT32 + casts)


def _loss_bytes(recipe: Recipe, rows: int) -> int:
    """Scores of some tokens, the gradients that the loss makes, and a copy of what counts."""
    D, V = recipe.model.width, recipe.layout.vocab_size
    scores = min(rows, _SCORED_ROWS) * V
    return _FLOAT32 * (scores + 2 * rows * D + 2 * V * D)


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
    streams = len(_streams(recipe, False)) + (model.self_conditioning != "off") / 2
    step = int(SAMPLED_ROWS * model.n_layers * streams * values)
    return (params.trace_steps + 1) * max(step, LEAST_VALUES) * _FLOAT32


def _arithmetic_bytes(recipe: Recipe) -> int:
    return 2 if recipe.pretrain.precision == "bfloat16" else _FLOAT32


def _cast_bytes(recipe: Recipe, n_parameters: int) -> int:
    """Copies of the weights in the passes' arithmetic, one for each stream that keeps them."""
    if recipe.pretrain.precision == "float32":
        return 0
    return _arithmetic_bytes(recipe) * n_parameters * len(_streams(recipe, False))
