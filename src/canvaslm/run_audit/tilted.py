"""At what time does each token of a canvas stand, by the definition of a tilt alone?"""

_ROUNDING = 1e-9


def position_shares(canvas_share: float, canvas_tokens: int, tilt: float) -> list[float]:
    """Times of the tokens of one canvas, as shares of 1, one by one.

    The noise of token i of L begins when tilt/(1 + tilt)·(L-1-i)/(L-1) of the canvas's time has
    gone by, and is whole after another 1/(1 + tilt) of it.

    Args:
        canvas_share: the time of the canvas as a share of 1.
        canvas_tokens: L; a canvas of one token has no tilt.
        tilt: 0 or more.
    """
    shares = []
    for i in range(canvas_tokens):
        waits = tilt / (1 + tilt) * (canvas_tokens - 1 - i) / max(canvas_tokens - 1, 1)
        share = (canvas_share - waits) * (1 + tilt) if canvas_tokens > 1 else canvas_share
        is_inside = _ROUNDING < share < 1 - _ROUNDING
        shares.append(share if is_inside else float(share > 0.5))
    return shares
