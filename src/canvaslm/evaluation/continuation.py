"""How is one prompt continued by hand, with whichever model a checkpoint holds?"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from canvaslm.checkpoint import load_model
from canvaslm.checkpoint_state import Identity, read_state
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.device import pick_device
from canvaslm.errors import InputError
from canvaslm.evaluation.decoders import EVIDENCES
from canvaslm.evaluation.rules import acceptance_named, stopping_named
from canvaslm.evaluation.speedup_params import GenerateParams
from canvaslm.model.backbone import Backbone
from canvaslm.sampling.autoregressive import AutoregressiveSampler
from canvaslm.sampling.drafting import Drafter
from canvaslm.sampling.request import Generated
from canvaslm.sampling.sampler import CanvasSampler, CanvasStep
from canvaslm.sampling.verified import VerifiedSampler

_log = logging.getLogger(__name__)

Pieces = list[tuple[str, bool]]
Show = Callable[[Pieces], None]


def unshown(pieces: Pieces) -> None:
    """Show nothing: the null object of ``show``."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt as it was read, the text behind it, and what making it took."""

    prompt: str
    text: str
    made: Generated


def continue_text(
    prompt: str,
    *,
    checkpoint: Path,
    tokenizer: Path,
    new_tokens: int | None,
    params: GenerateParams,
    show: Show = unshown,
) -> Continuation:
    """Continue a prompt: by canvases, or token by token where the checkpoint is the twin's.

    Args:
        prompt: any text, also none.
        checkpoint: one complete checkpoint.
        tokenizer: the tokenizer that it was trained with.
        new_tokens: tokens asked for; ``None`` goes on to the end of the trained window.
        params: rules, temperatures, seed.
        show: is given the text after each step, in pieces that are decided (``True``) or not; a
            twin's text, and one that is verified, is never shown before it is whole.

    Raises:
        InputError: the checkpoint is not whole, the tokenizer is another one, prompt and answer do
            not fit in the trained window, or there is no law that could verify drafts.
    """
    identity = read_state(checkpoint).identity
    text = matching_tokenizer(tokenizer, identity.data.tokenizer_sha256)
    model = load_model(checkpoint).to(pick_device(params.device))
    ids = _whole_canvases(text.encode(prompt).tolist(), model)
    if identity.objective == "autoregressive":
        sampler = AutoregressiveSampler(
            model=model,
            temperature=params.start_temperature,
            bos_id=text.eot_id,
            eot_id=text.eot_id,
        )
    elif params.mode == "verified":
        _refuse_without_companion(identity, checkpoint)
        sampler = _verified_sampler(model, params, eot_id=text.eot_id)
    else:
        view = _View(ids, text.decode, show)
        sampler = _canvas_sampler(model, params, eot_id=text.eot_id, on_step=view.draw)
    [made] = sampler.generate([ids], new_tokens, [params.seed])
    return Continuation(prompt=text.decode(ids), text=text.decode(made.ids), made=made)


def matching_tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Load a tokenizer that must be the one behind some shards or weights.

    Raises:
        InputError: it is another one, or no tokenizer.
    """
    tokenizer = Tokenizer.load(path)
    if tokenizer.sha256 != sha256:
        raise InputError(
            path,
            expected=f"the tokenizer of the data, sha256 {sha256}",
            got=tokenizer.sha256,
            fix="run `dvc repro` or name the right tokenizer",
        )
    return tokenizer


def _canvas_sampler(
    model: Backbone,
    params: GenerateParams,
    *,
    eot_id: int,
    on_step: Callable[[CanvasStep], None],
) -> CanvasSampler:
    """Put a sampler together from the rules that the section names."""
    return CanvasSampler(
        model=model,
        acceptance=acceptance_named(params.acceptance, params),
        stopping=stopping_named(params.stopping, params),
        denoise_steps=params.denoise_steps,
        start_temperature=params.start_temperature,
        end_temperature=params.end_temperature,
        eot_id=eot_id,
        vocab_chunk=params.vocab_chunk,
        evidence=EVIDENCES[params.evidence],
        on_step=on_step,
    )


def _verified_sampler(model: Backbone, params: GenerateParams, *, eot_id: int) -> VerifiedSampler:
    """Put a sampler together whose drafts are verified."""
    drafter = Drafter(
        model=model,
        acceptance=acceptance_named(params.acceptance, params),
        evidence=EVIDENCES[params.evidence],
        steps=params.draft_steps,
        temperature=params.draft_temperature,
        vocab_chunk=params.vocab_chunk,
    )
    return VerifiedSampler(
        drafter=drafter, temperature=params.start_temperature, bos_id=eot_id, eot_id=eot_id
    )


def _refuse_without_companion(identity: Identity, checkpoint: Path) -> None:
    """Raise where the clean stream was not trained to give the law that is to be followed."""
    if identity.diffusion is None or not identity.diffusion.learns_next_token:
        raise InputError(
            "params.yaml:generate.mode",
            expected="canvas: nothing verifies drafts of this checkpoint",
            got="verified",
            fix=f"set generate.mode: canvas, or name another checkpoint than {checkpoint}, whose "
            "clean stream was trained to predict the next token",
        )


def _whole_canvases(ids: list[int], model: Backbone) -> list[int]:
    """Cut the front of a prompt where the model reads clean tokens by whole canvases only."""
    excess = len(ids) % model.layout.canvas_tokens
    if model.params.clean_mask == "causal" or excess == 0:
        return ids
    _log.warning(
        "clean_mask is block, so a prompt is whole canvases of %d tokens: its first %d of %d "
        "tokens are not read",
        model.layout.canvas_tokens,
        excess,
        len(ids),
    )
    return ids[excess:]


class _View:
    """The text so far: prompt and finished canvases, then the canvas that is being denoised."""

    def __init__(self, ids: list[int], decode: Callable[[Iterable[int]], str], show: Show) -> None:
        self._finished = list(ids)
        self._decode = decode
        self._show = show

    def draw(self, state: CanvasStep) -> None:
        """Show one step of the only row."""
        tokens, accepted = state.tokens[0].tolist(), state.accepted[0].tolist()
        pieces = [(self._decode(self._finished), True)]
        start = 0
        for end in range(1, len(tokens) + 1):
            if end == len(tokens) or accepted[end] != accepted[start]:
                pieces.append((self._decode(tokens[start:end]), accepted[start]))
                start = end
        self._show(pieces)
        if bool(state.is_done[0]):
            self._finished += tokens
