"""Networks and single operators in 16 bits and TF32 on the GPU present: Tilewright, PyTorch eager (both layouts), Inductor, all as CUDA graphs.

    python -m bench.gpu_half figure --types float16 --batches 1,8,64 --against eager,eager_cl,inductor --resume --name gpu_half_figure_float16
    python -m bench.gpu_half operators --batches 1,64 --name gpu_half_operators
    python -m bench.gpu_half resnet18 bert_base --types float16,tf32 --batches 1 --against inductor --name gpu_half_inductor
    python -m bench.gpu_half products --types float16,bfloat16,tf32 --batches 1 --against eager --name gpu_half_products
    python -m bench.gpu_half vectors --types float16,tf32 --batches 1 --against eager --clean --name gpu_half_vectors
    python -m bench.gpu_half listed --types float32 --batches 1 --against eager,eager_cl --name gpu_listed      operators that were slow in float32
    python -m bench.gpu_half --batches 1 --against formulas --name gpu_half_formulas
    python -m bench.gpu_half densenet121 mobilenet_v2 --types float16 --against stored,none,chains --name gpu_half_fusion      by what is fused
    python -m bench.gpu_half vgg16 --types float16 --batches 1,64 --against unpooled --name gpu_half_pooled      convolutions that pool, and poolings

Each contender computes in the type, on tensor cores where it uses them, is checked against PyTorch in float64 on the rounded weights before it is
timed in turns, and finds the L2 cache full of other data (`bench.gpu_networks`); with `--clean` these were only read: what was written must go
to memory while the call's own data come from there, which matters where bandwidth is judged. For tf32 the module stays in float32. `formulas` is
Tilewright without learned corrections; names are of the zoo, `torchvision:NAME` or `timm:NAME` (weights: `network`). The result file is written after
each comparison; after `--seconds-in-all` no further one begins, and `--resume` leaves out those that a file of this commit has with all contenders.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn

from bench import half
from bench.common import Contender, Outcome, Run, compare, rows_to_resume, write_results
from bench.cpu_networks import OURS, cell, table_of
from bench.gpu_networks import CONTENDERS as FLOAT32_CONTENDERS
from bench.gpu_networks import FLUSHED_BYTES, ahead, cold_seconds, fused, late, ours, reused, unfetched
from tilewright.models import resolve
from tilewright.selection.learned import gpu
from tilewright.tuning import choices
from tilewright.zoo.common import initialise

NETWORKS = ("resnet18", "resnet50", "mobilenet_v2", "bert_base")
OPERATORS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType(
    {
        **half.OPERATORS,
        "linear": (lambda: nn.Linear(768, 3072), (128, 768)),
        "convolution": (lambda: nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),
        "pointwise": (lambda: nn.Conv2d(256, 64, 1), (1, 256, 56, 56)),
    }
)
"""Makers of single operators with the shape of their inputs at batch 1; the first dimension grows with the batch."""
PRODUCTS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType({
    name: (partial(nn.Linear, channels, outputs, bias=name.startswith("bert")), (rows, channels))
    for name, (rows, channels, outputs) in {
        "product_4096": (4096, 4096, 4096), "vector_4096": (1, 4096, 4096), "vector_11008": (1, 4096, 11008), "rows_16": (16, 4096, 4096),
        "bert_qkv": (128, 768, 2304), "bert_output": (128, 768, 768), "bert_inner": (128, 768, 3072), "bert_outer": (128, 3072, 768),
        "resnet_classes": (1, 2048, 1000), "resnet_56": (3136, 64, 256), "resnet_28": (784, 128, 512), "resnet_14": (196, 1024, 256),
        "resnet_7": (49, 512, 2048),
    }.items()
})  # fmt: skip
"""Matrix products: large ones, those of one row and of few, and the shapes of BERT-base at 128 words and of ResNet-50's 1x1 convolutions."""
CLASSIFIERS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType({
    f"vector_{words}": (partial(nn.Linear, 4096, words, bias=False), (1, 4096)) for words in (32000, 128256)
})  # fmt: skip
"""Further products of one row: classifiers of Llama."""


class CumulativeSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


LISTED: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType(
    {
        "depthwise_7x7": (lambda: nn.Conv2d(192, 192, 7, padding=3, groups=192), (1, 192, 56, 56)),
        "depthwise_64": (lambda: nn.Conv2d(192, 192, 3, padding=1, groups=192), (64, 192, 28, 28)),
        "softmax_4096": (lambda: nn.Softmax(-1), (4096, 4096)),
        "cumsum_8192": (CumulativeSum, (1024, 8192)),
        "convolution_64": (lambda: nn.Conv2d(128, 128, 3, padding=1), (64, 128, 28, 28)),
    }
)
"""Operators that once took 1.1 to 2.1 times as long as PyTorch's in float32; `product_4096` was another."""
FIGURE = (
    "resnet18", "resnet50", "vgg16", "mobilenet_v2", "densenet121", "inception_v3", "darknet53", "bert_base", "torchvision:googlenet",
    "torchvision:resnext50_32x4d", "torchvision:efficientnet_b0", "timm:mobilenetv3_large_100", "timm:vit_small_patch16_224",
)  # fmt: skip
"""Networks of the zoo, and five that it does not define."""
GROUPS: Mapping[str, Iterable[str]] = MappingProxyType(
    {
        "operators": OPERATORS,
        "products": PRODUCTS,
        "vectors": ("vector_4096", "vector_11008", *CLASSIFIERS),
        "listed": (*LISTED, "product_4096"),
        "figure": FIGURE,
    }
)
SINGLE = MappingProxyType({**OPERATORS, **PRODUCTS, **CLASSIFIERS, **LISTED})
TF32 = "tf32"
OPERATOR_TOLERANCE = 2e-2
"""Largest error of one operator relative to the largest output; those of networks are `half.TOLERANCES`."""


