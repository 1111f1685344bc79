"""Runs library calls (`ir.library`) through PyTorch: cuDNN and cuBLAS on GPUs, where `captured` makes CUDA graphs of them; on CPUs oneDNN for
convolutions and LSTMs, and the BLAS of PyTorch for products; PyTorch's own kernels for pooling, and for attention whichever it takes for the sizes.

The operators are those below and no others, whatever a file says; their views are checked when it is read (`runtime.soundness`). Filters of oneDNN,
matrices of MKL's linear maps and weights of cuDNN's recurrent layers are reordered once. Products are stored in place, and so are cuDNN's
convolutions if elements of their place are adjacent. PyTorch cannot store other convolutions in a given tensor, but oneDNN's may be added to one
whose elements are adjacent; all other results are copied to their place. Fourier transforms are those of PyTorch: MKL's on x86.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, TypeAlias

import torch

from tilewright.ir.library import Attention, Convolution, LibraryCall, Pooling, Product, Recurrent, Softmax, View
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.packing import torch_dtype

Run: TypeAlias = Callable[..., object]
"""Computes (inputs, outs), each a tensor: stores the operator's results for the inputs in outs."""


def viewed(flat: torch.Tensor, view: View, base: int = 0) -> torch.Tensor:
    """A view of a buffer's storage, whose address for kernels is `base` elements after its start."""
    return flat.as_strided(view.sizes, view.strides, flat.storage_offset() + base + view.offset)


def prepared(call: LibraryCall, dtype: torch.dtype, device: torch.device, constants: Sequence[torch.Tensor]) -> Run:
    """What computes the call for a first input of this type on a device. `constants`: the inputs that have to be constant, which it may reorder."""
    operator = call.operator
    if isinstance(operator, Attention):
        return _attention(call, operator, device)
    if isinstance(operator, Pooling):
        return _pooling(call, operator, dtype)
    if isinstance(operator, Softmax):
        normalise = {"softmax": torch.ops.aten._softmax, "log_softmax": torch.ops.aten._log_softmax}[operator.name]
        return _stored(call, dtype, normalise, operator.dim, False)
    if operator.name == "matmul":
        return _product if call.outs[0].sizes[0] == 1 else _products
    if isinstance(operator, Recurrent):
        return _recurrent(call, operator, constants)
    (b,) = (constant.to(dtype) for constant in constants)
    if isinstance(operator, Product):
        return _linear(call, b)
    return {"convolution": _convolution, "fft_convolution": _fft_convolution}[operator.name](call, operator, b)


def _attention(call: LibraryCall, operator: Attention, device: torch.device) -> Run:
    """PyTorch's attention: by its kernel for CPUs, on GPUs by cuDNN's, FlashAttention or the memory-efficient one, and where they do not take sizes
    or types by products and a softmax."""
    queries, keys = call.inputs[0].sizes[2], call.inputs[1].sizes[2]
    causal, fixed = operator.shift == 0, None
    if operator.shift is not None and not causal:  # PyTorch's mask begins with the first key
        fixed = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(operator.shift)
    shared = call.inputs[0].sizes[1] != call.inputs[1].sizes[1]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> None:
        *masks, out = rest
        mask = masks[0] if masks else fixed
        out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=operator.scale, enable_gqa=shared))

    return run


def _stored(call: LibraryCall, dtype: torch.dtype, function: Any, *arguments: object) -> Run:
    """What computes a function of ATen of a single input. In place only if its own result would have the strides of that place, since its kernels
    store as if it had; otherwise the result is copied."""
    (a,) = call.inputs
    strides = function.default(torch.empty_strided(a.sizes, a.strides, dtype=dtype, device="meta"), *arguments).stride()
    (out,) = call.outs
    alike = all(own == its for size, own, its in zip(out.sizes, strides, out.strides, strict=True) if size != 1)
    if alike:
        return lambda a, out: function.out(a, *arguments, out=out)
    return lambda a, out: out.copy_(function.default(a, *arguments))


