"""What was asked of a sampler, and what came back?

All samplers share this contract: prompts of any lengths, one seed for each, and a number of
tokens that is met exactly unless the text ends before. Prompt and answer together fit in the
window that the model was trained on; nobody knows what it does beyond.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.kv_cache import KVCache

Reason = Literal["end_of_text", "length", "window", "not_finite"]
Prompts = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What one prompt was answered with, and what it took.

    Attributes:
        ids: the generated ids, without the prompt and without the end-of-text token.
        reason: why it ended: the model said so, the asked number was reached, the trained window
            was full (no number was asked for), or the model's numbers stopped being finite; then
            ``ids`` holds what was finished before.
        forwards: passes through the network that this row took part in.
        prefill_forwards: those of them that read the prompt.
        encoding_forwards: those of them that wrote to the cache, the prompt's included.
        token_forwards: positions of this row that went through the network, over all forwards.
        canvases: canvases denoised; 0 where text is made token by token.
        verifications: forwards that verified drafted tokens; 0 where nothing is drafted.
        accepted: drafted tokens that passed and are part of ``ids``.
    """

    ids: list[int]
    reason: Reason
    forwards: int
    prefill_forwards: int
    encoding_forwards: int
    token_forwards: int
    canvases: int
    verifications: int
    accepted: int


@dataclass(kw_only=True)
class Row:
    """One prompt's answer while it is being made."""

    number: int
    seed: int
    ids: list[int] = field(default_factory=list)
    reason: Reason | None = None
    forwards: int = 0
    prefill_forwards: int = 0
    encoding_forwards: int = 0
    canvases: int = 0
    token_forwards: int = 0
    verifications: int = 0
    accepted: int = 0

    def count_forward(self, tokens: int) -> None:
        """Note one forward over ``tokens`` positions."""
        self.forwards += 1
        self.token_forwards += tokens

    def count_encoding(self, tokens: int) -> None:
        """Note one forward that writes ``tokens`` positions to the cache."""
        self.count_forward(tokens)
        self.encoding_forwards += 1

    def count_prefill(self, tokens: int) -> None:
        """Note the forward that reads the prompt."""
        self.count_encoding(tokens)
        self.prefill_forwards += 1

    def extend(self, ids: list[int], *, eot_id: int | None, limit: "Limit") -> None:
        """Take over new ids up to the end of the text or of what was asked for."""
        wanted = ids[: limit.n_tokens - len(self.ids)]
        if eot_id in wanted:
            self.ids += wanted[: wanted.index(eot_id)]
            self.reason = "end_of_text"
            return
        self.ids += wanted
        if len(self.ids) == limit.n_tokens:
            self.reason = limit.reason

    def result(self) -> Generated:
        """Close the row."""
        assert self.reason is not None, self
        return Generated(
            ids=self.ids,
            reason=self.reason,
            forwards=self.forwards,
            prefill_forwards=self.prefill_forwards,
            encoding_forwards=self.encoding_forwards,
            token_forwards=self.token_forwards,
            canvases=self.canvases,
            verifications=self.verifications,
            accepted=self.accepted,
        )


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How many tokens a prompt may be answered with, and what to call it when they are reached."""

    n_tokens: int
    reason: Literal["length", "window"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows whose prompts have one length, which go through the network together.

    Attributes:
        rows: in the caller's order.
        prompts: (B, P) int64 on the CPU.
        limit: how far to go.
    """

    rows: list[Row]
    prompts: Tensor
    limit: Limit


def group_request(
    prompt_ids: Prompts, max_new_tokens: int | None, seeds: Sequence[int], *, layout: Layout
) -> list[Group]:
    """Check a request and sort its rows by the length of their prompts.

    Args:
        prompt_ids: a list of lists of ids, or one (B, P) integer tensor; a prompt may be empty.
        max_new_tokens: tokens asked for; ``None`` goes on to the end of the trained window.
        seeds: one for each prompt.
        layout: what the model was trained on.

    Raises:
        InputError: an id is not in the vocabulary, the seeds are not as many as the prompts, or a
            prompt and its answer do not fit in the trained window.
    """
    prompts = [[int(token) for token in prompt] for prompt in prompt_ids]
    if len(seeds) != len(prompts):
        raise InputError(
            "seeds",
            expected=f"one for each of {len(prompts)} prompts",
            got=str(len(seeds)),
            fix="give each prompt its own seed",
        )
    if max_new_tokens is not None and max_new_tokens < 0:
        raise InputError(
            "max_new_tokens", expected="0 or more", got=str(max_new_tokens), fix="ask for more"
        )
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        _check_ids(prompt, number, layout.vocab_size)
        by_length.setdefault(len(prompt), []).append(number)
    return [
        Group(
            rows=[Row(number=number, seed=seeds[number]) for number in numbers],
            prompts=torch.tensor([prompts[number] for number in numbers], dtype=torch.int64),
            limit=_limit(
                length, max_new_tokens, layout.window_tokens, where=f"prompt {numbers[0]}"
            ),
        )
        for length, numbers in by_length.items()
    ]


def answer_groups(groups: list[Group], answer: Callable[[Group], None]) -> list[Generated]:
    """Have every group answered, without gradient, and return the answers in the caller's order.

    Args:
        groups: of one request.
        answer: fills the rows of a group that is asked for at least one token.
    """
    with torch.inference_mode():
        for group in groups:
            if group.limit.n_tokens:
                answer(group)
                continue
            for row in group.rows:
                row.reason = group.limit.reason
    rows = sorted((row for group in groups for row in group.rows), key=lambda row: row.number)
    return [row.result() for row in rows]


def keep_live(
    rows: list[Row], cache: KVCache, *theirs: Tensor
) -> tuple[list[Row], *tuple[Tensor, ...]]:
    """Let rows whose text has ended leave the batch and the cache.

    Args:
        rows: B rows.
        cache: theirs; it is left alone where no row goes on.
        theirs: what is theirs besides, each (B, ...).

    Returns:
        The rows that go on, and what is theirs.
    """
    places = [place for place, row in enumerate(rows) if row.reason is None]
    if len(places) == len(rows):
        return rows, *theirs
    if places:
        chosen = torch.tensor(places, device=theirs[0].device)
        cache.keep_rows(chosen)
        theirs = tuple(tensor[chosen] for tensor in theirs)
    return [rows[place] for place in places], *theirs


def _check_ids(prompt: list[int], number: int, vocab_size: int) -> None:
    for position, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"prompt {number}, position {position}",
                expected=f"an id in 0..{vocab_size - 1}",
                got=str(token),
                fix="encode the prompt with the tokenizer that the model was trained with",
            )


def _limit(prompt_tokens: int, asked: int | None, window_tokens: int, *, where: str) -> Limit:
    """Turn a wish into a number of tokens, and refuse to leave the trained window."""
    room = window_tokens - prompt_tokens
    if room < 0 or (asked or 0) > room:
        wish = "" if asked is None else f" and {asked} new"
        raise InputError(
            where,
            expected=f"prompt and answer within the trained window of {window_tokens} tokens",
            got=f"{prompt_tokens} prompt tokens{wish}",
            fix="shorten the prompt or ask for fewer tokens",
        )
    if asked is None:
        return Limit(n_tokens=room, reason="window")
    return Limit(n_tokens=asked, reason="length")