def by_formulas(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Our kernels, chosen by the analytical models alone; such choices have a place of their own in the cache."""
    with mock.patch.object(gpu, "corrected", lambda ranking, machine: ranking), mock.patch.object(choices, "_models", lambda: "formulas"):
        return ours(module, inputs)


CONTENDERS = {**FLOAT32_CONTENDERS, "formulas": Contender("formulas", by_formulas)}
ROUNDED = {
    OURS: Contender(OURS, partial(ours, precision=TF32)),
    "late": Contender("late", partial(late, precision=TF32)),
    "ahead": Contender("ahead", partial(ahead, precision=TF32)),
    "reused": Contender("reused", partial(reused, precision=TF32)),
    "unfetched": Contender("unfetched", partial(unfetched, precision=TF32)),
    **{way: Contender(way, partial(fused, way, precision=TF32)) for way in ("stored", "unpooled", "none", "chains")},
    **{peer: CONTENDERS[peer] for peer in ("eager", "eager_cl", "inductor")},
}
"""The contenders for float32 modules that may round to TF32; peers do so by PyTorch's switches."""


def network(name: str, batch: int) -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    """A network, and what draws its inputs for a seed. Networks of torchvision and timm get weights like the zoo's: with their own random weights the
    results of some hardly depend on the input (GoogLeNet, ShuffleNet, MLP-Mixer), so that no error is seen, or are too small for float16
    (EfficientNet)."""
    model = resolve(name if ":" in name else f"zoo:{name}", batch)
    assert model.inputs is not None
    return initialise(model.module) if ":" in name else model.module, model.inputs


def built(name: str, dtype: torch.dtype, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network or operator in the type, and inputs, on the GPU."""
    torch.manual_seed(0)
    if name not in SINGLE:
        module, draw = network(name, batch)
        inputs = draw(0)
    else:
        make, (first, *rest) = SINGLE[name]
        module = make()
        inputs = tuple(torch.randn(batch * first, *rest) for _ in range(3 if isinstance(module, half.Attention) else 1))
        if isinstance(module, nn.Embedding):
            inputs = (torch.randint(module.num_embeddings, (batch * first, *rest)),)
    return module.eval().to("cuda", dtype), tuple(x.to("cuda", dtype) if x.is_floating_point() else x.cuda() for x in inputs)


def label_of(name: str, dtype: str, batch: int) -> str:
    """What the rows of a comparison call it."""
    return f"{name} {dtype} x{batch}"


def is_done(rows: Sequence[Mapping[str, Any]], label: str, contenders: Iterable[str]) -> bool:
    """Whether the rows have all contenders of the comparison."""
    return {row["contender"] for row in rows if row["network"] == label}.issuperset(contenders)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    told = f"networks, {', '.join(GROUPS)}, or single operators"
    parser.add_argument("names", nargs="*", default=[*NETWORKS, *OPERATORS], metavar="NAME", help=told)
    parser.add_argument("--types", default=",".join(half.TYPES), help=f"of {', '.join((*half.TYPES, TF32, 'float32'))}")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--against", default="eager,eager_cl", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.01, help="least device time of one turn in one round")
    parser.add_argument("--seconds-in-all", type=float, default=190.0, help="no comparison begins after these")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--clean", action="store_true", help="level 2 is full of data that were read, not written")
    parser.add_argument("--name", default="gpu_half", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    names = list(dict.fromkeys([OURS, *options.against.split(",")]))
    if TF32 in options.types.split(",") and not ROUNDED.keys() >= set(names):
        parser.error(f"of TF32 the contenders are {', '.join(ROUNDED)}, not {', '.join(set(names) - ROUNDED.keys())}")
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    results: list[Outcome] = []
    before = rows_to_resume(options.name, {"rounds": options.rounds, "seconds": options.seconds, "clean": options.clean}) if options.resume else []
    start = time.monotonic()
    chosen = [one for name in options.names for one in GROUPS.get(name, (name,))]
    for name, batch, dtype in ((n, b, t) for n in chosen for b in map(int, options.batches.split(",")) for t in options.types.split(",")):
        label = label_of(name, dtype, batch)
        if is_done(before, label, names):
            continue
        before = [row for row in before if row["network"] != label]
        if time.monotonic() - start > options.seconds_in_all:
            print(f"out of time before {label}", flush=True)
            break
        allowed = dtype == TF32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        module, inputs = built(name, torch.float32 if allowed else getattr(torch, dtype), batch)
        tolerance = OPERATOR_TOLERANCE if name in SINGLE else half.TOLERANCES[dtype]
        known = ROUNDED if allowed else CONTENDERS
        outcomes = compare(
            label, module, inputs, inputs, [known[c] for c in names], tolerance, options.rounds, options.seconds,
            partial(cold_seconds, scratch=scratch, clean=options.clean),
        )  # fmt: skip
        for outcome in outcomes:
            print(f"{outcome.network} {outcome.contender}: {outcome.status} {outcome.reason} prepared in {outcome.preparation_seconds or 0:.1f} s, "
                  f"error {outcome.relative_error}, {cell(outcome)} ms", flush=True)  # fmt: skip
        results += outcomes
        write_results(options.name, vars(options), [*before, *results])
        del module, inputs
        gc.collect()
        torch.cuda.empty_cache()
    Console(width=150).print(table_of(results, names, f"{torch.cuda.get_device_name()}, batch as said"))


if __name__ == "__main__":
    main()
