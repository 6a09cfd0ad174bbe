"""How does a long loop say where it stands without knowing who watches?"""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    """Wraps the items of a loop and shows how many of ``total`` are done; stages draw a bar."""

    def __call__(self, items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
        """Yield ``items`` unchanged."""
        ...


def untracked(items: Iterable[T], *, total: int, label: str) -> Iterator[T]:
    """Yield ``items`` and show nothing: the null object of :class:`Track`."""
    del total, label
    yield from items
