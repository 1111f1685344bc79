"""The networks of `bench.first_day`: of transformers and timm, built from configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """`build()` gives the module in evaluation mode, `inputs(batch)` the keywords of a call."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]


def _of_transformers(model: str, config: str, part: str = "", **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        found: nn.Module = getattr(module, part) if part else module
        return found.eval()

    return build


def _of_timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        module: nn.Module = timm.create_model(name, pretrained=False)
        return module.eval()

    return build


def _tokens(length: int, vocabulary: int, *names: str, mask: bool = True) -> Callable[[int], Inputs]:
    def inputs(batch: int) -> Inputs:
        made = {name: torch.randint(vocabulary, (batch, length)) for name in names or ("input_ids",)}
        return {**made, "attention_mask": torch.ones(batch, length, dtype=torch.int64)} if mask else made

    return inputs


def _numbers(name: str, *shape: int) -> Callable[[int], Inputs]:
    return lambda batch: {name: torch.randn(batch, *shape)}


NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "BERT (small)": Network(
            _of_transformers("BertModel", "BertConfig", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048),
            _tokens(128, 30522),
        ),
        "GPT-2 (distilled)": Network(_of_transformers("GPT2LMHeadModel", "GPT2Config", n_layer=6, use_cache=False), _tokens(64, 50257, mask=False)),
        "ViT (small)": Network(
            _of_transformers("ViTModel", "ViTConfig", hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536),
            _numbers("pixel_values", 3, 224, 224),
        ),
        "Whisper (tiny), encoder": Network(
            _of_transformers(
                "WhisperModel", "WhisperConfig", "encoder",
                d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, decoder_layers=1,
            ),
            _numbers("input_features", 80, 3000),
        ),
        "T5 (small)": Network(
            _of_transformers("T5Model", "T5Config", use_cache=False, decoder_start_token_id=0),
            _tokens(64, 32128, "input_ids", "decoder_input_ids", mask=False),
        ),
        "Llama (8 layers of 512)": Network(
            _of_transformers(
                "LlamaForCausalLM", "LlamaConfig",
                hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, use_cache=False,
            ),
            _tokens(128, 32000, mask=False),
        ),
        "wav2vec 2.0 (4 layers)": Network(
            _of_transformers(
                "Wav2Vec2Model", "Wav2Vec2Config",
                hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536, conv_dim=(256,) * 7,
            ),
            _numbers("input_values", 16000),
        ),
        "mobilenetv3_large_100": Network(_of_timm("mobilenetv3_large_100"), _numbers("x", 3, 224, 224)),
        "convnext_atto": Network(_of_timm("convnext_atto"), _numbers("x", 3, 224, 224)),
        "vit_tiny_patch16_224": Network(_of_timm("vit_tiny_patch16_224"), _numbers("x", 3, 224, 224)),
        "efficientnet_b0": Network(_of_timm("efficientnet_b0"), _numbers("x", 3, 224, 224)),
        "resnet50": Network(_of_timm("resnet50"), _numbers("x", 3, 224, 224)),
    }
)  # fmt: skip
