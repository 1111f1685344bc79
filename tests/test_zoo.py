"""The zoo: parameter counts, output shapes, value ranges, determinism, and export."""

from __future__ import annotations

import subprocess
import sys
import warnings
from itertools import pairwise

import pytest
import torch

from tilewright import zoo
from tilewright.errors import UnknownModel

SMALL = ("lenet5", "defonet", "mobilenet_v2", "dlrm")
EVERY = [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in zoo.NETWORKS]

OUTPUT_SHAPES = {
    "lenet5": [(2, 10)],
    "defonet": [(2, 10)],
    "resnet34_3d": [(2, 400)],
    "deepcam": [(2, 3, 192, 288)],
    "ssd_mobilenet_v2": [(2, 1917, 4), (2, 1917, 91)],
    "ssd_inception_v2": [(2, 1917, 4), (2, 1917, 91)],
    "bert_base": [(2, 128, 768), (2, 768)],
    "deepspeech2": [(100, 2, 29)],
    "attention_rnn": [(2, 32, 16000)],
    "dlrm": [(2, 1)],
}


def outputs_of(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    with torch.inference_mode():
        outputs = module(*inputs)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


# The counts below follow the papers' layer lists, independently of the modules.


def unit(inputs: int, outputs: int, taps: int) -> int:
    """Convolution without bias, and the two vectors of batch normalisation."""
    return inputs * outputs * taps + 2 * outputs


def dense(*widths: int, bias: bool = True) -> int:
    return sum(before * after + bias * after for before, after in pairwise(widths))


def count_resnet34_3d() -> int:
    total, channels = unit(3, 64, 7**3), 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        total += unit(channels, width, 27) + (2 * depth - 1) * unit(width, width, 27)
        total += unit(channels, width, 1) if channels != width else 0
        channels = width
    return total + dense(512, 400)


def count_deepcam() -> int:
    def separable(inputs: int, outputs: int, norm: bool = True) -> int:
        return 9 * inputs + inputs * outputs + 2 * outputs * norm

    total = unit(16, 32, 9) + unit(32, 64, 9)
    for inputs, outputs in ((64, 128), (128, 256), (256, 728)):  # entry flow; the strided one is not normalised
        total += separable(inputs, outputs) + separable(outputs, outputs) + separable(outputs, outputs, norm=False)
        total += unit(inputs, outputs, 1)
    total += 16 * 3 * separable(728, 728)
    total += separable(728, 728) + separable(728, 1024) + separable(1024, 1024, norm=False) + unit(728, 1024, 1)
    total += separable(1024, 1536) + separable(1536, 1536) + separable(1536, 2048)
    total += unit(2048, 256, 1) + 3 * unit(2048, 256, 9) + unit(2048, 256, 1) + unit(5 * 256, 256, 1)  # pyramid
    total += unit(128, 48, 1) + 3 * unit(256, 256, 9)  # low level; three transposed convolutions
    return total + unit(304, 256, 9) + unit(256, 256, 9) + dense(256, 256) + 256 * 3 * 9


def count_detector_heads(channels: tuple[int, ...]) -> int:
    return sum((9 * width + 1) * anchors * (4 + 91) for width, anchors in zip(channels, (3, 6, 6, 6, 6, 6), strict=True))


def count_ssd_mobilenet_v2() -> int:
    trunk = 3_504_872 - dense(1280, 1000)
    extra = sum(unit(i, o // 2, 1) + unit(1, o // 2, 9) + unit(o // 2, o, 1)
                for i, o in pairwise((1280, 512, 256, 256, 128)))  # fmt: skip
    return trunk + extra + count_detector_heads((576, 1280, 512, 256, 256, 128))


def count_ssd_inception_v2() -> int:
    trunk = 24 * 49 + unit(24, 64, 1) + unit(64, 64, 1) + unit(64, 192, 9)
    channels = 192
    # single, double, triple, pooled; a single of zero marks the modules that halve the extents
    for single, (d1, d2), (t1, t2), pooled in (
        (64, (64, 64), (64, 96), 32), (64, (64, 96), (64, 96), 64), (0, (128, 160), (64, 96), 0),
        (224, (64, 96), (96, 128), 128), (192, (96, 128), (96, 128), 128), (160, (128, 160), (128, 160), 96),
        (96, (128, 192), (160, 192), 96), (0, (128, 192), (192, 256), 0),
        (352, (192, 320), (160, 224), 128), (352, (192, 320), (192, 224), 128),
    ):  # fmt: skip
        trunk += unit(channels, d1, 1) + unit(d1, d2, 9) + unit(channels, t1, 1) + unit(t1, t2, 9) + unit(t2, t2, 9)
        trunk += unit(channels, single, 1) + unit(channels, pooled, 1)
        channels = d2 + t2 + (single + pooled if single else channels)
    assert channels == 1024
    extra = sum(unit(i, o // 2, 1) + unit(o // 2, o, 9) for i, o in pairwise((1024, 512, 256, 256, 128)))
    return trunk + extra + count_detector_heads((576, 1024, 512, 256, 256, 128))


def count_deepspeech2() -> int:
    convolutions = unit(1, 32, 41 * 11) + 32 + unit(32, 32, 21 * 11) + 32
    recurrent = sum(2 * 3 * 800 * (width + 800 + 2) for width in (32 * 41, 800, 800, 800, 800))
    return convolutions + recurrent + 5 * 2 * 800 + 800 * 29


def count_attention_rnn() -> int:
    def lstm(inputs: int) -> int:
        return 4 * 512 * (inputs + 512 + 2)

    encoder = 2 * lstm(512) + lstm(1024) + 2 * lstm(512)
    decoder = lstm(512) + 3 * lstm(1024)
    return 2 * 16000 * 512 + encoder + decoder + 512 * 512 + dense(512, 16000)


COUNTED = {
    "defonet": sum(9 * i * o + o for i, o in pairwise((3, 32, 32, 64, 64, 128, 128))) + dense(128, 10),
    "resnet34_3d": count_resnet34_3d(),
    "deepcam": count_deepcam(),
    "ssd_mobilenet_v2": count_ssd_mobilenet_v2(),
    "ssd_inception_v2": count_ssd_inception_v2(),
    "deepspeech2": count_deepspeech2(),
    "attention_rnn": count_attention_rnn(),
    "dlrm": 8 * 20000 * 64 + dense(13, 512, 256, 64) + dense(8 * 9 // 2 + 64, 512, 256, 1),
}

# Published with the reference implementations.
PUBLISHED = {
    "lenet5": 61_706,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "drn_c_26": 21_126_584,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "densenet121": 7_978_856,
    "inception_v3": 23_834_568,
    "inception_v4": 42_679_816,
    "darknet53": 41_609_928,
    "bert_base": 109_482_240,
    "vit_b_16": 86_567_656,
}


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_parameter_count(name: str) -> None:
    network = zoo.NETWORKS[name]
    with torch.device("meta"):
        module = network.build()
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert counted == (PUBLISHED | COUNTED)[name] == network.parameters


@pytest.mark.parametrize("name", EVERY)
def test_outputs_have_the_shape_and_sane_values(name: str) -> None:
    module, inputs = zoo.build(name, batch=2)
    outputs = outputs_of(module, inputs)
    assert [tuple(output.shape) for output in outputs] == OUTPUT_SHAPES.get(name, [(2, 1000)])
    batch_dimension = 1 if name == "deepspeech2" else 0
    for output in outputs:
        assert output.isfinite().all()
        assert 0.01 < output.abs().mean() < 100
        # The two samples must differ by much more than a comparison's tolerance, or the comparison would show nothing.
        first, second = output.unbind(batch_dimension)
        assert (first - second).abs().mean() > 0.005 * output.abs().mean()


@pytest.mark.parametrize("name", EVERY)
def test_single_precision_is_close_to_double(name: str) -> None:
    module, inputs = zoo.build(name)
    single = outputs_of(module, inputs)
    exact = outputs_of(module.double(), tuple(x.double() if x.is_floating_point() else x for x in inputs))
    for output, reference in zip(single, exact, strict=True):
        assert (output - reference).abs().max() < 1e-4 * reference.abs().max()


@pytest.mark.parametrize("name", EVERY)
def test_export(name: str) -> None:
    module, inputs = zoo.build(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attributes.*were assigned during export")
        program = torch.export.export(module, inputs, strict=False)
        exported = program.module()
    for output, reference in zip(outputs_of(exported, inputs), outputs_of(module, inputs), strict=True):
        torch.testing.assert_close(output, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("deepspeech2", "attention_rnn"))
def test_recurrent_layers_are_exported_whole(name: str) -> None:
    module, inputs = zoo.build(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, inputs, strict=False)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    layers = sum(isinstance(part, (torch.nn.GRU, torch.nn.LSTM)) for part in module.modules())
    assert sum(target in ("aten.gru.input", "aten.lstm.input") for target in called) == layers


def test_the_seed_decides_weights_and_inputs() -> None:
    state = torch.random.get_rng_state()
    (first, x), (again, y), (other, z) = (zoo.build("lenet5", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(x[0], y[0]) and not torch.equal(x[0], z[0])
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])
    assert not first.training


def test_batch_norm_statistics_are_not_trivial() -> None:
    module, _ = zoo.build("mobilenet_v2")
    norms = [part for part in module.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        for values, trivial in ((norm.running_mean, 0), (norm.running_var, 1), (norm.weight, 1), (norm.bias, 0)):
            assert (values != trivial).any()
        assert (norm.running_var > 0).all()


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(UnknownModel, match="resnet5.*resnet50"):
        zoo.build("resnet5")


def test_import_is_lazy() -> None:
    code = "import sys, tilewright.zoo; sys.exit(any(name.startswith('tilewright.zoo.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
