"""Which tokens are in window number i?

A window is T tokens of one shard, and the next begins where it ends: no shift, since a denoiser's
input and target are the same tokens, and no overlap. What is left at a shard's end is its tail; it
is counted, never padded, since filling it up would add text that nobody wrote. A run's identity is
the manifest's, so the bytes must be those that the manifest vouches for: each shard is hashed once,
when it is opened.
"""

from functools import cached_property
from pathlib import Path

import numpy as np

from canvaslm.corpus.fetch import hash_file
from canvaslm.corpus.manifest import Shard, read_manifest, read_places, read_token_bytes
from canvaslm.errors import InputError


class Windows:
    """The windows of one split, read through read-only memory maps."""

    def __init__(self, shards_dir: Path, split: str, window_tokens: int) -> None:
        """Open the shards of a split.

        Args:
            shards_dir: a folder with a complete manifest.
            split: ``train`` or ``val``.
            window_tokens: T.

        Raises:
            InputError: the folder is incomplete, a size or a hash disagrees, or no window fits.
        """
        self.manifest = read_manifest(shards_dir)
        self.split = split
        self.window_tokens = window_tokens
        self._shards_dir = shards_dir
        self._shards = [self._open(shard) for shard in self.manifest.splits[split]]
        per_shard = [len(shard) // window_tokens for shard in self._shards]
        self._ends = np.cumsum(per_shard)  # windows up to and including each shard
        self.tail_tokens = sum(len(shard) % window_tokens for shard in self._shards)
        if len(self) == 0:
            raise InputError(
                f"{shards_dir}:{split}",
                expected=f"at least one window of {window_tokens} tokens in a shard",
                got=f"{self.manifest.tokens_in(split)} tokens in {len(per_shard)} shard(s)",
                fix="add documents, or lower layout.canvases_per_window",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """The ids of some windows.

        Args:
            indices: (n,) integers in 0..len-1.

        Returns:
            (n, T) int64.
        """
        windows = np.empty((len(indices), self.window_tokens), dtype=np.int64)
        for row, index in enumerate(indices):
            shard, first = self.place_of(int(index))
            windows[row] = self._shards[shard][first : first + self.window_tokens]
        return windows

    def place_of(self, index: int) -> tuple[int, int]:
        """The shard in which a window lies and the offset of its first token there."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        return shard, (index - before) * self.window_tokens

    def documents_of(self, index: int) -> np.ndarray:
        """Which document each token of a window belongs to.

        Returns:
            (T,) int64, numbers of documents within the split in their order; an end of text
            belongs to the document that it ends.
        """
        shard, first = self.place_of(index)
        offsets = self._shard_starts[shard] + first + np.arange(self.window_tokens)
        return np.searchsorted(self._document_ends, offsets, side="right")

    def text_bytes_of(self, index: int) -> np.ndarray:
        """Bytes of text that each token of a window stands for, (T,) int64; an end of text 0."""
        return self._token_bytes[self.gather(np.array([index]))[0]]

    def _open(self, shard: Shard) -> np.ndarray:
        """Map a shard whose bytes are those that were packed."""
        path = self._shards_dir / shard.file
        got = hash_file(path)
        if got != shard.sha256:
            raise InputError(
                path,
                expected=f"sha256 {shard.sha256}, as in the manifest",
                got=got,
                fix="run stages/pack_shards.py again",
            )
        return np.memmap(path, dtype=self.manifest.id_type, mode="r")

    @cached_property
    def _shard_starts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self._shards)])

    @cached_property
    def _document_ends(self) -> np.ndarray:
        """Offsets over the whole split, since shards hold whole documents one after the other."""
        return np.cumsum(read_places(self._shards_dir, self.split)["n_tokens"])

    @cached_property
    def _token_bytes(self) -> np.ndarray:
        return read_token_bytes(self._shards_dir)
