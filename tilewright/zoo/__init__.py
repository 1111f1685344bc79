"""The model zoo: plain PyTorch definitions of the networks measured in the papers, with random weights.

Importing this package is cheap: torch and a network's file are imported when a network is built.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.errors import UnknownModel

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["NETWORKS", "Network", "build"]


@dataclass(frozen=True)
class Network:
    """One network of the zoo.

    `build()` constructs the module with PyTorch's default weights (in training mode, and on the meta device inside `torch.device("meta")`);
    `example_inputs(batch)` draws random inputs; `parameters` counts the trainable values.
    """

    name: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[[int], tuple[Tensor, ...]]
    source: str
    parameters: int


def build(name: str, batch: int = 1, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network in evaluation mode with well-scaled random weights, and example inputs; deterministic for a seed.

    The global random state is not changed. Raises UnknownModel for a name that is not in `NETWORKS`.
    """
    if name not in NETWORKS:
        near = difflib.get_close_matches(name, NETWORKS, n=3, cutoff=0.4)
        remedy = f"did you mean {', '.join(near)}?" if near else "`python -m tilewright.zoo` lists them"
        raise UnknownModel(f"the zoo has no network {name!r}", remedy)
    import torch

    from tilewright.zoo.common import initialise

    network = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = initialise(network.build()).eval()
        return module, network.example_inputs(batch)


def _builder(file: str, function: str) -> Callable[[], nn.Module]:
    def build_network() -> nn.Module:
        network: nn.Module = getattr(importlib.import_module(f"tilewright.zoo.{file}"), function)()
        return network

    return build_network


def _normal(*extents: int) -> Callable[[int], tuple[Tensor, ...]]:
    """One tensor of shape (batch, *extents) of normally distributed values."""

    def example_inputs(batch: int) -> tuple[Tensor, ...]:
        import torch

        return (torch.randn(batch, *extents),)

    return example_inputs


def _tokens(vocabulary: int, *lengths: int) -> Callable[[int], tuple[Tensor, ...]]:
    """One int64 tensor of shape (batch, length) for each length."""

    def example_inputs(batch: int) -> tuple[Tensor, ...]:
        import torch

        return tuple(torch.randint(vocabulary, (batch, length)) for length in lengths)

    return example_inputs


def _clicks(features: int, tables: int, lookups: int, rows: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Dense features (batch, features) and table rows (batch, tables, lookups) int64."""

    def example_inputs(batch: int) -> tuple[Tensor, ...]:
        import torch

        return torch.randn(batch, features), torch.randint(rows, (batch, tables, lookups))

    return example_inputs


def _network(name: str, file: str, example_inputs: Callable[[int], tuple[Tensor, ...]], source: str, parameters: int) -> Network:
    return Network(name, _builder(file, name), example_inputs, source, parameters)


_SSD_SOURCE = "Liu et al., ECCV 2016; Huang et al., CVPR 2017"
_GNMT_SOURCE = "Wu et al. 2016; Luong et al., EMNLP 2015"

_LIST = (
    _network("lenet5", "small", _normal(1, 28, 28), "LeCun et al. 1998", 61_706),
    _network("defonet", "small", _normal(3, 108, 108), "CNNOpt, PACT 2022", 288_298),
    _network("resnet18", "resnet", _normal(3, 224, 224), "He et al., CVPR 2016", 11_689_512),
    _network("resnet50", "resnet", _normal(3, 224, 224), "He et al., CVPR 2016", 25_557_032),
    _network("resnet34_3d", "resnet", _normal(3, 16, 112, 112), "Hara et al., CVPR 2018", 63_718_736),
    _network("drn_c_26", "resnet", _normal(3, 224, 224), "Yu et al., CVPR 2017", 21_126_584),
    _network("vgg16", "vgg", _normal(3, 224, 224), "Simonyan and Zisserman, ICLR 2015", 138_357_544),
    _network("mobilenet_v2", "mobilenet", _normal(3, 224, 224), "Sandler et al., CVPR 2018", 3_504_872),
    _network("densenet121", "densenet", _normal(3, 224, 224), "Huang et al., CVPR 2017", 7_978_856),
    _network("inception_v3", "inception", _normal(3, 299, 299), "Szegedy et al., CVPR 2016", 23_834_568),
    _network("inception_v4", "inception", _normal(3, 299, 299), "Szegedy et al., AAAI 2017", 42_679_816),
    _network("darknet53", "darknet", _normal(3, 256, 256), "Redmon and Farhadi 2018", 41_609_928),
    _network("deepcam", "deepcam", _normal(16, 192, 288), "Kurth et al., SC 2018; MLPerf HPC", 56_454_720),
    _network("ssd_mobilenet_v2", "ssd", _normal(3, 300, 300), _SSD_SOURCE, 16_837_567),
    _network("ssd_inception_v2", "ssd", _normal(3, 300, 300), _SSD_SOURCE, 25_030_231),
    _network("vit_b_16", "vision_transformer", _normal(3, 224, 224), "Dosovitskiy et al., ICLR 2021", 86_567_656),
    _network("bert_base", "bert", _tokens(30522, 128), "Devlin et al., NAACL 2019", 109_482_240),
    _network("deepspeech2", "recurrent", _normal(1, 161, 200), "Amodei et al., ICML 2016", 41_187_968),
    _network("attention_rnn", "recurrent", _tokens(16000, 32, 32), _GNMT_SOURCE, 47_959_680),
    _network("dlrm", "dlrm", _clicks(13, 8, 4, 20000), "Naumov et al. 2019", 10_578_241),
)

NETWORKS: Mapping[str, Network] = MappingProxyType({network.name: network for network in _LIST})
