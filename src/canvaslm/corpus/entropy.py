"""What does a token cost one who knows only how often each occurs?"""

import numpy as np


def entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the frequencies behind counts, in nats (Shannon 1948, section 6).

    Args:
        counts: (n,) how often each thing occurs; at least one is above 0.
    """
    shares = counts[counts > 0] / counts.sum()
    return abs(float(np.sum(shares * np.log(shares))))  # abs, since -0.0 is no figure
