"""What do all rooms agree on: how long is a canvas, how many make a window, how many words?"""

from pydantic import Field

from canvaslm.params import Params


class Layout(Params):
    """The shape of a window of tokens, T = C·L, over a vocabulary of V."""

    canvas_tokens: int = Field(ge=1, description="tokens in a canvas (L)")
    canvases_per_window: int = Field(ge=1, description="canvases in a window (C)")
    vocab_size: int = Field(ge=2, description="real tokens in the vocabulary (V)")

    @property
    def window_tokens(self) -> int:
        """Tokens in a window, T."""
        return self.canvas_tokens * self.canvases_per_window
