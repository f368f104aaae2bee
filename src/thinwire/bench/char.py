"""A small language model with torch's own initialization, which learns as slowly as such models do without tuning.

The Llamas among the presets of `thinwire train`, with rotary positions and small initial weights, are much further
after a thousand steps at the same learning rate. How a method compares with `ddp` depends on that.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.train.config import ModelConfig
from thinwire.train.model import Vocabulary

NAME = "char"
WIDTH, LAYERS, HEADS, HIDDEN, LONGEST = 64, 2, 4, 160, 64


def build(config: ModelConfig, vocabulary: Vocabulary, *, seed: int) -> nn.Module:
    """In place of `thinwire.train.model.build_model`."""
    torch.manual_seed(seed)
    return CharTransformer(vocabulary.size)


class CharTransformer(nn.Module):
    """Learned positions, LayerNorm before each part, SwiGLU, its own output matrix; 0.13M parameters for bytes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=NAME, vocab_size=vocabulary, hidden_size=WIDTH)
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        """(batch, length) -> `.logits`: (batch, length, vocabulary); packed text, so there is nothing to mask."""
        assert attention_mask is None
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]  # (batch, length, width)
        return SimpleNamespace(logits=self.head(self.norm(self.blocks(x))))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))  # (batch, length, 3, heads, each)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = self.feed_norm(x)
        fed: Tensor = self.down(F.silu(self.gate(inner)) * self.up(inner))
        return x + fed
