"""Where do the keys and values of clean tokens live while noisy canvases read them?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from canvaslm.model.packed import PackedBackbone, can_be_packed, decoding_dtype

if TYPE_CHECKING:
    from canvaslm.model.backbone import Backbone


class CleanContext(Protocol):
    """Clean keys and values that a noisy canvas may read and never writes."""

    @property
    def start(self) -> int:
        """Position of the first noisy token."""
        ...

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, E) of one layer, positions 0..S-1."""
        ...

    def ids_at(self, positions: Sequence[int]) -> Tensor:
        """(B, len(positions)) int64: the clean tokens at some positions."""
        ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """Clean tokens with their keys and values of each layer, and nothing else of that stream.

    Attributes:
        ids: (B, S) int64.
        keys: one (B, K, S, E) for each layer.
        values: one (B, K, S, E) for each layer.
    """

    ids: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def start(self) -> int:
        """Noisy canvases lie over the encoded tokens themselves, from position 0."""
        return 0

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, E) of one layer."""
        return self.keys[layer], self.values[layer]

    def ids_at(self, positions: Sequence[int]) -> Tensor:
        """(B, len(positions)) int64: the tokens at some positions."""
        return self.ids[:, list(positions)]

    def rows(self, index: Tensor) -> Self:
        """The rows of the batch that ``index`` (int64 or bool) selects."""
        return self._each(lambda tensor: tensor[index])

    def detach(self) -> Self:
        """The same numbers, through which no gradient flows."""
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        keys, values = (tuple(map(change, kept)) for kept in (self.keys, self.values))
        return replace(self, ids=change(self.ids), keys=keys, values=values)


@dataclass(frozen=True, kw_only=True)
class Encoded(Context):
    """All that the clean stream leaves: keys, values and hidden states.

    Attributes:
        hidden: (B, S, D), after the final norm.
    """

    hidden: Tensor

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(super()._each(change), hidden=change(self.hidden))


class KVCache:
    """Preallocated tokens, keys and values of a growing prefix, and the weights that read it.

    The cache holds ``length`` tokens, and :meth:`Backbone.encode` alone adds to them. What lies
    behind them belongs to the forward that is under way: a noisy canvas puts its own keys there,
    so that its queries meet one piece of memory, and never counts them. A reader gets a slice that
    ends where the forward's own keys end, so nothing older can reach an output. The cache carries
    no gradient.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        batch: int,
        n_kv_heads: int,
        capacity: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (n_layers, batch, n_kv_heads, capacity, head_width)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self._ids = torch.empty((batch, capacity), dtype=torch.int64, device=device)
        self._layers = self._by_layer()
        self._length = 0
        self._packed: PackedBackbone | None = None

    @classmethod
    def for_model(cls, model: "Backbone", batch: int, capacity: int) -> "KVCache":
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens.

        Its type is that of the arithmetic: autocast's where it is on, else that in which a decoder
        multiplies.
        """
        params, weight = model.params, model.head_weight
        kind = weight.device.type
        casts = torch.is_autocast_enabled(kind)
        return cls(
            n_layers=params.n_layers,
            batch=batch,
            n_kv_heads=params.n_kv_heads,
            capacity=capacity,
            head_width=params.head_width,
            dtype=torch.get_autocast_dtype(kind) if casts else decoding_dtype(weight),
            device=weight.device,
        )

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def start(self) -> int:
        """Position of the next token: a noisy canvas begins where the cache ends."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self._keys.shape[3]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, length, E) of one layer."""
        return self._slice(layer, self._length)

    def ids_at(self, positions: Sequence[int]) -> Tensor:
        """(B, len(positions)) int64: the tokens at some positions."""
        return self._ids[:, : self._length][:, list(positions)]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put one layer's new keys and values behind the prefix; return all of them.

        What the cache holds changes only with :meth:`advance`, when every layer has been written.
        """
        end = self._length + keys.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit a cache of {self.capacity}"
        all_keys, all_values = self._slice(layer, end)
        all_keys[:, :, self._length :] = keys
        all_values[:, :, self._length :] = values
        return all_keys, all_values

    def advance(self, ids: Tensor) -> None:
        """Take in the tokens (B, n) int64 whose keys and values every layer has been given."""
        end = self._length + ids.shape[1]
        self._ids[:, self._length : end] = ids
        self._length = end

    def cut(self, length: int) -> None:
        """Forget the tokens from ``length`` on; those before them stay as they are."""
        assert length <= self._length, f"{length} of {self._length} tokens cannot be kept"
        self._length = length

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only the rows of the batch that ``rows`` (int64 or bool) selects."""
        self._keys = self._keys[:, rows]
        self._values = self._values[:, rows]
        self._ids = self._ids[rows]
        self._layers = self._by_layer()

    def some_rows(self, rows: Tensor, *, room: int) -> "KVCache":
        """A copy of the rows (int64) with room for so many tokens behind what they hold."""
        n_layers, _, n_kv_heads, _, head_width = self._keys.shape
        copy = KVCache(
            n_layers=n_layers,
            batch=len(rows),
            n_kv_heads=n_kv_heads,
            capacity=self._length + room,
            head_width=head_width,
            dtype=self._keys.dtype,
            device=self._keys.device,
        )
        copy._keys[..., : self._length, :] = self._keys[:, rows, :, : self._length]
        copy._values[..., : self._length, :] = self._values[:, rows, :, : self._length]
        copy._ids[:, : self._length] = self._ids[rows, : self._length]
        copy._length, copy._packed = self._length, self._packed
        return copy

    def pack(self, model: "Backbone") -> PackedBackbone | None:
        """The model's weights, laid out once for the life of the cache; None where they are not."""
        if self._packed is None and can_be_packed(model):
            self._packed = PackedBackbone(model, self.capacity)
        return self._packed

    def head(self, model: "Backbone") -> Tensor:
        """The head (D, V), as it is read best."""
        return model.head_weight.T if self._packed is None else self._packed.head

    def table(self, model: "Backbone") -> Tensor:
        """The rows of the words (V, D), in the type of :meth:`head`."""
        head, rows = self.head(model), model.table
        if rows.dtype == head.dtype:
            return rows
        return head.T if model.params.tied else rows.to(head.dtype)

    def _by_layer(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer: views, so that a token need not make them anew."""
        return list(zip(self._keys.unbind(), self._values.unbind(), strict=True))

    def _slice(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        return keys[:, :, :end], values[:, :, :end]