def _pooling(call: LibraryCall, operator: Pooling, dtype: torch.dtype) -> Run:
    rank = len(operator.window)
    each = zip(call.inputs[0].sizes[2:], operator.window, operator.stride, operator.padding, strict=True)
    dims = tuple(dim for dim, taps in enumerate(operator.window, 2) if taps != 1)
    if dims and all(pad == 0 and (taps == size or taps == step == 1) for size, taps, step, pad in each):  # whole dimensions
        if operator.name == "max_pooling":
            return lambda a, out: torch.amax(a, dims, True, out=out)
        if operator.divisor in (None, 1, prod(operator.window)):
            reduce = torch.sum if operator.divisor == 1 else torch.mean
            return lambda a, out: reduce(a, dims, True, out=out)
    places = (operator.window, operator.stride, operator.padding)
    if operator.name == "average_pooling":
        average = (torch.ops.aten.avg_pool2d, torch.ops.aten.avg_pool3d)[rank - 2]
        return _stored(call, dtype, average, *places, operator.ceiling, operator.padded, operator.divisor)
    greatest = (torch.ops.aten.max_pool2d, torch.ops.aten.max_pool3d)[rank - 2].default
    return lambda a, out: out.copy_(greatest(a, *places, operator.dilation, operator.ceiling))


def _linear(call: LibraryCall, b: torch.Tensor) -> Run:
    """The product with a matrix, which MKL has packed for this number of rows if it takes the type."""
    if b.device.type != "cpu" or b.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return lambda a, _, out: _product(a, b, out)
    rows, matrix = call.inputs[0].sizes[1], b[0].t().contiguous()
    packed = torch.ops.mkl._mkl_reorder_linear_weight(matrix, rows)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out[0].copy_(torch.ops.mkl._mkl_linear(a[0], packed, matrix, None, rows))

    return run


def transform_extents(extents: Sequence[int]) -> tuple[int, ...]:
    """The least extents that are not smaller and have no prime factors but 2, 3 and 5, for which transforms are fast."""

    def is_smooth(extent: int) -> bool:
        for factor in (2, 3, 5):
            while extent % factor == 0:
                extent //= factor
        return extent == 1

    return tuple(next(larger for larger in range(extent, 2 * extent + 1) if is_smooth(larger)) for extent in extents)


def _fft_convolution(call: LibraryCall, operator: Convolution, b: torch.Tensor) -> Run:
    """The convolution as a product of transforms: with both factors extended to L elements by zeros, F(out) = F(a) * conj(F(b)) in the places where
    no filter wraps around (the correlation theorem). Filters are transformed once; each frequency is a product over the channels of a group."""
    dims = tuple(range(2, 2 + len(operator.stride)))
    extents, groups, inside = transform_extents(call.inputs[0].sizes[2:]), operator.groups, b.shape[1]
    filters = torch.fft.rfftn(b, s=extents, dim=dims).conj().resolve_conj()
    frequencies = filters.shape[2:]
    # [frequencies, groups, channels, outputs of a group]
    filters = filters.reshape(groups, -1, inside, frequencies.numel()).permute(3, 0, 2, 1).contiguous()

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        images = torch.fft.rfftn(a.contiguous(), s=extents, dim=dims).reshape(-1, groups, inside, frequencies.numel()).permute(3, 1, 0, 2)
        products = images * filters if inside == 1 else images @ filters
        results = torch.fft.irfftn(products.permute(2, 1, 3, 0).reshape(*out.shape[:2], *frequencies), s=extents, dim=dims)
        out.copy_(results[(slice(None), slice(None), *(slice(extent) for extent in out.shape[2:]))])

    return run


def _convolution(call: LibraryCall, operator: Convolution, b: torch.Tensor) -> Run:
    padding = (0,) * len(operator.stride)
    order = torch.channels_last if len(padding) == 2 else torch.channels_last_3d
    if b.device.type == "cpu" and _in_onednn(b.dtype):
        arguments = (padding, operator.stride, operator.dilation, operator.groups)
        reordered = torch.ops.mkldnn._reorder_convolution_weight(b.contiguous(), *arguments, call.inputs[0].sizes)

        def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if out.is_contiguous(memory_format=order):
                torch.ops.mkldnn._convolution_pointwise_.binary(out.zero_(), a, reordered, None, *arguments, "add", None, None, (), None)
            else:
                out.copy_(torch.ops.mkldnn._convolution_pointwise(a, reordered, None, *arguments, "none", (), None))

        return run
    filters = b.contiguous(memory_format=order)
    choice = {"benchmark": True, "deterministic": True, "allow_tf32": False}
    """The fastest in its first call of cuDNN's deterministic algorithms."""

    def run_plain(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if out.is_cuda and out.is_contiguous(memory_format=order):
            torch.ops.aten.cudnn_convolution.out(a, filters, padding, operator.stride, operator.dilation, operator.groups, **choice, out=out)
            return
        with torch.backends.cudnn.flags(enabled=True, **choice):
            out.copy_(torch.ops.aten.convolution(a, filters, None, operator.stride, padding, operator.dilation, False, padding, operator.groups))

    return run_plain


def _in_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN has convolutions of this type on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    narrow = {torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported}
    return bool(narrow[dtype]()) if dtype in narrow else dtype == torch.float32


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a[0], b[0], out=out[0])


