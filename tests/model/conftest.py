"""A network of two small blocks in float64, with every weight away from zero."""

from collections.abc import Callable

import pytest
import torch

from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams
from shapes import tiny_shape

TINY = tiny_shape(width=24, head_width=6, ffn_width=40, rope_base=100.0, vocab_multiple=1)

BuildModel = Callable[..., Backbone]


@pytest.fixture
def tiny_params() -> ModelParams:
    return TINY


@pytest.fixture
def build_model(tiny_layout: Layout) -> BuildModel:
    """``build_model(clean_mask="block")``: the tiny network with some params changed."""

    def build(**changes: object) -> Backbone:
        params = ModelParams.model_validate({**TINY.model_dump(), **changes})
        model = Backbone(params, tiny_layout).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise * 0.3 + (parameter.ndim == 1))
        return model

    return build


class Batch:
    """Three rows of clean and noisy tokens, their times, and a guess for all rows but one."""

    def __init__(self, layout: Layout) -> None:
        generator = torch.Generator().manual_seed(2)
        shape = (3, layout.window_tokens)
        self.clean = torch.randint(layout.vocab_size, shape, generator=generator)
        self.noisy = torch.randint(layout.vocab_size, shape, generator=generator)
        steps = torch.randint(1, 17, (3, layout.canvases_per_window), generator=generator)
        self.times = steps.double() / 16
        self.guess = torch.randn(*shape, TINY.width, generator=generator, dtype=torch.float64)
        self.has_guess = torch.tensor([True, False, True])


@pytest.fixture
def batch(tiny_layout: Layout) -> Batch:
    return Batch(tiny_layout)
