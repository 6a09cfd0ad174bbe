"""Where does every random number come from?

From a named stream. A stream is a pure function of (seed, name, number), so that what one window
draws does not depend on the windows drawn before it, on the batch it sits in, on workers or on the
device: all draws are made on the CPU by NumPy's Philox generator (Salmon et al. 2011).
"""

import hashlib

import numpy as np


def stream(seed: int, name: str, number: int = 0) -> np.random.Generator:
    """Open the stream ``name`` at ``number``.

    Args:
        seed: the run's seed.
        name: what is drawn, for example ``"corruption"``; two purposes never share a name.
        number: which member of the family, for example the number of a window in the run.

    Returns:
        A fresh generator; calling again with the same arguments gives the same draws.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
