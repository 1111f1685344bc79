"""Recurrent networks: Deep Speech 2 and an attention translation network."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DeepSpeech2(nn.Module):
    """Spectrogram (N, 1, 161, T) to log-probabilities (T / 2, N, labels)."""

    def __init__(self, hidden: int, depth: int, labels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        widths = [32 * 41] + [hidden] * (depth - 1)
        self.norms = nn.ModuleList(nn.Identity() if i == 0 else nn.BatchNorm1d(hidden) for i in range(depth))
        self.layers = nn.ModuleList(nn.GRU(width, hidden, bidirectional=True) for width in widths)
        self.head = nn.Sequential(nn.BatchNorm1d(hidden), nn.Linear(hidden, labels, bias=False))

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.convolutions(spectrogram).flatten(1, 2).permute(2, 0, 1)
        steps, batch = x.shape[:2]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = norm(x.flatten(0, 1)).unflatten(0, (steps, batch))
            x, _ = layer(x)
            x = x.unflatten(2, (2, -1)).sum(2)  # both directions
        scores: Tensor = self.head(x.flatten(0, 1)).unflatten(0, (steps, batch)).log_softmax(-1)
        return scores


def deepspeech2() -> nn.Module:
    """Two convolutions, five bidirectional GRU layers of 800 units with batch normalisation between, 29 characters.

    Source: Amodei et al., "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin", ICML 2016, section 3.
    """
    return DeepSpeech2(hidden=800, depth=5, labels=29)


class AttentionTranslation(nn.Module):
    """Source ids (N, S) and teacher-forced target ids (N, T), int64, to logits (N, T, vocabulary).

    The lowest decoder layer sees only the target, so attention can be computed for all steps at once; its context is
    concatenated to the input of every further decoder layer.
    """

    def __init__(self, vocabulary: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, hidden), nn.Embedding(vocabulary, hidden)
        self.encoder_bottom = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(2 * hidden if i == 0 else hidden, hidden, batch_first=True) for i in range(depth - 1))
        self.decoder_bottom = nn.LSTM(hidden, hidden, batch_first=True)
        self.attention_key = nn.Linear(hidden, hidden, bias=False)
        self.decoder = nn.ModuleList(nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(depth - 1))
        self.logits = nn.Linear(hidden, vocabulary)
        self.scale = hidden**-0.5

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        memory, _ = self.encoder_bottom(self.source(source_ids))
        for index, layer in enumerate(self.encoder):
            output, _ = layer(memory)
            memory = output if index == 0 else output + memory
        query, _ = self.decoder_bottom(self.target(target_ids))
        scores = query @ self.attention_key(memory).transpose(1, 2) * self.scale
        context = scores.softmax(-1) @ memory
        x = query
        for index, layer in enumerate(self.decoder):
            output, _ = layer(torch.cat([x, context], dim=-1))
            x = output if index == 0 else output + x
        logits: Tensor = self.logits(x)
        return logits


def attention_rnn() -> nn.Module:
    """A GNMT-like network: four encoder layers (the first bidirectional) and four decoder layers of 512 units.

    Source: Wu et al., "Google's Neural Machine Translation System", 2016, sections 3.1 and 3.2, with the dot-product
    attention of Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, and a
    vocabulary of 16,000 instead of 32,000.
    """
    return AttentionTranslation(vocabulary=16000, hidden=512, depth=4)
