"""Which keys does a query meet, without ever writing down a T×T mask?

Each function slices the keys that a canvas may see, so that most calls need no mask at all:

- :func:`causal_attention`: the clean stream and the autoregressive twin;
- :func:`block_causal_attention`: one stream, each canvas sees itself and earlier canvases;
- :func:`canvas_attention`: a noisy canvas sees clean keys strictly before it, and itself.

On CUDA several canvases go through one flex-attention call with a block mask (Dong et al. 2024,
arXiv 2412.05496); :func:`_fuses_canvases` is the only place that decides. Heads are
q (B, H, S, E) and k, v (B, K, S, E), where K divides H.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

_QUERY_ROWS = 256  # queries under one mask when a causal suffix meets a cache: bounds its size


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to keys up to one's own position, the last query sitting on the last key.

    With as many queries as keys no mask exists. With fewer (a cache lies before them) the queries
    go in chunks of 256, each under a boolean mask of its own keys; that path serves decoding.
    """
    S, n_keys = q.shape[2], k.shape[2]
    if n_keys == S:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if S == 1:  # the one query sits on the last key
        return full_attention(q, k, v)
    assert n_keys > S, "causal attention needs at least as many keys as queries"
    start = n_keys - S
    outputs = []
    for first in range(0, S, _QUERY_ROWS):
        last = min(first + _QUERY_ROWS, S)
        seen = torch.ones(last - first, start + last, dtype=torch.bool, device=q.device)
        seen = seen.tril(start + first)
        keys, values = k[:, :, : start + last], v[:, :, : start + last]
        outputs.append(masked_attention(q[:, :, first:last], keys, values, seen))
    return torch.cat(outputs, dim=2)


def block_causal_attention(q: Tensor, k: Tensor, v: Tensor, *, canvas_tokens: int) -> Tensor:
    """Attend to one's own canvas in both directions and to every earlier one.

    The last query sits on the last key, and the keys before the first query are whole canvases.
    """
    start = k.shape[2] - q.shape[2]
    n_canvases = _count_canvases(q, canvas_tokens)
    assert start >= 0, "block-causal attention needs at least as many keys as queries"
    assert start % canvas_tokens == 0, "the keys before the queries are whole canvases"
    if _fuses_canvases(q, n_canvases):
        mask = _block_mask("block_causal", q.shape[2], k.shape[2], canvas_tokens, start, q.device)
        return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)
    outputs = []
    for b, own_q in enumerate(q.split(canvas_tokens, dim=2)):
        end = start + (b + 1) * canvas_tokens
        outputs.append(full_attention(own_q, k[:, :, :end], v[:, :, :end]))
    return torch.cat(outputs, dim=2)


def canvas_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    clean_k: Tensor,
    clean_v: Tensor,
    *,
    canvas_tokens: int,
    start: int,
) -> Tensor:
    """Attend, in noisy canvas b, to clean keys strictly before it and to its own noisy keys.

    Args:
        q: noisy queries (B, H, S, E), S whole canvases.
        k: noisy keys (B, K, S, E).
        v: noisy values (B, K, S, E).
        clean_k: keys of the clean stream, at least the first ``start + S - L`` positions.
        clean_v: values of the clean stream, as many.
        canvas_tokens: L.
        start: clean positions before the first noisy canvas.
    """
    n_canvases = _count_canvases(q, canvas_tokens)
    n_seen = start + (n_canvases - 1) * canvas_tokens
    assert clean_k.shape[2] >= n_seen, "each canvas but the last needs its clean copy in context"
    clean_k, clean_v = clean_k[:, :, :n_seen], clean_v[:, :, :n_seen]
    if _fuses_canvases(q, n_canvases):
        keys, values = torch.cat((clean_k, k), dim=2), torch.cat((clean_v, v), dim=2)
        mask = _block_mask("canvas", q.shape[2], keys.shape[2], canvas_tokens, start, q.device)
        return _compiled_flex()(q, keys, values, block_mask=mask, enable_gqa=True)
    outputs = []
    for b, (own_q, own_k, own_v) in enumerate(
        zip(*(x.split(canvas_tokens, dim=2) for x in (q, k, v)), strict=True)
    ):
        before = start + b * canvas_tokens
        keys = torch.cat((clean_k[:, :, :before], own_k), dim=2)
        values = torch.cat((clean_v[:, :, :before], own_v), dim=2)
        outputs.append(full_attention(own_q, keys, values))
    return torch.cat(outputs, dim=2)


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to every key; the query heads of a group are folded into rows, so no key repeats."""
    if k.shape[1] == q.shape[1]:
        return functional.scaled_dot_product_attention(q, k, v)
    folded = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, K, H/K·S, E)
    return functional.scaled_dot_product_attention(folded, k, v).reshape(q.shape)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attend where ``seen`` is True; a query that sees nothing gets zeros.

    Args:
        q: queries (B, H, S, E).
        k: keys (B, K, n, E).
        v: values (B, K, n, E).
        seen: bool, broadcastable to (B, H, S, n).

    Raises:
        TypeError: ``seen`` is not boolean; a 0/1 float mask would be added to the scores.
    """
    if seen.dtype != torch.bool:
        raise TypeError(f"seen: expected a bool mask (True: may attend), got {seen.dtype}")
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def _count_canvases(q: Tensor, canvas_tokens: int) -> int:
    assert q.shape[2] % canvas_tokens == 0, "noisy tokens come in whole canvases"
    return q.shape[2] // canvas_tokens


def _fuses_canvases(q: Tensor, n_canvases: int) -> bool:
    """Whether the canvases go through one flex call; a single canvas needs no mask anyway."""
    return q.is_cuda and n_canvases > 1


@functools.cache
def _compiled_flex():
    return torch.compile(flex.flex_attention)


@functools.lru_cache(maxsize=8)
def _block_mask(
    kind: str, n_queries: int, n_keys: int, canvas_tokens: int, start: int, device: torch.device
) -> flex.BlockMask:
    """Build the block mask of a kind once for each shape."""
    n_clean = n_keys - n_queries

    def block_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < start + (query // canvas_tokens + 1) * canvas_tokens

    def canvas(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query // canvas_tokens
        before = key < start + row * canvas_tokens
        own = (key - n_clean) // canvas_tokens == row
        return torch.where(key < n_clean, before, own)

    rule = {"block_causal": block_causal, "canvas": canvas}[kind]
    return flex.create_block_mask(rule, None, None, n_queries, n_keys, device=device)
