"""ViT-B/16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EncoderLayer(nn.Module):
    """Layer normalisation before self-attention and before the feed-forward part, each with a residual."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.inner_norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projections(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.contract(F.gelu(self.expand(self.inner_norm(x))))
        return y


class VisionTransformer(nn.Module):
    """Images (N, 3, size, size) to class scores (N, classes)."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, inner: int, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, inner) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], dim=1) + self.positions
        scores: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return scores


def vit_b_16() -> nn.Module:
    """ViT-B/16 for images of 224 x 224.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, table 1 and appendix B; the feed-forward part of torchvision.
    """
    return VisionTransformer(size=224, patch=16, width=768, depth=12, heads=12, inner=3072)
