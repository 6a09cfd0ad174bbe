"""Where do the keys and values of clean tokens live while noisy canvases read them?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

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


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What the clean stream leaves: hidden states, and keys and values of each layer.

    Attributes:
        hidden: (B, S, D), after the final norm.
        keys: one (B, K, S, E) for each layer.
        values: one (B, K, S, E) for each layer.
    """

    hidden: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def start(self) -> int:
        """Noisy canvases lie over the encoded tokens themselves, from position 0."""
        return 0

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, E) of one layer."""
        return self.keys[layer], self.values[layer]

    def rows(self, index: Tensor) -> "Encoded":
        """The rows of the batch that ``index`` (int64 or bool) selects."""
        return Encoded(
            hidden=self.hidden[index],
            keys=tuple(k[index] for k in self.keys),
            values=tuple(v[index] for v in self.values),
        )

    def detach(self) -> "Encoded":
        """The same numbers, through which no gradient flows."""
        return Encoded(
            hidden=self.hidden.detach(),
            keys=tuple(k.detach() for k in self.keys),
            values=tuple(v.detach() for v in self.values),
        )


class KVCache:
    """Preallocated keys and values of a growing prefix; :meth:`Backbone.encode` alone writes it.

    Slots past ``length`` are never read: a reader gets a slice, so what lies there cannot reach an
    output. The cache carries no gradient.
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
        self._length = 0

    @classmethod
    def for_model(cls, model: "Backbone", batch: int, capacity: int) -> "KVCache":
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens.

        Its type is that of the arithmetic: autocast's where it is on, else that of the weights.
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
            dtype=torch.get_autocast_dtype(kind) if casts else weight.dtype,
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

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values after the prefix; return all of them.

        ``length`` changes only with :meth:`advance`, when every layer has been written.
        """
        end = self._length + keys.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit a cache of {self.capacity}"
        self._keys[layer, :, :, self._length : end] = keys
        self._values[layer, :, :, self._length : end] = values
        return self._slice(layer, end)

    def advance(self, n_tokens: int) -> None:
        """Count the tokens that every layer has been given."""
        self._length += n_tokens

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only the rows of the batch that ``rows`` (int64 or bool) selects."""
        self._keys = self._keys[:, rows]
        self._values = self._values[:, rows]

    def _slice(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
