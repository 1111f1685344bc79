"""The PyTorch operators that a file may name: those on a list, and no others."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.operator_cases import Function
from tilewright.compile import read
from tilewright.errors import InvalidArtifact
from tilewright.frontend.permitted_operators import FAMILIES, PERMITTED
from tilewright.frontend.torch_operators import permitted_operator, resolve_operator
from tilewright.graph.operator_arguments import checked_call
from tilewright.graph.reference import evaluate

LISTED_FOR = (2, 13)
"""The release of PyTorch whose operators were reviewed."""


def functional(word: str) -> list[str]:
    """The permitted overloads of an entry of the list, as targets."""
    name, _, only = word.partition(".")
    found = []
    for overload in getattr(torch.ops.aten, name).overloads() if hasattr(torch.ops.aten, name) else ():
        try:
            permitted_operator(f"aten.{name}.{overload}")
        except InvalidArtifact:
            continue
        found.append(overload)
    return [overload for overload in found if not only or overload == only]


def test_every_word_is_an_operator_and_stands_once() -> None:
    words = [word for family in FAMILIES.values() for word in family.split()]
    assert not [word for word, count in Counter(words).items() if count > 1]
    missing = [word for word in words if not functional(word)]
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if missing and release < LISTED_FOR:
        pytest.skip(f"PyTorch {torch.__version__} is older than the list, and has no {', '.join(missing)}")
    assert not missing


@pytest.mark.parametrize(
    "target",
    """aten.save.default aten.from_file.default aten._print.default aten.warn.default aten.format.default aten.manual_seed.default
    aten.max_pool2d_with_indices_backward.default aten._reshape_alias.default aten._sparse_coo_tensor_unsafe.default aten.fbgemm_linear_int8_weight.default
    aten._nested_view_from_buffer.default aten.segment_reduce.default aten.record_stream.default aten._foreach_add.List aten.as_strided.default
    aten.repeat_interleave.Tensor aten.repeat_interleave.self_Tensor aten.ctc_loss.IntList aten._ctc_loss.default aten.native_batch_norm.default
    aten.batch_norm.default aten.instance_norm.default aten.set.source_Tensor aten.set_.source_Tensor aten._cudnn_rnn.default aten.resize.default
    aten.cudnn_convolution.default aten._native_batch_norm_legit_functional.default aten.batch_norm_update_stats.default aten._weight_norm.default
    aten._weight_norm_interface.default aten._embedding_bag.default aten.embedding_bag.padding_idx aten.fractional_max_pool2d.default
    aten._scaled_dot_product_flash_attention_for_cpu.default aten.scaled_dot_product_attention.default aten.slow_conv3d_forward.default
    aten.slow_conv_transpose2d.default aten.lstm.input aten.lstm.data aten.gru.data aten.rnn_relu.data aten.binomial.default
    aten.special_laguerre_polynomial_l.default aten._upsample_bilinear2d_aa.default aten._native_multi_head_attention.default
    aten.quantize_per_tensor.default aten.dequantize.self aten.coalesce.default aten.to_sparse.default aten.empty_strided.default
    aten._stack.default aten.add.t aten.sort.str aten.split.str aten.item.default""".split(),
)
def test_what_trusts_its_arguments_or_reaches_beyond_tensors_is_refused(target: str) -> None:
    with pytest.raises(InvalidArtifact):
        permitted_operator(target)


@pytest.mark.parametrize("words", ["backward", "sparse", "nested", "quantized", "cudnn", "mkldnn", "foreach", "strided", "_jvp"])
def test_no_word_of_the_list_is_of_a_family_that_trusts(words: str) -> None:
    assert not [word for word in PERMITTED if words in word]


def test_an_operator_of_a_later_release_is_refused() -> None:
    library = torch.library.Library("aten", "FRAGMENT")
    try:
        library.define("tilewright_later(Tensor x) -> Tensor")
        library.impl("tilewright_later", torch.neg, "CPU")
        assert resolve_operator("aten.tilewright_later.default")(torch.ones(1)) == -1
        with pytest.raises(InvalidArtifact, match="none that a file may name"):
            permitted_operator("aten.tilewright_later.default")
    finally:
        library._destroy()


@pytest.mark.parametrize(
    "target",
    """aten.sort.default aten.unique_dim.default aten._unique2.default aten.bernoulli.default aten.stft.default aten._fft_r2c.default aten.to.dtype
    aten.linalg_inv_ex.default aten.einsum.default aten.split.Tensor aten.nonzero.default aten.fake_quantize_per_tensor_affine.default
    aten.multinomial.default aten.scatter_reduce.two aten.arange.start_step aten.masked_select.default aten._upsample_bilinear2d_aa.vec""".split(),
)
def test_functions_of_tensors_are_permitted(target: str) -> None:
    assert permitted_operator(target) is resolve_operator(target)


NEEDED = {
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "antialiased": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    "antialiased, cubic": lambda x: F.interpolate(x, size=(5, 5), mode="bicubic", antialias=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "sampled": lambda x: F.grid_sample(x, torch.rand(1, 3, 3, 2)),
    "pooled and back": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),  # type: ignore[arg-type]
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance norm": lambda x: F.instance_norm(x),
    "folded": lambda x: F.fold(F.unfold(x, 2), (8, 8), 2),
    "sorted": lambda x: x.flatten().sort(),
    "distances": lambda x: torch.cdist(x, x),
    "recurrent": nn.GRU(8, 5, dropout=0.5, num_layers=2),
    "weight norm": parametrizations.weight_norm(nn.Linear(8, 4)),
    "bags": lambda x: F.embedding_bag(torch.zeros(2, 3, dtype=torch.int64), x[0, 0], mode="max"),
    "scattered": lambda x: x.scatter_reduce(0, torch.zeros(1, 3, 8, 8, dtype=torch.int64), x, "amax"),
    "fake quantisation": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
}


def through_torch(module: nn.Module, example: tuple[torch.Tensor, ...]) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = read(module, example, None).graph
    return {str(node.attributes["target"]) for node in graph.nodes if node.operator == "torch"}


@pytest.mark.parametrize("name", NEEDED)
def test_what_models_need_has_a_kernel_or_is_permitted(name: str) -> None:
    function = NEEDED[name]
    x = torch.randn(3, 8, 8) if isinstance(function, nn.Module) else torch.randn(1, 3, 8, 8)
    for target in through_torch(function if isinstance(function, nn.Module) else Function(function), (x,)):
        permitted_operator(target)


LEAST = -(2**63)
NOT_A_NUMBER = float("nan")
HOSTILE: dict[str, tuple[str, list[object], str]] = {
    "c2c": ("_fft_c2c.default", [torch.ones(4, dtype=torch.complex64), [100_000], 0, True], "dimension"),
    "r2c": ("_fft_r2c.default", [torch.ones(4), [-70], 0, True], "dimension"),
    "c2r": ("_fft_c2r.default", [torch.ones(4, dtype=torch.complex64), [5000], 0, 6], "dimension"),
    "circular": ("_pad_circular.default", [torch.ones(1, 1, 4), [-6, 3]], "negative"),
    "circular by name": ("pad.default", [torch.ones(1, 1, 4), [-6, 3], "circular"], "negative"),
    "a power": ("matrix_power.default", [torch.eye(3), LEAST], "exponent"),
    "a window": ("max_pool1d.default", [torch.ones(1, 1, 4), [1 << 62], [1], [1 << 61], [1]], "window"),
    "c2r of one twice": ("_fft_c2r.default", [torch.ones(3, 4, dtype=torch.complex64), [0, -2], 0, 6], "twice"),
    "r2c of one twice": ("_fft_r2c.default", [torch.ones(3, 4), [0, -2], 0, True], "twice"),
    "c2r of a negative one": ("_fft_c2r.default", [torch.ones(2, 2, 3, dtype=torch.complex64), [-2], 1, -1], "negative"),
    "a result of nothing": ("adaptive_max_pool2d.default", [torch.ones(1, 4, 4), [1 << 62, 0]], "a result beyond"),
    "distances of no columns": ("_pdist_forward.default", [torch.ones(4, 4, 0)], "two dimensions"),
    "pivots": ("lu_unpack.default", [torch.ones(1, 3), torch.zeros(3, 4, 1, 4, 0, dtype=torch.int32)], "pivots"),
    "random numbers": ("random.from", [torch.ones(4), (1 << 63) - 1, None], "greatest integer"),
    "combinations": ("combinations.default", [torch.ones(1), 1 << 20, True], "more than 64"),
    "patches": ("im2col.default", [torch.ones(1, 1, 8, 8), [2, 2], [1 << 62] * 2, [1 << 62] * 2, [1, 1]], "patches"),
    "patches put together": ("col2im.default", [torch.ones(1, 4, 64), [8, 8], [2, 2], [1 << 62] * 2, [1 << 62] * 2, [1, 1]], "patches"),
    "groups": ("native_group_norm.default", [torch.ones(1, 4, 3), None, None, 7, 4, (3 + (1 << 62)) // 7, 2, 1e-5], "sizes"),
    "groups of nothing": ("native_group_norm.default", [torch.ones(0, 4, 3), None, None, 4, 4, 1 << 60, 2, 1e-5], "sizes"),
    "a type of elements": ("_safe_softmax.default", [torch.ones(3, 4), -1, -1], "type of elements"),
    "a type of bytes": ("view_copy.dtype", [torch.ones(4), 100], "type of elements"),
    "a memory format": ("to.other", [torch.ones(3), torch.ones(3).double(), False, True, 4], "memory format"),
    "eigenvalues": ("_linalg_eigvals.default", [torch.full((4, 4), NOT_A_NUMBER)], "finite"),
    "other kinds": ("_fft_c2c.default", [3, [0], 0, True], "kinds"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_arguments_that_stop_the_process_are_refused(what: str) -> None:
    """Each of these calls, made directly, ends in a signal or never."""
    target, arguments, words = HOSTILE[what]
    with pytest.raises(ValueError, match=words):
        checked_call(permitted_operator(f"aten.{target}"), arguments, {})


def test_sizes_and_types_that_fit_are_taken() -> None:
    norm = permitted_operator("aten.native_group_norm.default")
    for sizes in ((2, 4, 3), (4, 2, 3), (2, 12, 1)):
        x = torch.randn(2, 4, 3)
        torch.testing.assert_close(checked_call(norm, [x, None, None, *sizes, 2, 1e-5], {})[0], F.group_norm(x.reshape(sizes), 2).reshape(x.shape))
    assert checked_call(norm, [torch.ones(0, 4, 3), None, None, 0, 4, 3, 2, 1e-5], {})[0].shape == (0, 4, 3)
    assert checked_call(permitted_operator("aten.combinations.default"), [torch.arange(3)], {}).shape == (3, 2)
    assert checked_call(permitted_operator("aten.random.from"), [torch.arange(3), 5, 6], {}).tolist() == [5, 5, 5]
    assert checked_call(permitted_operator("aten.random.default"), [torch.ones(3)], {}).shape == (3,)
    assert checked_call(permitted_operator("aten.view_copy.dtype"), [torch.ones(4), torch.int32], {}).dtype is torch.int32
    assert checked_call(permitted_operator("aten.clone.default"), [torch.ones(4)], {"memory_format": torch.contiguous_format}).shape == (4,)


@pytest.mark.parametrize("sizes", [(2, 4, 3), (4, 2, 3)])
def test_group_norm_in_other_sizes_is_pytorchs(sizes: tuple[int, int, int]) -> None:
    model = Function(lambda x: torch.ops.aten.native_group_norm.default(x, None, None, *sizes, 2, 1e-5)[0])
    x = torch.randn(2, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = read(model, (x,), None).graph
    torch.testing.assert_close(torch.from_numpy(evaluate(graph, (x,))[0]), model(x), check_dtype=False)
    assert bool(through_torch(model, (x,))) == (sizes != tuple(x.shape))


@pytest.mark.parametrize("other", [-1, torch.tensor([3, -1])])
def test_the_least_integer_is_not_divided_by_minus_one(other: int | torch.Tensor) -> None:
    operator = permitted_operator(f"aten.div.{'Tensor' if isinstance(other, torch.Tensor) else 'Scalar'}_mode")
    with pytest.raises(ValueError, match="least"):
        checked_call(operator, [torch.tensor([1, LEAST]), other], {"rounding_mode": "trunc"})
    assert checked_call(operator, [torch.tensor([8, 8]), other], {"rounding_mode": "trunc"})[1] == -8
    assert checked_call(operator, [torch.tensor([-4.0, 4.0]), other], {"rounding_mode": "trunc"})[1] == -4


def test_what_repeats_elements_is_written_out_before_the_call() -> None:
    ones, zeros = torch.ones(1).expand(4), torch.zeros(1).expand(4)
    x = torch.randn(1, 4, 3)
    seen: list[Any] = []
    checked_call(Recording(seen), [x, ones, [zeros, None]], {"scale": ones})
    assert all(tensor.is_contiguous() for tensor in seen) and len(seen) == 4
    result = checked_call(permitted_operator("aten.native_group_norm.default"), [x, ones, zeros, 1, 4, 3, 2, 1e-5], {})
    torch.testing.assert_close(result[0], F.group_norm(x, 2))


class Recording:
    """An operator that records its tensor arguments."""

    _schema = torch.ops.aten.add.Tensor._schema

    def __init__(self, seen: list[torch.Tensor]) -> None:
        self.seen = seen

    def __call__(self, first: torch.Tensor, second: torch.Tensor, rest: list[torch.Tensor | None], *, scale: torch.Tensor) -> None:
        self.seen.extend(tensor for tensor in (first, second, *rest, scale) if tensor is not None)
