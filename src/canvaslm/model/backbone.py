"""How do token ids become hidden states, in the clean stream and in the noisy one?

``encode`` reads clean tokens at time 0 and leaves their keys and values; ``denoise`` reads noisy
canvases against them. The autoregressive twin is ``encode`` and nothing else. Under
``noisy_input: previous`` the noisy stream, too, reads at each place the token before the one that
it predicts there, and stands at that token's position: what the clean stream has learned of the
next token then holds in it (the shift of Gong et al. 2025, arXiv 2410.17891).
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from canvaslm.device import wide
from canvaslm.diffusion.schedule import position_times
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.model.attention import (
    block_causal_attention,
    canvas_attention,
    causal_attention,
    full_attention,
)
from canvaslm.model.kv_cache import CleanContext, Context, Encoded, KVCache
from canvaslm.model.layers import Block, RMSNorm, Rotation, TimeEmbedding
from canvaslm.model.packed import PackedBackbone
from canvaslm.model.self_conditioning import SelfConditioning
from canvaslm.model.shape import ModelParams
from canvaslm.randomness import stream
from canvaslm.scores import soft_embedding

_INIT_STD = 0.02  # Radford et al. 2019 (GPT-2)

_AttendLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]
_Keep = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class Backbone(nn.Module):
    """A transformer over a window of canvases, with a head that is its token table or its own.

    Args:
        params: the shape of the network.
        layout: canvas length and vocabulary.

    Attributes:
        entrance: what every forward passes once, with the (B, S, D) that goes into the first block.
        token_shift: (D, D), through which a token hears of the one before it; None without.
        opening: (D,), what a noisy stream under ``noisy_input: previous`` reads where no token
            stands before; None under ``own``.
        checkpoint_blocks: keep only the input of each block for the backward pass and compute the
            rest again; changes memory and time, never a value.
    """

    def __init__(self, params: ModelParams, layout: Layout) -> None:
        super().__init__()
        self.params = params
        self.layout = layout
        self.checkpoint_blocks = False
        self.embedding = nn.Embedding(params.table_rows(layout.vocab_size), params.width)
        self.time_embedding = TimeEmbedding(params) if params.time_width else None
        self.self_conditioning = None
        if params.self_conditioning != "off":
            self.self_conditioning = SelfConditioning(
                params.width, bias=params.bias, gated=params.self_conditioning_form == "gated"
            )
        self.entrance = nn.Identity()
        self.token_shift = None
        if params.token_shift:
            self.token_shift = nn.Linear(params.width, params.width, bias=False)
        self.opening = None
        if params.noisy_input == "previous":
            self.opening = nn.Parameter(torch.empty(params.width))
        self.blocks = nn.ModuleList(Block(params) for _ in range(params.n_layers))
        self.final_norm = RMSNorm(params.width, params.norm_eps)
        self.head = None
        if not params.tied:
            self.head = nn.Linear(params.width, layout.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The head (V, D): the table itself where it is tied, else a matrix of its own."""
        return self.table if self.head is None else self.head.weight

    @property
    def table(self) -> Tensor:
        """The token table (V, D): the rows of real tokens, never the padding below them."""
        return self.embedding.weight[: self.layout.vocab_size]

    def encode(self, ids: Tensor, *, cache: KVCache | None = None) -> Encoded:
        """Read clean tokens at time 0 under ``clean_mask``.

        Args:
            ids: (B, S) int64. Without a cache they stand at positions 0..S-1 and the result is
                differentiable.
            cache: a prefix that the tokens continue. They attend to it and to themselves, their
                keys and values are appended to it, and nothing is differentiable.

        Raises:
            InputError: ``clean_mask`` is ``block`` and the tokens, or the prefix, are not whole
                canvases.
        """
        start, keep = self._open(cache, ids.shape[1])
        if cache is None:
            return self._encode(self._embed(ids, None), ids, start, keep)
        with torch.no_grad():
            encoded = self._encode(self._embed(ids, cache), ids, start, keep, cache.pack(self))
        cache.advance(ids)
        return encoded

    def encode_context(self, ids: Tensor, *, cache: KVCache | None = None) -> Context:
        """Read clean tokens for their keys and values alone; :meth:`encode` without ``hidden``.

        What the last block makes beyond its keys and values is not computed: noisy canvases never
        read it. Arguments and refusals are those of :meth:`encode`.
        """
        start, keep = self._open(cache, ids.shape[1])
        if cache is None:
            return self._encode_context(self._embed(ids, None), ids, start, keep)
        with torch.no_grad():
            x = self._embed(ids, cache)
            context = self._encode_context(x, ids, start, keep, cache.pack(self))
        cache.advance(ids)
        return context

    def denoise(
        self,
        noisy: Tensor,
        times: Tensor | None,
        *,
        context: CleanContext,
        guess: Tensor | None,
        has_guess: Tensor | None,
    ) -> Tensor:
        """Hidden states (B, S, D) of noisy canvases, each seeing the clean tokens before it.

        Args:
            noisy: (B, S) int64, whole canvases, at positions ``context.start + arange(S)``.
            times: (B, S/L) float in [0, 1], t/N of each canvas; ignored without a time input.
            context: clean keys and values; canvas b reads the first ``context.start + b·L``. Behind
                a cache there is one canvas, and nothing is differentiable.
            guess: (B, S, D) from :meth:`soft_embedding`, or None.
            has_guess: (B,) bool, which rows have a guess; None: all rows of ``guess``.
        """
        if isinstance(context, KVCache):
            return self._denoise_behind(context, noisy, times, guess, has_guess)
        L = self.layout.canvas_tokens

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            clean_k, clean_v = context.keys_values(layer)
            return canvas_attention(q, k, v, clean_k, clean_v, canvas_tokens=L, start=context.start)

        x = self._embed_noisy(noisy, times, context)
        return self._denoise(x, guess, has_guess, self._places(context, noisy), attend)

    @torch.no_grad()
    def encode_and_denoise(
        self, ids: Tensor, noisy: Tensor, times: Tensor | None, *, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """:meth:`encode` a few tokens and :meth:`denoise` the canvas behind them, in one forward.

        The canvas sees the tokens, which see nothing of it; their keys and values are appended to
        the cache, and its own are not. The canvas is shown no guess.

        Args:
            ids: (B, S) int64, clean tokens that continue the cache.
            noisy: (B, L) int64, one canvas behind them.
            times: (B, 1) float in [0, 1]; ignored without a time input.
            cache: a prefix.

        Returns:
            Hidden states of the tokens (B, S, D) and of the canvas (B, L, D).

        Raises:
            InputError: as :meth:`encode`.
        """
        S, L = ids.shape[1], self.layout.canvas_tokens
        assert noisy.shape[1] == L, "behind a cache there is one canvas"
        self._open(cache, S)
        start, back = cache.start, self._back
        lead = self._lead(cache)
        read = self._shift(self.embedding(torch.cat((lead, ids, noisy[:, : L - back]), dim=1)))
        x = torch.cat((read[:, lead.shape[1] :][:, :S], read[:, -L:]), dim=1)
        places = [range(start, start + S + L)]
        if back:
            places = [range(start, start + S), range(start + S - 1, start + S - 1 + L)]
        if self.time_embedding is not None:
            assert times is not None, "a network with a time input needs times"
            each = self._position_times(times) if self.params.tilt else times
            embedded = self.time_embedding(torch.cat((torch.zeros_like(times), each), dim=1))
            clean_time, canvas_time = embedded[:, :1], embedded[:, 1:]
            x = x + torch.cat((clean_time.expand(-1, S, -1), canvas_time.expand(-1, L, -1)), dim=1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.append(layer, k, v)
            seen = self._attend_clean(q[:, :, :S], keys[:, :, :-L], values[:, :, :-L])
            return torch.cat((seen, full_attention(q[:, :, S:], keys, values)), dim=2)

        packed = cache.pack(self)
        run = functools.partial(self._run, blocks=self.blocks) if packed is None else packed.run
        hidden = self.final_norm(run(self.entrance(x), places, attend)[0])
        cache.advance(ids)
        return hidden[:, :S], hidden[:, S:]

    def denoise_one_stream(
        self,
        noisy: Tensor,
        times: Tensor | None,
        *,
        guess: Tensor | None,
        has_guess: Tensor | None,
    ) -> Tensor:
        """Hidden states (B, S, D) where each canvas sees the given stream itself, block-causally.

        Args:
            noisy: (B, S) int64, whole canvases from position 0; clean ones have time 0.
            times: (B, S/L) float in [0, 1].
            guess: as in :meth:`denoise`.
            has_guess: as in :meth:`denoise`.
        """
        L = self.layout.canvas_tokens

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return block_causal_attention(q, k, v, canvas_tokens=L)

        assert self.opening is None, "one stream is block-causal and reads its own tokens"
        x = self._add_times(self._shift(self.embedding(noisy)), times)
        return self._denoise(x, guess, has_guess, [range(noisy.shape[1])], attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Posterior logits (..., V) of hidden states (..., D)."""
        return functional.linear(hidden, self.head_weight)

    def soft_embedding(self, hidden: Tensor, *, vocab_chunk: int) -> Tensor:
        """``softmax(logits) @ table``, as (B, S, D), without a table of all logits.

        Nothing is differentiable (:func:`canvaslm.scores.soft_embedding`).
        """
        table = None if self.head is None else self.table
        return soft_embedding(hidden, self.head_weight, table, vocab_chunk=vocab_chunk).vectors

    @property
    def _back(self) -> int:
        """How many places before the token that it predicts the noisy stream reads: 0 or 1."""
        return int(self.params.noisy_input == "previous")

    @torch.no_grad()
    def _denoise_behind(
        self,
        cache: KVCache,
        noisy: Tensor,
        times: Tensor | None,
        guess: Tensor | None,
        has_guess: Tensor | None,
    ) -> Tensor:
        """:meth:`denoise` of the one canvas behind a cached prefix: its keys lie there as well."""
        assert noisy.shape[1] == self.layout.canvas_tokens, "behind a cache there is one canvas"

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return full_attention(q, *cache.append(layer, k, v))

        packed = cache.pack(self)
        x = self._embed_noisy(noisy, times, cache)
        return self._denoise(x, guess, has_guess, self._places(cache, noisy), attend, packed)

    def _open(self, cache: KVCache | None, n_tokens: int) -> tuple[int, _Keep]:
        """Where clean tokens begin, and what becomes of their keys and values in a layer."""
        start = 0 if cache is None else cache.length
        self._refuse_part_of_a_canvas(start, n_tokens)
        return start, _as_they_are if cache is None else cache.append

    def _encode(
        self, x: Tensor, ids: Tensor, start: int, keep: _Keep, packed: PackedBackbone | None = None
    ) -> Encoded:
        attend = functools.partial(self._attend_kept, keep)
        run = functools.partial(self._run, blocks=self.blocks) if packed is None else packed.run
        places = [range(start, start + ids.shape[1])]
        x, keys, values = run(self.entrance(x), places, attend)
        return Encoded(ids=ids, hidden=self.final_norm(x), keys=keys, values=values)

    def _encode_context(
        self, x: Tensor, ids: Tensor, start: int, keep: _Keep, packed: PackedBackbone | None = None
    ) -> Context:
        attend = functools.partial(self._attend_kept, keep)
        x, places = self.entrance(x), [range(start, start + ids.shape[1])]
        if packed is not None:
            keys, values = packed.run_to_keys(x, places, attend, keep)
            return Context(ids=ids, keys=keys, values=values)
        last = len(self.blocks) - 1
        x, keys, values = self._run(x, places, attend, self.blocks[:last])
        block = self.blocks[last]
        assert isinstance(block, Block)
        k, v = block.keys_values(x, self._rotation(places, x))
        keep(last, k, v)
        return Context(ids=ids, keys=(*keys, k), values=(*values, v))

    def _embed(self, ids: Tensor, cache: KVCache | None) -> Tensor:
        """Clean tokens (B, S), behind a cache or none, as (B, S, D), at time 0."""
        lead = ids[:, :0] if cache is None else self._lead(cache)
        x = self._shift(self.embedding(torch.cat((lead, ids), dim=1)))[:, lead.shape[1] :]
        if self.time_embedding is None:
            return x
        return x + self.time_embedding(x.new_zeros(1, 1))

    def _embed_noisy(self, noisy: Tensor, times: Tensor | None, context: CleanContext) -> Tensor:
        """Noisy canvases (B, S) behind a clean context as (B, S, D)."""
        start, L, back = context.start, self.layout.canvas_tokens, self._back
        n_lead = back + (self.token_shift is not None)
        if n_lead == 0:
            return self._add_times(self.embedding(noisy), times)
        # Each canvas with the clean tokens before it, of which there are none where a text begins.
        firsts = range(start, start + noisy.shape[1], L)
        places = [place for first in firsts for place in range(first - n_lead, first)]
        n_none = sum(place < 0 for place in places)
        lead = context.ids_at(places[n_none:])
        lead = torch.cat((noisy.new_zeros(len(noisy), n_none), lead), dim=1)
        text = torch.cat((lead.unflatten(1, (-1, n_lead)), noisy.unflatten(1, (-1, L))), dim=2)
        x: Tensor = self.embedding(text)  # (B, C, n_lead + L, D)
        if n_none:
            is_token = torch.ones(len(firsts), n_lead + L, 1, dtype=x.dtype, device=x.device)
            is_token[:, :n_lead] = torch.tensor(places).reshape(-1, n_lead, 1) >= 0
            x = x * is_token
        x = self._shift(x)[:, :, n_lead - back :][:, :, :L].flatten(1, 2)
        if self.opening is not None and start == 0:
            x = torch.cat((self.opening.to(x.dtype).expand(len(x), 1, -1), x[:, 1:]), dim=1)
        return self._add_times(x, times)

    def _shift(self, x: Tensor) -> Tensor:
        """Tokens (..., S, D), each with what the one before it in the text brings along."""
        if self.token_shift is None:
            return x
        brought = self.token_shift(x[..., :-1, :])
        return torch.cat((x[..., :1, :], x[..., 1:, :] + brought), dim=-2)

    def _lead(self, cache: KVCache) -> Tensor:
        """(B, 0 or 1), the cached token that the next one has to know of."""
        reach = min(cache.length, int(self.token_shift is not None))
        return cache.ids_at(range(cache.length - reach, cache.length))

    def _add_times(self, x: Tensor, times: Tensor | None) -> Tensor:
        """Canvases (B, S, D) with their times (B, S/L)."""
        if self.time_embedding is None:
            return x
        assert times is not None, "a network with a time input needs times"
        if self.params.tilt:
            return x + self.time_embedding(self._position_times(times))
        embedded = self.time_embedding(times)  # (B, C, D)
        return x + embedded.repeat_interleave(self.layout.canvas_tokens, dim=1)

    def _position_times(self, times: Tensor) -> Tensor:
        """Times (B, C) in [0, 1] of canvases, as those (B, C·L) of their positions."""
        L = self.layout.canvas_tokens
        return position_times(times, canvas_tokens=L, n_times=1, tilt=self.params.tilt)

    def _places(self, context: CleanContext, noisy: Tensor) -> list[range]:
        """Where noisy canvases stand: at their tokens, or at those that they read."""
        start = context.start - self._back
        return [range(start, start + noisy.shape[1])]

    def _denoise(
        self,
        x: Tensor,
        guess: Tensor | None,
        has_guess: Tensor | None,
        places: Sequence[range],
        attend: _AttendLayer,
        packed: PackedBackbone | None = None,
    ) -> Tensor:
        addition = None
        if guess is not None:
            assert self.self_conditioning is not None, "this network takes no guess"
            addition = self.self_conditioning(guess, has_guess)
        if addition is not None and self.params.self_conditioning == "input":
            x = x + addition
        run = functools.partial(self._run, blocks=self.blocks) if packed is None else packed.run
        hidden = self.final_norm(run(self.entrance(x), places, attend)[0])
        if addition is not None and self.params.self_conditioning == "output":
            hidden = hidden + addition
        return hidden

    def _run(
        self,
        x: Tensor,
        places: Sequence[range],
        attend: _AttendLayer,
        blocks: Iterable[nn.Module],
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Send x (B, S, D) through the first blocks; return it and the keys and values of each."""
        rotation = self._rotation(places, x)
        keys, values = [], []
        for layer, block in enumerate(blocks):
            arguments = (x, rotation, functools.partial(attend, layer))
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x, k, v = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, k, v = block(*arguments)
            keys.append(k)
            values.append(v)
        return x, tuple(keys), tuple(values)

    def _rotation(self, places: Sequence[range], x: Tensor) -> Rotation:
        """The positions of tokens x (B, S, D)."""
        dtype = wide(self.embedding.weight.dtype)
        return Rotation(places, self.params, dtype=dtype, device=x.device)

    def _attend_kept(self, keep: _Keep, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend_clean(q, *keep(layer, k, v))

    def _attend_clean(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.params.clean_mask == "block":
            return block_causal_attention(q, k, v, canvas_tokens=self.layout.canvas_tokens)
        return causal_attention(q, k, v)

    def _refuse_part_of_a_canvas(self, start: int, n_tokens: int) -> None:
        L = self.layout.canvas_tokens
        if self.params.clean_mask == "block" and (start % L or n_tokens % L):
            raise InputError(
                "clean tokens under clean_mask: block",
                expected=f"whole canvases of {L} tokens",
                got=f"{n_tokens} tokens after {start}",
                fix="cut the prompt to whole canvases, or train with clean_mask: causal",
            )


def _as_they_are(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


@torch.no_grad()
def initialise(model: Backbone, seed: int) -> None:
    """Draw the weights of a fresh model from the seed.

    Each parameter has a stream of its name, so that its values depend neither on the order of
    creation nor on the parts that a network lacks: the twin starts from the same blocks.
    Matrices and the token table are normal with standard deviation 0.02; the two projections that
    write to the residual stream are scaled by 1/sqrt(2·n_layers) (Radford et al. 2019).
    """
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias") or name.startswith("self_conditioning.projection."):
            parameter.zero_()
        else:
            std = _INIT_STD
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                std /= math.sqrt(2 * model.params.n_layers)
            draws = stream(seed, f"init/{name}").standard_normal(parameter.shape, dtype=np.float32)
            parameter.copy_(torch.from_numpy(draws) * std)
