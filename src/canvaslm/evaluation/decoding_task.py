"""What are decoders asked to do: which held-out beginnings are continued, and how far?"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canvaslm.corpus.windows import Windows
from canvaslm.errors import InputError
from canvaslm.evaluation.decoders import Decoder
from canvaslm.layout import Layout
from canvaslm.model.backbone import Backbone
from canvaslm.randomness import stream
from canvaslm.sampling.request import Generated


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every decoder is given.

    Attributes:
        prompts: ids of each prompt.
        new_tokens: tokens asked for.
        batch_rows: prompts at once.
        seed: of the samples.
    """

    prompts: list[list[int]]
    new_tokens: int
    batch_rows: int
    seed: int

    def run(self, decoder: Decoder) -> list[Generated]:
        """Continue all prompts, batch after batch."""
        seeds = stream(self.seed, "rows").integers(2**31, size=len(self.prompts)).tolist()
        made: list[Generated] = []
        for first in range(0, len(self.prompts), self.batch_rows):
            rows = slice(first, first + self.batch_rows)
            made += decoder.generate(self.prompts[rows], self.new_tokens, seeds[rows])
        return made


def held_out_windows(shards: Path, layout: Layout, n_prompts: int, *, section: str) -> np.ndarray:
    """(n_prompts, T) windows at equal distances over the split ``val``.

    Args:
        shards: the folder of packed shards.
        layout: how long a window is.
        n_prompts: how many.
        section: of the params, whose ``n_prompts`` an error names.

    Raises:
        InputError: there are fewer windows.
    """
    held_out = Windows(shards, "val", layout.window_tokens)
    if len(held_out) < n_prompts:
        raise InputError(
            f"{shards}:val",
            expected=f"at least {n_prompts} windows of {layout.window_tokens} tokens",
            got=str(len(held_out)),
            fix=f"lower {section}.n_prompts or raise collect_documents.val_share",
        )
    return held_out.gather(np.arange(n_prompts) * len(held_out) // n_prompts)


def refuse_part_canvases(denoiser: Backbone, prompt_tokens: int, *, section: str) -> None:
    """Refuse prompts that a block mask cannot read, under the name of their knob.

    Raises:
        InputError: the clean stream is read by whole canvases, and a prompt is none.
    """
    canvas_tokens = denoiser.layout.canvas_tokens
    if denoiser.params.clean_mask == "block" and prompt_tokens % canvas_tokens:
        raise InputError(
            f"{section}.prompt_tokens",
            expected=f"a multiple of canvas_tokens, {canvas_tokens}, since clean_mask is block",
            got=str(prompt_tokens),
            fix=f"set it to a multiple of {canvas_tokens}, or train with clean_mask: causal",
        )


def texts_behind(
    windows: np.ndarray, *, prompt_tokens: int, new_tokens: int, eot_id: int
) -> list[list[int]]:
    """What people wrote behind the prompts, cut as samples are cut: before the end of text."""
    written = windows[:, prompt_tokens : prompt_tokens + new_tokens].tolist()
    return [ids[: ids.index(eot_id)] if eot_id in ids else ids for ids in written]
