"""How do the same weights read a few tokens fastest on a CPU?

A decoder reads one token or one canvas at a time: the products are small, and what surrounds them
counts. Here the weights lie as such products want them, (inputs, outputs) without a gap; queries,
keys and values are one product; the scale of a norm is part of the matrix behind it; and a block
changes its stream in place. The same numbers as :class:`Backbone`'s own blocks, up to rounding
(``tests/model/test_packed.py``), and no gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from canvaslm.device import multiplies_in_tiles, wide
from canvaslm.model.layers import Block, RMSNorm, Rotation

if TYPE_CHECKING:
    from canvaslm.model.backbone import Backbone

_FIRST = -1  # where a canvas at the start of a text reads what stands before it
_AttendLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]
_Keep = Callable[[int, Tensor, Tensor], object]


def decoding_dtype(weight: Tensor) -> torch.dtype:
    """The type in which a decoder multiplies: that of the weights, where that is no detour.

    A CPU that has no tiles for bfloat16 (AMX) multiplies float32 numbers faster than bfloat16
    ones, and they are the more exact.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return weight.dtype
    return weight.dtype if multiplies_in_tiles() else torch.float32


def can_be_packed(model: "Backbone") -> bool:
    """Whether a decoder may read a packed copy: on a CPU, where nothing asks for other types."""
    kind = model.head_weight.device.type
    return kind == "cpu" and not torch.is_autocast_enabled(kind)