def _products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(a, b, out=out)


def _recurrent(call: LibraryCall, operator: Recurrent, constants: Sequence[torch.Tensor]) -> Run:
    """The recurrent layer by ATen's operator of its name: on CPUs oneDNN's for an LSTM and PyTorch's own for others, on GPUs cuDNN's, for which all
    weights are in one piece of memory."""
    directions, states, units = operator.directions, operator.states, call.inputs[1].sizes[1]
    each = len(constants) // directions
    weights: list[torch.Tensor] = []
    for direction in range(directions):
        own = [weight.clone(memory_format=torch.contiguous_format) for weight in constants[direction * each : (direction + 1) * each]]
        weights += own if len(own) != 3 else [*own, torch.zeros_like(own[-1])]  # PyTorch adds a second bias
    stride, is_biased = len(weights) // directions, each > 2
    if torch.backends.cudnn.is_acceptable(weights[0]):
        mode = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}[operator.name]
        inputs = call.inputs[0].sizes[2]
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(weights, stride, inputs, mode, units, 0, 1, False, operator.bidirectional)
    compute = getattr(torch.ops.aten, operator.name).input

    def run(a: torch.Tensor, *rest: torch.Tensor) -> None:
        outs, kinds = rest[-len(call.outs) :], states // directions
        before = [torch.stack(rest[kind:states:kinds]) for kind in range(kinds)]
        first = before if operator.name == "lstm" else before[0]
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False) if a.is_cuda else nullcontext():
            result, *after = compute(a, first, weights, is_biased, 1, 0.0, False, operator.bidirectional, False)
        outs[0].copy_(result)
        for number, out in enumerate(outs[1:]):
            out.copy_(after[number % kinds][number // kinds])

    return run


def bound_calls(buffers: Buffers, model: Mapping[int, BoundCall] | None) -> dict[int, BoundCall]:
    """The library calls of a program by region. `model`: those of another executable of the program, whose reordered filters they share."""
    regions = enumerate(buffers.program.regions)
    return {i: BoundCall(region.library, buffers, model[i] if model else None) for i, region in regions if region.library is not None}


class BoundCall:
    """A library call over an executable's buffers. `model`: the same call of another executable, whose reordered filters it shares."""

    def __init__(self, call: LibraryCall, buffers: Buffers, model: BoundCall | None = None) -> None:
        self._call, self._buffers = call, buffers
        self._fixed = {view: self._view(view, (), ()) for view in call.views if buffers.external(view.name) is None}
        dtype = torch_dtype(buffers.program.storage[call.inputs[0].name].value.dtype)
        constants = [self._fixed[view] for view in call.constants]
        self._run: Run = model._run if model is not None else prepared(call, dtype, buffers.device, constants)

    def _view(self, view: View, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self._buffers.flat(view.name, inputs, outputs)
        return viewed(flat, view, self._buffers.program.base_bytes(view.name) // flat.itemsize)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], threads: int) -> None:
        """Runs the call over the caller's tensors; on a CPU with this many threads."""
        with torch.no_grad():
            tensors = (self._fixed[view] if view in self._fixed else self._view(view, inputs, outputs) for view in self._call.views)
            before = torch.get_num_threads()
            if threads == before or self._buffers.device.type != "cpu":
                self._run(*tensors)
                return
            torch.set_num_threads(threads)
            try:
                self._run(*tensors)
            finally:
                torch.set_num_threads(before)
