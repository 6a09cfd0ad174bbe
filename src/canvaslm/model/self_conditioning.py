"""How does a first guess of the clean tokens enter the second pass?

Through one zero-initialised projection, used once (Chen et al. 2022, arXiv 2208.04202): at
initialisation the network computes the same bits with a guess and without. A gated layer may stand
before the projection.
"""

import torch
from torch import Tensor, nn

from canvaslm.model.fused import Gated


class SelfConditioning(nn.Module):
    """The zero-initialised projection of a re-embedded guess, or of a gated layer over it.

    Args:
        width: D.
        bias: whether the layers have one.
        gated: whether the guess g becomes ``silu(gate(g)) * up(g)`` first (Shazeer 2020,
            arXiv 2002.05202).
    """

    def __init__(self, width: int, *, bias: bool, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width, bias=bias) if gated else None
        self.up = nn.Linear(width, width, bias=bias) if gated else None
        self.projection = nn.Linear(width, width, bias=bias)
        nn.init.zeros_(self.projection.weight)
        if bias:
            nn.init.zeros_(self.projection.bias)

    def forward(self, guess: Tensor, has_guess: Tensor | None) -> Tensor:
        """What to add for each token.

        Args:
            guess: (B, S, D) ``softmax(logits) @ E`` of an earlier pass.
            has_guess: (B,) bool; rows without a guess add exactly 0, whatever ``guess`` holds
                there. None: every row has one.

        Raises:
            TypeError: ``has_guess`` is not boolean.
        """
        if has_guess is None:
            return self._project(guess)
        if has_guess.dtype != torch.bool:
            raise TypeError(f"has_guess: expected bool, got {has_guess.dtype}")
        keep = has_guess[:, None, None]
        # Masked on both sides: before, so that a NaN cannot reach the weight's gradient; after,
        # because the bias would be added to rows without a guess.
        return self._project(guess.masked_fill(~keep, 0)).masked_fill(~keep, 0)

    def _project(self, guess: Tensor) -> Tensor:
        if self.gate is None or self.up is None:
            return self.projection(guess)
        gated: Tensor = Gated.apply(self.gate(guess), self.up(guess))  # pyright: ignore[reportAssignmentType]
        return self.projection(gated)
