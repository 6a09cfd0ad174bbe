"""Shapes of networks that tests share: one small enough to train, and the one of production.

With them what a small network is trained on.
"""

from typing import Any

from canvaslm.diffusion.schedule import DiffusionParams
from canvaslm.model.shape import ModelParams

PRODUCTION = ModelParams(
    width=1024,
    n_layers=24,
    n_heads=16,
    n_kv_heads=4,
    head_width=64,
    ffn_width=3072,
    time_width=256,
    bias=True,
    qk_norm=False,
    rope_base=10000.0,
    norm_eps=1e-5,
    self_conditioning="output",
    self_conditioning_form="linear",
    likelihood_bias=False,
    noisy_input="own",
    token_shift=False,
    tilt=0.0,
    tied=True,
    clean_mask="causal",
    vocab_multiple=1,
)
# What is otherwise under AdamW, where the noisy stream reads its own token and is shown a guess:
# the values, by section, of a recipe that the default one is not.
PLAIN: dict[str, dict[str, Any]] = {
    "model": {
        "self_conditioning": "output",
        "likelihood_bias": False,
        "noisy_input": "own",
        "token_shift": False,
        "tilt": 0.0,
    },
    "diffusion": {"next_token_weight": 0.0},
    "pretrain": {"optimizer": "adamw"},
}
_TINY = {
    "width": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_width": 4,
    "ffn_width": 24,
    "time_width": 8,
    "vocab_multiple": 8,
}


def tiny_shape(**changes: Any) -> ModelParams:
    """Two layers of width 16, else as in production; with what a test needs otherwise."""
    return ModelParams.model_validate(PRODUCTION.model_dump() | _TINY | changes)


def tiny_diffusion(**changes: Any) -> DiffusionParams:
    """Four times, clean context, half of the windows with a guess; with what a test changes."""
    plain = {
        "train_times": 4,
        "time_draw": "uniform",
        "context": "clean",
        "loss": "plain",
        "next_token_weight": 0.0,
        "first_phase": "none",
        "first_phase_share": 0.0,
        "self_conditioning_share": 0.5,
    }
    return DiffusionParams.model_validate(plain | changes)
