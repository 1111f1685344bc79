"""The schemas of GPUs, in the order in which they are asked."""

from __future__ import annotations

from tilewright.kernels.gpu.attention.schema import ATTENTION
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemv.schema import GEMV
from tilewright.kernels.gpu.map.schema import MAP
from tilewright.kernels.gpu.recurrence.schema import RECURRENCE
from tilewright.kernels.gpu.row_reduction.schema import ROW_REDUCTION
from tilewright.kernels.gpu.scan.schema import SCAN
from tilewright.kernels.gpu.tensor_attention.schema import TENSOR_ATTENTION
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.gpu.tensor_recurrence.schema import TENSOR_RECURRENCE
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.gpu.window.schema import WINDOW
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.gpu.winograd_pairs.schema import WINOGRAD_PAIRS
from tilewright.kernels.library.schema import library
from tilewright.kernels.schema import AnySchema

SCHEMAS: tuple[AnySchema, ...] = (
    MAP, WINDOW, ROW_REDUCTION, SCAN, GEMM, GEMV, DIRECT, TENSOR_CORES, WARPGROUP, WARPGROUP_PATCH, WINOGRAD, WINOGRAD_PAIRS,
    WINOGRAD_FUSED, ATTENTION, TENSOR_ATTENTION, RECURRENCE, TENSOR_RECURRENCE,
)  # fmt: skip
LIBRARY = library(
    ("convolution", "fft_convolution", "matmul", "attention", "max_pooling", "average_pooling", "softmax", "log_softmax"), (MAP, ROW_REDUCTION)
)
