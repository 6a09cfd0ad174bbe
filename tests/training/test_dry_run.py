"""Does a rehearsal do everything once, touch nothing, and count what it cannot hold?"""

from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.training import memory
from canvaslm.training.dry_run import dry_run


@pytest.mark.parametrize("kind", ["diffusion", "autoregressive"])
def test_two_steps_are_trained_saved_and_loaded_without_a_trace(
    tiny_recipe, shards, tmp_path, kind
):
    before = sorted(tmp_path.rglob("*"))
    told = dry_run(tiny_recipe(kind), shards=shards, code_digest="c")
    assert "2 steps trained, saved and loaded" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_the_production_shape_is_counted_without_memory_or_shards(tiny_recipe, monkeypatch):
    """343,516,160 parameters exactly; its shards need not exist."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**32)
    production = tiny_recipe(
        layout=Layout(canvas_tokens=256, canvases_per_window=16, vocab_size=50_257),
        model={
            "width": 1024,
            "n_layers": 24,
            "n_heads": 16,
            "n_kv_heads": 4,
            "head_width": 64,
            "ffn_width": 3072,
            "time_width": 256,
            "vocab_multiple": 1,
        },
    )
    told = dry_run(production, shards=Path("absent"), code_digest="c")
    assert told.startswith("343,516,160 parameters, estimated peak ")
    assert "not run here: params.yaml:pretrain: expected a run that fits into the 4.00 GiB" in told


def test_a_run_that_fits_needs_its_shards(tiny_recipe, tmp_path):
    with pytest.raises(InputError, match=r"manifest\.json"):
        dry_run(tiny_recipe(), shards=tmp_path, code_digest="c")