class PackedBackbone:
    """A copy of the weights of a backbone as they are now, laid out for decoding.

    Args:
        model: whose weights; they must not change while the copy is in use.
        n_positions: the longest text with its last canvas.

    Attributes:
        head: (D, V), the tied head.
    """

    def __init__(self, model: "Backbone", n_positions: int) -> None:
        dtype = decoding_dtype(model.head_weight)
        self.head = _columns(model.head_weight, dtype)
        self._blocks = tuple(_pack(cast(Block, block), dtype) for block in model.blocks)
        self._head_width = model.params.head_width
        self._n_heads = [model.params.n_heads, model.params.n_kv_heads]
        self._n_turned = sum(self._n_heads)
        rotation = Rotation(
            [range(_FIRST, n_positions)],
            model.params,
            dtype=wide(dtype),
            device=model.head_weight.device,
        )
        self._cos = torch.cat((rotation.cos, rotation.cos), dim=-1)  # (S, E)
        self._sin = torch.cat((-rotation.sin, rotation.sin), dim=-1)

    def run(
        self, x: Tensor, places: Sequence[range], attend: _AttendLayer
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Take a stream through all blocks; return it with the keys and values of each.

        Args:
            x: (B, S, D).
            places: positions of its S tokens, in runs.
            attend: which keys a query may meet, given layer, q (B, H, S, E) and k, v (B, K, S, E).

        Returns:
            The stream, float32 or wider, and for each layer keys and values (B, K, S, E).
        """
        return self._run(x, places, attend, self._blocks)

    def run_to_keys(
        self, x: Tensor, places: Sequence[range], attend: _AttendLayer, keep: _Keep
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """As :meth:`run`, up to the keys and values of the last block, which go to ``keep``."""
        *others, last = self._blocks
        x, keys, values = self._run(x, places, attend, others)
        _, k, v = self._heads(last, x.flatten(0, 1), self._turns(places), x.shape)
        keep(len(others), k, v)
        return (*keys, k), (*values, v)

    def _run(
        self,
        x: Tensor,
        places: Sequence[range],
        attend: _AttendLayer,
        blocks: Sequence["_PackedBlock"],
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        shape, turns = x.shape, self._turns(places)
        x = x.to(self._cos.dtype, copy=True).flatten(0, 1)  # changed in place below
        keys, values = [], []
        for layer, block in enumerate(blocks):
            q, k, v = self._heads(block, x, turns, shape)
            attended = attend(layer, q, k, v)
            block.output.add_to(x, attended.transpose(1, 2).reshape(x.shape[0], -1))
            normed = block.unit(x)
            block.down.add_to(x, functional.silu(block.gate(normed)).mul_(block.up(normed)))
            keys.append(k)
            values.append(v)
        return x.view(shape), tuple(keys), tuple(values)

    def _turns(self, places: Sequence[range]) -> tuple[Tensor, Tensor]:
        end, room = places[-1].stop, len(self._cos) + _FIRST
        assert end <= room, f"{end} tokens do not fit a cache of {room}"
        rows = [slice(run.start - _FIRST, run.stop - _FIRST) for run in places]
        if len(rows) == 1:
            return self._cos[rows[0]], self._sin[rows[0]]
        cos, sin = (torch.cat([table[run] for run in rows]) for table in (self._cos, self._sin))
        return cos, sin

    def _heads(
        self, block: "_PackedBlock", x: Tensor, turns: tuple[Tensor, Tensor], shape: torch.Size
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads (B, heads, S, E) of a stream (B·S, D), queries and keys normed and turned."""
        cos, sin = turns
        qkv = block.qkv(block.unit(x)).view(*shape[:2], -1, self._head_width).transpose(1, 2)
        turned, v = qkv[:, : self._n_turned], qkv[:, self._n_turned :]
        if turned.dtype != cos.dtype:
            turned = turned.to(cos.dtype)
        if block.head_norm is not None:
            turned = block.unit(turned) * block.head_norm
        swapped = turned.roll(self._head_width // 2, dims=-1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        q, k = turned.to(v.dtype).split(self._n_heads, dim=1)
        return q, k, v


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    weight: Tensor  # (inputs, outputs)
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            x = x.to(self.weight.dtype)
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    def add_to(self, stream: Tensor, x: Tensor) -> None:
        if stream.dtype == self.weight.dtype:
            stream.addmm_(x, self.weight)
        else:
            stream.add_(torch.mm(x, self.weight))
        if self.bias is not None:
            stream.add_(self.bias)


@dataclass(frozen=True, kw_only=True)
class _PackedBlock:
    qkv: _Matrix
    output: _Matrix
    gate: _Matrix
    up: _Matrix
    down: _Matrix
    head_norm: Tensor | None  # (H+K, 1, E), of normed queries and keys
    eps: Tensor  # (1,)

    def unit(self, x: Tensor) -> Tensor:
        """Divide the last dimension by its root mean square, as RMSNorm does before its scale."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        square = torch.addcmul(self.eps, length, length, value=1.0 / x.shape[-1])
        return x * square.rsqrt_()


def _pack(block: Block, dtype: torch.dtype) -> _PackedBlock:
    heads, mlp = block.attention, block.feed_forward
    before, between = block.attention_norm.weight, block.feed_forward_norm.weight
    return _PackedBlock(
        qkv=_matrix((heads.query, heads.key, heads.value), dtype, scale=before),
        output=_matrix((heads.output,), dtype),
        gate=_matrix((mlp.gate,), dtype, scale=between),
        up=_matrix((mlp.up,), dtype, scale=between),
        down=_matrix((mlp.down,), dtype),
        head_norm=_head_norms(block, wide(dtype)),
        eps=before.new_full((1,), block.attention_norm.eps, dtype=wide(dtype)),
    )


def _matrix(
    layers: Sequence[nn.Linear], dtype: torch.dtype, *, scale: Tensor | None = None
) -> _Matrix:
    """Layers of one input side by side, behind a norm of this scale."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if scale is not None:
        weight = weight.to(wide(weight.dtype)) * scale.detach()
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return _Matrix(
        weight=_columns(weight, dtype), bias=torch.cat(biases).to(dtype) if biases else None
    )


def _head_norms(block: Block, dtype: torch.dtype) -> Tensor | None:
    """Scales of the normed heads, queries before keys; None where heads are not normed."""
    heads, rows = block.attention, []
    for norm, layer in ((heads.query_norm, heads.query), (heads.key_norm, heads.key)):
        if not isinstance(norm, RMSNorm):
            return None
        rows.append(norm.weight.detach().expand(layer.out_features // heads.head_width, -1))
    return torch.cat(rows).to(dtype)[:, None]


def _columns(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(outputs, inputs) as a new (inputs, outputs) without a gap."""
    return weight.detach().to(dtype).T.contiguous()
