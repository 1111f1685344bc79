"""cuDNN's convolution algorithms one by one, through its C interface, because PyTorch's benchmark mode does not say which one it takes.

Names and numbers are those of cudnn_cnn.h (cuDNN 9, legacy interface). Arithmetic is plain fp32 (CUDNN_FMA_MATH): no TF32.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from typing import Any

import torch

ALGORITHMS = ("implicit_gemm", "implicit_precomp_gemm", "gemm", "direct", "fft", "fft_tiling", "winograd", "winograd_nonfused")
"""Algorithms in the order of cudnnConvolutionFwdAlgo_t."""
FEWER_MULTIPLICATIONS = frozenset({"fft", "fft_tiling", "winograd", "winograd_nonfused"})
"""Algorithms with fewer multiplications than the direct sum."""
FLOAT, CROSS_CORRELATION, FMA_MATH = 0, 1, 3
FORMATS = {torch.contiguous_format: 0, torch.channels_last: 1}


class Unsupported(Exception):
    """cuDNN does not have this algorithm for this convolution; the message is its status."""


def _library() -> ctypes.CDLL:
    torch.backends.cudnn.version()  # loads PyTorch's copy of the library
    return ctypes.CDLL("libcudnn.so.9")


class Convolution:
    """One convolution of batch 1 under one algorithm and memory format; call it with x, w, y tensors of that format, on the current stream.

    Raises:
        Unsupported: if cuDNN rejects the combination.
    """

    def __init__(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, stride: int, padding: int, algorithm: str, layout: Any) -> None:
        self._dll = _library()
        self._algorithm = ALGORITHMS.index(algorithm)
        self._handle = self._made("cudnnCreate")
        self._x, self._y = (self._tensor(t, FORMATS[layout]) for t in (x, y))
        self._w = self._made("cudnnCreateFilterDescriptor")
        self._call("cudnnSetFilter4dDescriptor", self._w, FLOAT, FORMATS[layout], *w.shape)
        self._convolution = self._made("cudnnCreateConvolutionDescriptor")
        self._call("cudnnSetConvolution2dDescriptor", self._convolution, padding, padding, stride, stride, 1, 1, CROSS_CORRELATION, FLOAT)
        self._call("cudnnSetConvolutionMathType", self._convolution, FMA_MATH)
        size = c_size_t()
        self._call(
            "cudnnGetConvolutionForwardWorkspaceSize", self._handle, self._x, self._w, self._convolution, self._y, self._algorithm, byref(size)
        )
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device=x.device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._dll, name)(*arguments)
        if status:
            raise Unsupported(f"{name}: status {status}")

    def _made(self, name: str) -> c_void_p:
        handle = c_void_p()
        self._call(name, byref(handle))
        return handle

    def _tensor(self, tensor: torch.Tensor, layout: int) -> c_void_p:
        descriptor = self._made("cudnnCreateTensorDescriptor")
        self._call("cudnnSetTensor4dDescriptor", descriptor, layout, FLOAT, *(c_int(extent) for extent in tensor.shape))
        return descriptor

    def __call__(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        self._call("cudnnSetStream", self._handle, c_void_p(torch.cuda.current_stream().cuda_stream))
        one, zero = c_float(1), c_float(0)
        self._call(
            "cudnnConvolutionForward", self._handle, byref(one), self._x, c_void_p(x.data_ptr()), self._w, c_void_p(w.data_ptr()),
            self._convolution, self._algorithm, c_void_p(self.workspace.data_ptr()), c_size_t(self.workspace.numel()), byref(zero),
            self._y, c_void_p(y.data_ptr()),
        )  # fmt: skip

    def close(self) -> None:
        self._call("cudnnDestroy", self._handle)
