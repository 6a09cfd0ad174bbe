"""How large is the network?"""

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.model.shape import ModelParams, count_parameters
from shapes import PRODUCTION

PRODUCTION_LAYOUT = Layout(canvas_tokens=256, canvases_per_window=16, vocab_size=50257)


def held_parameters(model: Backbone) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_production_shape_has_343516160_parameters() -> None:
    with torch.device("meta"):
        model = Backbone(PRODUCTION, PRODUCTION_LAYOUT)
    assert held_parameters(model) == 343_516_160
    assert count_parameters(PRODUCTION, PRODUCTION_LAYOUT) == 343_516_160


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": False},
        {"qk_norm": True},
        {"time_width": 0},
        {"self_conditioning": "off"},
        {"self_conditioning": "input", "bias": False},
        {"self_conditioning_form": "gated"},
        {"self_conditioning": "input", "self_conditioning_form": "gated", "bias": False},
        {"tied": False},
        {"token_shift": True},
        {"noisy_input": "previous", "likelihood_bias": True},
        {"vocab_multiple": 64},
        {"n_kv_heads": 4, "n_layers": 3},
    ],
)
def test_closed_form_counts_what_the_network_holds(
    changes: dict[str, object], tiny_params: ModelParams, tiny_layout: Layout
) -> None:
    params = ModelParams.model_validate({**tiny_params.model_dump(), **changes})
    assert count_parameters(params, tiny_layout) == held_parameters(Backbone(params, tiny_layout))
    assert count_parameters(params, tiny_layout) != count_parameters(tiny_params, tiny_layout)


def test_twin_differs_only_in_time_guess_and_mask(tiny_params: ModelParams) -> None:
    changes = {
        "clean_mask": "block",
        "self_conditioning_form": "gated",
        "likelihood_bias": True,
        "noisy_input": "previous",
    }
    params = tiny_params.model_copy(update=changes)
    twin = params.twin()
    assert (twin.time_width, twin.self_conditioning, twin.clean_mask) == (0, "off", "causal")
    rest = {"time_width", "self_conditioning", "self_conditioning_form", "clean_mask"}
    rest |= {"likelihood_bias", "noisy_input"}
    assert not twin.likelihood_bias
    assert twin.noisy_input == "own"
    assert twin.model_dump(exclude=rest) == params.model_dump(exclude=rest)


def test_query_heads_that_do_not_share_evenly_are_refused(tiny_params: ModelParams) -> None:
    with pytest.raises(ValidationError, match="n_heads to be a multiple of n_kv_heads"):
        ModelParams.model_validate({**tiny_params.model_dump(), "n_kv_heads": 3})


def test_counting_parameters_needs_no_torch() -> None:
    code = "import sys, canvaslm.model.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noisy_input": "previous"}, "likelihood_bias true"),
        (
            {"noisy_input": "previous", "likelihood_bias": True, "clean_mask": "block"},
            "clean_mask causal",
        ),
    ],
)
def test_a_stream_that_reads_the_previous_token_needs_the_evidence_and_a_causal_context(
    changes: dict[str, object], said: str, tiny_params: ModelParams
) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelParams.model_validate(tiny_params.model_dump() | changes)
