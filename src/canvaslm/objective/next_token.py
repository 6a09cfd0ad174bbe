"""What does the autoregressive twin predict?

Each token of a window from the tokens before it. The twin reads the end-of-text token and then all
but the last token of the window, and predicts the whole window: T inputs, T targets. So it scores
exactly the tokens that the denoiser scores, the first one included, and nothing more.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvaslm.layout import Layout
from canvaslm.loss import Reduction, chunked_cross_entropy
from canvaslm.measure import stream_flops
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from canvaslm.objective.targets import LossSum


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """Next-token prediction over whole windows.

    Args:
        layout: the window's length and the vocabulary.
        eot_id: the end-of-text id, which stands before the first token of each window.
        vocab_chunk: vocabulary entries whose logits exist at one time; changes no value.
    """

    layout: Layout
    eot_id: int
    vocab_chunk: int

    def loss(self, model: Backbone, windows: Tensor, numbers: np.ndarray) -> LossSum:
        """Nats of all tokens of windows (B, T); the numbers draw nothing here."""
        del numbers
        return LossSum(nats=self._nats(model, windows, reduction="sum"), n_targets=windows.numel())

    @torch.no_grad()
    def nats(self, model: Backbone, windows: Tensor) -> Tensor:
        """Nats of each token, (B, T), given the tokens of its window before it."""
        return self._nats(model, windows, reduction="none")

    def hidden(self, model: Backbone, windows: Tensor) -> Tensor:
        """(B, T, D) the hidden states from which each token of windows (B, T) is predicted."""
        start = torch.full_like(windows[:, :1], self.eot_id)
        return model.encode(torch.cat([start, windows[:, :-1]], dim=1)).hidden

    def flops_of_first(self, params: ModelParams, n_windows: int) -> float:
        """Floating-point operations, forward and backward, of the first windows of a run.

        Args:
            params: the shape of the network.
            n_windows: how many, from the first.
        """
        tokens = self.layout.window_tokens
        forward = stream_flops(
            params,
            tokens=tokens,
            mean_keys=(tokens + 1) / 2,
            scored_tokens=tokens,
            vocab_size=self.layout.vocab_size,
        )
        return n_windows * (3 * forward)

    def _nats(self, model: Backbone, windows: Tensor, *, reduction: Reduction) -> Tensor:
        """Cross-entropy of windows (B, T) under the shifted input."""
        hidden = self.hidden(model, windows)
        return chunked_cross_entropy(
            hidden, model.head_weight, windows, vocab_chunk=self.vocab_chunk, reduction=reduction
        )
