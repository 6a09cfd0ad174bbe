"""Checkpoints of a tiny model to save, read and break."""

import torch
from torch import Tensor

import canvaslm.checkpoint as room
from canvaslm.checkpoint import (
    save_checkpoint,
)
from canvaslm.checkpoint_state import Progress, SkippedStep
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone, initialise
from shapes import tiny_diffusion, tiny_shape

LAYOUT = Layout(canvas_tokens=4, canvases_per_window=4, vocab_size=37)


MODEL = tiny_shape()


IDENTITY = {
    "objective": "diffusion",
    "model": MODEL.model_dump(),
    "layout": LAYOUT.model_dump(),
    "diffusion": tiny_diffusion().model_dump(),
    "pretrain": {
        "steps": 10**9,
        "windows_per_step": 4,
        "learning_rate": 0.01,
        "ema_decay": 0.0,
    },
    "data": {"manifest_sha256": "m", "tokenizer_sha256": "t", "eot_id": 0, "shards": {}},
    "code": "c",
    "parent": None,
}


SKIPPED = SkippedStep(step=2, first_window=8, last_window=11, cause="loss is nan")


FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def make_pair(seed: int = 1):
    """A model and its AdamW after two steps on made-up gradients."""
    model = Backbone(MODEL, LAYOUT)
    initialise(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def latest_complete(root):
    return room.latest_complete(root, identity=IDENTITY)


def save(root, pair, step=4, keep_last=None, identity=IDENTITY, **options):
    progress = Progress(
        step=step,
        windows_consumed=4 * step,
        tokens=64 * step,
        flops=0.1 * step,
        skipped=(SKIPPED,) if step > SKIPPED.step else (),
        rollbacks=(),
        log_sha256="",
    )
    model, optimizer = pair
    directory = save_checkpoint(
        root,
        model=model,
        optimizer=optimizer,
        progress=progress,
        identity=identity,
        keep_last=keep_last,
        **options,
    )
    return directory, progress


def tensors_of(model, optimizer) -> dict[str, Tensor]:
    named = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        named |= {f"{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    return named


def contents(directory):
    return {name: (directory / name).read_bytes() for name in FILES}


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
