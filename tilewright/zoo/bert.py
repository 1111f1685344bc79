"""BERT-base."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward part, each followed by sum and layer normalisation."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def _split(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return split

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x)))
        x = self.attention_norm(x + self.output(attended.transpose(1, 2).flatten(2)))
        y: Tensor = self.output_norm(x + self.contract(F.gelu(self.expand(x))))
        return y


class Bert(nn.Module):
    """Token ids (N, T) int64 to the last hidden states (N, T, width) and the pooled first token (N, width)."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, inner: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, inner) for _ in range(depth)))
        self.pooler = nn.Linear(width, width)

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        embedded = self.tokens(token_ids) + self.positions(positions) + self.segments(torch.zeros_like(token_ids))
        hidden = self.layers(self.norm(embedded))
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))


def bert_base() -> nn.Module:
    """BERT-base, uncased vocabulary, with the pooler; one segment and no padding mask.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", NAACL 2019, section 3.
    """
    return Bert(vocabulary=30522, width=768, depth=12, heads=12, inner=3072, positions=512)
