"""Is there room on the disk for what is about to be written, and how much is missing?"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from canvaslm.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_for(place: Path, sizes: Sequence[int], *, what: str) -> Iterator[None]:
    """Look for room before files are written, and count it again when the system finds none.

    Args:
        place: the directory that they go to; it need not exist yet.
        sizes: bytes of each file.
        what: what they are together, for the message.

    Raises:
        InputError: there is too little room, or the system said so while the block wrote; how much
            is needed, free and missing is told in bytes.
    """
    needed = _needed_bytes(place, sizes)
    free = _free_bytes(place)
    if free is not None and free < needed:
        raise _refusal(place, needed, what)
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _refusal(place, needed, what) from error


def _needed_bytes(place: Path, sizes: Sequence[int]) -> int:
    """What files take in whole blocks, with one more for the directory that holds them."""
    block = os.statvfs(_standing(place)).f_frsize or 1
    return sum(-(-size // block) * block for size in sizes) + block


def _free_bytes(place: Path) -> int | None:
    """What a user may still write; None where the file system does not say."""
    found = os.statvfs(_standing(place))
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _refusal(place: Path, needed: int, what: str) -> InputError:
    free = _free_bytes(place) or 0
    got = f"{free} bytes free, {max(needed - free, 0)} bytes missing"
    if free >= needed:
        got += ", and yet no room (there is a quota, or another process writes)"
    return InputError(
        place,
        expected=f"{needed} bytes free for {what}",
        got=got,
        fix="what stood there is untouched: free some room and run the same command again",
    )


def _standing(place: Path) -> Path:
    """The nearest directory that exists."""
    return next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
