"""Checkpoints that hold an average of their weights, and the same weights as trained ones."""

import json
from pathlib import Path

import torch

from canvaslm.checkpoint import load_trained_model, save_checkpoint
from canvaslm.checkpoint_state import read_state


@torch.no_grad()
def save_other_weights(source: Path, place: Path, *, as_average: bool) -> Path:
    """Copy a checkpoint, with a final norm of fifty: of its weights, or of their average alone."""
    model = load_trained_model(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    identity = json.loads((source / "state.json").read_text())["identity"]
    if as_average:
        identity["pretrain"]["ema_decay"] = 0.9
        for parameter in model.parameters():
            optimizer.state[parameter]["ema"] = parameter.detach().clone()
        optimizer.state[model.final_norm.weight]["ema"].fill_(50.0)
    else:
        model.final_norm.weight.fill_(50.0)
    return save_checkpoint(
        place,
        model=model,
        optimizer=optimizer,
        progress=read_state(source).progress,
        identity=identity,
        keep_last=None,
    )
