"""Which keys does a query meet, without ever writing down a T×T mask?

Each function slices the keys that a canvas may see, so that most calls need no mask at all:

- :func:`causal_attention`: the clean stream and the autoregressive twin;
- :func:`block_causal_attention`: one stream, each canvas sees itself and earlier canvases;
- :func:`canvas_attention`: a noisy canvas sees clean keys strictly before it, and itself.

Several canvases on a CPU go through :mod:`canvaslm.model.sliced`, on CUDA through one
flex-attention call with a block mask (Dong et al. 2024, arXiv 2412.05496); a single canvas, as in
decoding, meets all its keys in one plain call. Heads are q (B, H, S, E) and k, v (B, K, S, E),
where K divides H.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from canvaslm.device import wide
from canvaslm.model.sliced import SlicedAttention, Slices

_QUERY_ROWS = 256  # queries under one mask when a causal suffix meets a cache: bounds its size
_CAUSAL_BLOCK = 64  # queries whose own keys are hidden from one another: fewer hide less
_MANY_SCORES = 2**19  # of a causal window: below them, and forward alone, the library is faster
_CAUSAL_BLOCKS = 4  # least number of such blocks in a window: fewer compute more than is seen


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to keys up to one's own position, the last query sitting on the last key.

    With as many queries as keys, or a single query, no mask exists. Otherwise a cache lies before
    the queries; they go in chunks of 256, each under a boolean mask of its own keys.
    """
    S, n_keys = q.shape[2], k.shape[2]
    assert n_keys >= S, "causal attention needs at least as many keys as queries"
    if S == 1:
        return full_attention(q, k, v)
    if n_keys == S:
        return _causal_window(q, k, v)
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
    if n_canvases == 1:
        return full_attention(q, k, v)
    slices = Slices(block_tokens=canvas_tokens, start=start, causal=False)
    return _sliced(q, k, v, None, None, slices)


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
    if q.device.type == "cpu" and n_canvases > 1:
        slices = Slices(block_tokens=canvas_tokens, start=start, causal=False)
        return _sliced(q, k, v, clean_k, clean_v, slices)
    keys = torch.cat((clean_k[:, :, :n_seen], k), dim=2)
    values = torch.cat((clean_v[:, :, :n_seen], v), dim=2)
    if _fuses_canvases(q, n_canvases):
        mask = _block_mask("canvas", q.shape[2], keys.shape[2], canvas_tokens, start, q.device)
        return _compiled_flex()(q, keys, values, block_mask=mask, enable_gqa=True)
    return full_attention(q, keys, values)


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


def _causal_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to keys up to one's own position, with as many keys as queries."""
    S = q.shape[2]
    block = max(1, min(_CAUSAL_BLOCK, S // _CAUSAL_BLOCKS))
    slices = Slices(block_tokens=block, start=0, causal=True)
    many = q.shape[0] * q.shape[1] * S * S >= _MANY_SCORES and slices.are_short(q)
    if many and q.device.type == "cpu" and _learns(q, k, v):
        return _sliced(q, k, v, None, None, slices)
    dtype = wide(q.dtype) if q.device.type == "cpu" else q.dtype
    with torch.autocast(q.device.type, enabled=False):
        attended = functional.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=True
        )
    return attended.to(q.dtype)


def _learns(*heads: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in heads)


def _sliced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    clean_k: Tensor | None,
    clean_v: Tensor | None,
    slices: Slices,
) -> Tensor:
    return SlicedAttention.apply(q, k, v, clean_k, clean_v, slices)  # pyright: ignore[reportReturnType]


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
