"""Sizes and settings that all tests share."""

import pytest
import torch

from canvaslm.layout import Layout

torch.set_num_threads(1)  # tiny work on two threads waits for itself


@pytest.fixture
def tiny_layout() -> Layout:
    """Four canvases of four tokens over a vocabulary of 37."""
    return Layout(canvas_tokens=4, canvases_per_window=4, vocab_size=37)
