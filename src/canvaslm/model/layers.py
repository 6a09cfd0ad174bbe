"""Which pieces is a block made of: norm, rotation, attention heads, feed-forward, time?"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from canvaslm.device import wide
from canvaslm.model.fused import Gated, Rotate, ScaledNorm
from canvaslm.model.shape import ModelParams

_TIME_SCALE = 1000.0  # a time in [0, 1] spreads over the range of the features' periods
_TIME_BASE = 10000.0  # Vaswani et al. 2017, section 3.5

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Divide by the root mean square, computed in float32 or wider (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension; the result has the type of ``x``."""
        dtype = wide(x.dtype)
        wide_x, weight = x.to(dtype), self.weight.to(dtype)
        if x.is_cuda:  # there the library's own kernel is one pass
            return functional.rms_norm(wide_x, weight.shape, weight, self.eps).to(x.dtype)
        normed: Tensor = ScaledNorm.apply(wide_x, weight, self.eps)  # pyright: ignore[reportAssignmentType]
        return normed.to(x.dtype)


class Rotation:
    """Rotary positions in the rotate-half form (Su et al. 2021, arXiv 2104.09864).

    Angles are a pure function of the positions, made anew for each forward: there is no buffer
    that a cast of the model to bfloat16 could round, or that a checkpoint could lack.

    Args:
        places: positions of the S tokens, in runs.
        params: head width and base of the frequencies.
        dtype: type of the tables, float32 or float64.
        device: where they live.
    """

    def __init__(
        self,
        places: Sequence[range],
        params: ModelParams,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        half = params.head_width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=device) / half
        runs = [torch.arange(x.start, x.stop, dtype=torch.float64, device=device) for x in places]
        positions = torch.cat(runs)
        angles = positions[:, None] * params.rope_base**-exponents  # (S, E/2)
        self.cos = angles.cos().to(dtype)
        self.sin = angles.sin().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate heads (B, H, S, E); the result has the type of ``x``."""
        return Rotate.apply(x, self.cos, self.sin)  # pyright: ignore[reportReturnType]


class Block(nn.Module):
    """One pre-norm transformer block: attention over given keys, then a SwiGLU feed-forward."""

    def __init__(self, params: ModelParams) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(params.width, params.norm_eps)
        self.attention = Heads(params)
        self.feed_forward_norm = RMSNorm(params.width, params.norm_eps)
        self.feed_forward = FeedForward(params)

    def forward(
        self, x: Tensor, rotation: Rotation, attend: _Attend
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Transform x (B, S, D); also return its keys and values (B, K, S, E).

        Args:
            x: the residual stream.
            rotation: the positions of its tokens.
            attend: which keys a query may meet, given (q, k, v) of this layer.
        """
        q, k, v = self.attention.project(self.attention_norm(x), rotation)
        x = x + self.attention.merge(attend(q, k, v))
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x, k, v

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The keys and values (B, K, S, E) of x (B, S, D) alone."""
        return self.attention.keys_values(self.attention_norm(x), rotation)


class Heads(nn.Module):
    """The four projections of grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(self, params: ModelParams) -> None:
        super().__init__()
        D, E, bias = params.width, params.head_width, params.bias
        self.query = nn.Linear(D, params.n_heads * E, bias=bias)
        self.key = nn.Linear(D, params.n_kv_heads * E, bias=bias)
        self.value = nn.Linear(D, params.n_kv_heads * E, bias=bias)
        self.output = nn.Linear(params.n_heads * E, D, bias=bias)
        self.query_norm = RMSNorm(E, params.norm_eps) if params.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(E, params.norm_eps) if params.qk_norm else nn.Identity()
        self.head_width = E

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, S, E), keys and values (B, K, S, E) of x (B, S, D)."""
        q = rotation(self.query_norm(self._split(self.query(x))))
        return q, *self.keys_values(x, rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, E) of x (B, S, D)."""
        k = self.key_norm(self._split(self.key(x)))
        return rotation(k), self._split(self.value(x))

    def merge(self, attended: Tensor) -> Tensor:
        """Join heads (B, H, S, E) into (B, S, D)."""
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, params: ModelParams) -> None:
        super().__init__()
        self.gate = nn.Linear(params.width, params.ffn_width, bias=params.bias)
        self.up = nn.Linear(params.width, params.ffn_width, bias=params.bias)
        self.down = nn.Linear(params.ffn_width, params.width, bias=params.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (..., D)."""
        gated: Tensor = Gated.apply(self.gate(x), self.up(x))  # pyright: ignore[reportAssignmentType]
        return self.down(gated)


class TimeEmbedding(nn.Module):
    """Sinusoidal features of the time of a canvas or a token, then two linear layers."""

    def __init__(self, params: ModelParams) -> None:
        super().__init__()
        self.inner = nn.Linear(params.time_width, params.width, bias=params.bias)
        self.outer = nn.Linear(params.width, params.width, bias=params.bias)
        self.time_width = params.time_width

    def forward(self, times: Tensor) -> Tensor:
        """Embed times (B, n) in [0, 1] as (B, n, D)."""
        half = self.time_width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=times.device) / half
        frequencies = torch.exp(-math.log(_TIME_BASE) * exponents)
        angles = _TIME_SCALE * times.to(torch.float64)[..., None] * frequencies
        features = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.inner.weight.dtype)
        return self.outer(functional.silu(self.inner(features)))
