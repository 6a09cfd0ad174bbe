"""Which losses are compared: ours, the dense one, and those of others, on the same inputs?

In bfloat16 the weights stay float32, as in training: ours runs under autocast, the others are given
casts of the inputs, which is what autocast does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness import CPU, peer

from canvaslm.device import Precision, autocast
from canvaslm.loss import chunked_cross_entropy

Run = Callable[[], object]
OURS, COMPILED = "canvaslm", "apple_compiled"
_CHUNK_TOKENS = 512  # of peers that cut the tokens: the best of 256, 512 and 1,024
_VOCAB_CHUNK = 8192


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Random hidden states and a head, with scores of about ``spread`` nats."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    targets: Tensor  # (N,)

    @property
    def gradient_bytes(self) -> int:
        """What every form has to return, and therefore no form's extra."""
        return self.hidden.nbytes + self.weight.nbytes


def draw_inputs(
    *, width: int, tokens: int, vocab: int, spread: float = 0.3, dtype: torch.dtype = torch.float32
) -> Inputs:
    """The same draws for every form and process."""
    draws = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=draws)
    weight = torch.randn(vocab, width, generator=draws).mul_(spread / width**0.5)
    return Inputs(
        hidden=hidden.to(dtype).requires_grad_(),
        weight=weight.to(dtype).requires_grad_(),
        targets=torch.randint(vocab, (tokens,), generator=draws),
    )


def products(inputs: Inputs, dtype: torch.dtype) -> Run:
    """The three products that cannot be avoided, into memory that is used again."""
    hidden, weight = (x.detach().to(dtype) for x in (inputs.hidden, inputs.weight))
    slopes = torch.randn(len(hidden), len(weight), dtype=dtype)
    scores = torch.empty_like(slopes)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.T, out=scores)
        torch.mm(slopes, weight, out=d_hidden)
        torch.mm(slopes.T, hidden, out=d_weight)

    return run


def ours(inputs: Inputs, precision: Precision) -> Run:
    """The product of this repository, forward and backward."""

    def nats() -> Tensor:
        with autocast(CPU, precision):
            return chunked_cross_entropy(
                inputs.hidden,
                inputs.weight,
                inputs.targets,
                vocab_chunk=_VOCAB_CHUNK,
                reduction="mean",
            )

    return _with_backward(inputs, nats)


def peers(inputs: Inputs, precision: Precision) -> dict[str, Run]:
    """What there is besides, by name, each at its best options."""
    forms: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "dense": _dense,
        "checkpointed_chunks": _checkpointed,
        "torch_best_options": _torch_chunks,
    }
    apple = peer("cut_cross_entropy")
    if apple is not None:
        forms[COMPILED] = lambda h, w, y: apple.linear_cross_entropy(h, w, y, impl="torch_compile")
    return {name: peer_run(inputs, precision, form) for name, form in forms.items()}


def torch_default(inputs: Inputs, precision: Precision) -> Run:
    """torch's own with the options that it chooses itself, many times slower on a CPU."""
    options = torch.nn.LinearCrossEntropyOptions()
    return peer_run(
        inputs,
        precision,
        lambda h, w, y: functional.linear_cross_entropy(h, w, y, options=options),
    )


def peer_run(
    inputs: Inputs, precision: Precision, form: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Run:
    """Forward and backward of a function of hidden, weight and targets."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return _with_backward(
        inputs, lambda: form(inputs.hidden.to(dtype), inputs.weight.to(dtype), inputs.targets)
    )


def prepare(*, form: str, precision: Precision, width: int, tokens: int, vocab: int) -> Run:
    """For a fresh process: one form by its name."""
    inputs = draw_inputs(width=width, tokens=tokens, vocab=vocab)
    return ours(inputs, precision) if form == OURS else peers(inputs, precision)[form]


def _with_backward(inputs: Inputs, nats: Callable[[], Tensor]) -> Run:
    def run() -> None:
        inputs.hidden.grad = inputs.weight.grad = None
        nats().backward()

    return run


def _dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)


def _checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    def part(rows: Tensor, words: Tensor) -> Tensor:
        scores = functional.linear(rows, weight).float()
        return functional.cross_entropy(scores, words, reduction="sum")

    pairs = zip(hidden.split(_CHUNK_TOKENS), targets.split(_CHUNK_TOKENS), strict=True)
    parts = [checkpoint(part, rows, words, use_reentrant=False) for rows, words in pairs]
    return torch.stack(parts).sum() / len(targets)


def _torch_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=_CHUNK_TOKENS, chunking_method=None, acc_policy="compact"
    )
    return functional.linear_cross_entropy(hidden, weight, targets, options=options)
