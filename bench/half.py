"""Networks and single operators in float16, bfloat16 or float32 on a CPU: Tilewright, eager PyTorch and Inductor, all in that type, in one process.

    python -m bench.half --threads 1 --name half_1_thread
    python -m bench.half resnet18 gelu --types bfloat16 --threads 2
    python -m bench.half operators --against eager --threads 1 --name operators_half_1

The network and its inputs are converted by `.to(dtype)`; `eager_cl` has channels-last weights and images. Each contender is checked against PyTorch
in float64 on the rounded weights before it is timed, in turns.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from rich.console import Console
from torch import Tensor, nn

from bench.common import Outcome, compare, write_results
from bench.cpu_networks import OURS, ours, table_of
from tilewright import zoo
from tilewright.tuning.peers import PEERS
from tilewright.zoo.bert import EncoderLayer

NETWORKS = ("resnet18", "mobilenet_v2", "vit_b_16", "bert_base")
TYPES = ("bfloat16", "float16")
AGAINST = ("eager", "eager_cl", "inductor")
TOLERANCES = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.2, "tf32": 0.02}
"""Largest errors of networks, relative to the largest output. Eager PyTorch's are 0.007 for BERT in float16 and 0.06 in bfloat16. In TF32 they are
0.008 (BERT at batch 64)."""


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


OPERATORS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType({
    "gelu": (nn.GELU, (128, 3072)),
    "silu": (nn.SiLU, (128, 3072)),
    "relu": (nn.ReLU, (1, 64, 56, 56)),
    "softmax": (lambda: nn.Softmax(-1), (12, 128, 128)),
    "log_softmax": (lambda: nn.LogSoftmax(-1), (128, 1000)),
    "layer_norm": (lambda: nn.LayerNorm(768), (128, 768)),
    "group_norm": (lambda: nn.GroupNorm(8, 64), (1, 64, 56, 56)),
    "batch_norm": (lambda: nn.BatchNorm2d(64), (1, 64, 56, 56)),
    "attention_128": (Attention, (1, 12, 128, 64)),
    "attention_512": (Attention, (1, 12, 512, 64)),
    "depthwise": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), (1, 64, 56, 56)),
    "encoder_512": (lambda: nn.Sequential(*(EncoderLayer(768, 12, 3072) for _ in range(2))), (1, 512, 768)),
    "encoder_1024": (lambda: nn.Sequential(*(EncoderLayer(768, 12, 3072) for _ in range(2))), (1, 1024, 768)),
    "encoder_2048": (lambda: nn.Sequential(*(EncoderLayer(768, 12, 3072) for _ in range(2))), (1, 2048, 768)),
    "embedding": (lambda: nn.Embedding(30522, 768), (1, 128)),
    "max_pool": (lambda: nn.MaxPool2d(2), (1, 64, 56, 56)),
})  # fmt: skip
"""Makers of single operators, and of two layers of BERT over long sequences, with the shape of their inputs."""


def built(name: str, batch: int, seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network, or an operator, whose batch is fixed, and inputs."""
    if name not in OPERATORS:
        return zoo.build(name, batch, seed)
    torch.manual_seed(seed)
    module = OPERATORS[name][0]().eval()
    return module, drawn(name, module, batch)


def drawn(name: str, module: nn.Module, batch: int) -> tuple[Tensor, ...]:
    """Inputs of a network or operator."""
    if name not in OPERATORS:
        return zoo.NETWORKS[name].example_inputs(batch)
    shape = OPERATORS[name][1]
    if isinstance(module, nn.Embedding):
        return (torch.randint(module.num_embeddings, shape),)
    return tuple(torch.randn(shape) for _ in range(3 if isinstance(module, Attention) else 1))


def converted(name: str, dtype: torch.dtype, batch: int, seed: int) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """The network or operator with example inputs, and once more with others."""
    module, inputs = built(name, batch, seed)
    module = module.to(dtype)
    torch.manual_seed(seed + 1)
    for values in (inputs, drawn(name, module, batch)):
        yield module, tuple(x.to(dtype) if x.is_floating_point() else x for x in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NAME", help="zoo networks, single operators, or `operators`")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--against", default=",".join(AGAINST))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="least time of one turn in one round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="half", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = [OURS, *options.against.split(",")]
    contenders = [ours() if name == OURS else PEERS[name] for name in names]
    console = Console(width=160)
    results: list[Outcome] = []
    for network in OPERATORS if options.networks == ["operators"] else options.networks:
        for dtype in options.types.split(","):
            (module, inputs), (_, fresh) = converted(network, getattr(torch, dtype), options.batch, options.seed)
            found = compare(f"{network} {dtype}", module, inputs, fresh, contenders, TOLERANCES[dtype], options.rounds, options.seconds)
            for outcome in found:
                if outcome.reason and outcome.status != "unavailable":
                    console.print(f"{outcome.network}, {outcome.contender}: {outcome.status}: {outcome.reason}", markup=False)
            results += found
            path = write_results(options.name, vars(options), results)
            del module
            gc.collect()
    console.print(table_of(results, names, f"CPU, batch {options.batch}, {options.threads} threads"))
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
