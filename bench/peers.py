"""Which models of others have the size of ours, and how are they trained under the same loop?

The Llama and the GPT-2 of transformers, from a configuration, with random weights; and a GPT of
nanochat's shape in our own words: norms without weights, rotary positions, normed queries and keys,
squared ReLU, no bias, a head of its own (Karpathy 2025, https://github.com/karpathy/nanochat).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import peer

from canvaslm.device import autocast
from canvaslm.layout import Layout
from canvaslm.model.shape import ModelParams
from canvaslm.training.plan import PretrainParams

LLAMA_ATTENTIONS = ("sdpa", "eager")

_Loss = Callable[[Tensor], Tensor]  # of windows (W, T), mean nats per target


def build_llama(
    model: ModelParams, layout: Layout, *, attention: str, max_tokens: int
) -> nn.Module | None:
    """transformers' Llama of a shape of ours, its head tied; None where transformers is absent.

    Args:
        model: widths, heads, layers and biases.
        layout: the vocabulary.
        attention: one of ``LLAMA_ATTENTIONS``.
        max_tokens: the longest text.
    """
    transformers = peer("transformers")
    if transformers is None:
        return None
    config = transformers.LlamaConfig(
        vocab_size=model.table_rows(layout.vocab_size),
        hidden_size=model.width,
        intermediate_size=model.ffn_width,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_kv_heads,
        head_dim=model.head_width,
        attention_bias=model.bias,
        mlp_bias=model.bias,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        attn_implementation=attention,
        **_no_special_tokens(),
    )
    return transformers.LlamaForCausalLM(config)


def build_gpt2(model: ModelParams, layout: Layout, *, max_tokens: int) -> nn.Module | None:
    """transformers' GPT-2 with as many weights in its matrices as a shape of ours; None as above.

    It has two matrices in a feed-forward where ours has three, and as many heads for keys as for
    queries.

    Args:
        model: widths, heads and layers.
        layout: the vocabulary.
        max_tokens: the longest text.
    """
    transformers = peer("transformers")
    if transformers is None:
        return None
    config = transformers.GPT2Config(
        vocab_size=model.table_rows(layout.vocab_size),
        n_positions=max_tokens,
        n_embd=model.width,
        n_layer=model.n_layers,
        n_head=model.width // model.head_width,
        n_inner=_inner_width(model),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_no_special_tokens(),
    )
    return transformers.GPT2LMHeadModel(config)


class NanochatGPT(nn.Module):
    """A GPT of nanochat's shape, without its cap on the logits, which would only cost it time.

    Args:
        model: widths, heads and layers; the feed-forward has as many weights as ours.
        layout: the vocabulary.
    """

    def __init__(self, model: ModelParams, layout: Layout) -> None:
        super().__init__()
        rows = model.table_rows(layout.vocab_size)
        self.embedding = nn.Embedding(rows, model.width)
        self.blocks = nn.ModuleList(_NanochatBlock(model) for _ in range(model.n_layers))
        self.head = nn.Linear(model.width, rows, bias=False)
        self._half = model.head_width // 2
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, S, V) of ids (B, S)."""
        frequencies = 10_000.0 ** (-torch.arange(self._half, device=ids.device) / self._half)
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[:, None] * frequencies  # (S, E/2)
        x = _norm(self.embedding(ids))
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(_norm(x))


class _NanochatBlock(nn.Module):
    def __init__(self, model: ModelParams) -> None:
        super().__init__()
        D, E = model.width, model.head_width
        self._head_width = E
        self.query = nn.Linear(D, model.n_heads * E, bias=False)
        self.key = nn.Linear(D, model.n_kv_heads * E, bias=False)
        self.value = nn.Linear(D, model.n_kv_heads * E, bias=False)
        self.output = nn.Linear(model.n_heads * E, D, bias=False)
        self.inner = nn.Linear(D, _inner_width(model), bias=False)
        self.outer = nn.Linear(_inner_width(model), D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = _norm(x)
        q, k, v = (self._heads(layer(normed)) for layer in (self.query, self.key, self.value))
        q, k = (_norm(_rotate(heads, cos, sin)) for heads in (q, k))
        attended = functional.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), is_causal=True, enable_gqa=True
        )
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.outer(functional.relu(self.inner(_norm(x))).square())

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_width)).transpose(1, 2)


def peer_step(
    network: nn.Module, loss: _Loss, pretrain: PretrainParams, windows: np.ndarray
) -> Callable[[], object]:
    """One whole optimiser step of a peer on windows (W, T): the same tokens, cut as ours are.

    Torch's own fused AdamW and clipping, with the run's rates and betas, and gradients that are
    dropped between steps, which is torch's default.

    Args:
        network: the peer.
        loss: its loss on some windows.
        pretrain: batch, arithmetic and optimiser.
        windows: int64 ids.
    """
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=pretrain.learning_rate,
        betas=(pretrain.beta1, pretrain.beta2),
        eps=pretrain.adam_eps,
        weight_decay=pretrain.weight_decay,
        fused=True,
    )
    device = next(network.parameters()).device
    parts = torch.from_numpy(windows).to(device).split(pretrain.micro_batch_windows)
    network.train()

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            with autocast(device, pretrain.precision):
                nats = loss(part) * (len(part) / len(windows))
            nats.backward()
            total += nats.item()
        nn.utils.clip_grad_norm_(network.parameters(), pretrain.max_gradient_norm)
        optimizer.step()
        return total

    return step


def llama_loss(llama: nn.Module) -> _Loss:
    """Its own loss, on its own shift: every token but the first from those before it."""
    return lambda windows: llama(input_ids=windows, labels=windows, use_cache=False).loss


def nanochat_loss(gpt: NanochatGPT) -> _Loss:
    """Cross-entropy in float32 of every token from those before it."""

    def loss(windows: Tensor) -> Tensor:
        logits = gpt(windows.roll(1, dims=1)).float()
        return functional.cross_entropy(logits.flatten(0, 1), windows.flatten())

    return loss


def _no_special_tokens() -> dict[str, Any]:
    """Generation must not end early, and no id may lie outside of a small vocabulary."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _inner_width(model: ModelParams) -> int:
    """Of a feed-forward of two matrices with as many weights as ours of three."""
    return model.ffn_width * 3 // 2


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of heads (B, H, S, E)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)
