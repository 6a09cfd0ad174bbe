"""Where does the memory of a freed tensor go, and what does it cost to get it back?

By default glibc maps each large buffer anew and hands it back to the kernel when it is freed, and
the kernel clears every page on its first touch. For a large elementwise operation that costs
several times its arithmetic.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_NEVER = -1  # a threshold that no size reaches; mallopt takes an int, so a large one ends at 2 GiB


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for what is asked for next.

    No value depends on it. The price: a process holds to its end what it held at its peak.

    Returns:
        Whether the C library could be told; elsewhere than under glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _NEVER)])
