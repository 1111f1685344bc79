"""The schemas of CPUs, in the order in which they are asked."""

from __future__ import annotations

from tilewright.kernels.cpu.amx.schema import AMX
from tilewright.kernels.cpu.attention.schema import ATTENTION
from tilewright.kernels.cpu.contraction.schema import CONTRACTION, NARROW_WEIGHTS, PAIRS
from tilewright.kernels.cpu.depthwise.schema import DEPTHWISE
from tilewright.kernels.cpu.few_queries.schema import FEW_QUERIES
from tilewright.kernels.cpu.loops.schema import LOOPS
from tilewright.kernels.cpu.recurrence.schema import RECURRENCE
from tilewright.kernels.cpu.tile_attention.schema import TILE_ATTENTION
from tilewright.kernels.cpu.winograd.schema import WINOGRAD
from tilewright.kernels.library.schema import library
from tilewright.kernels.schema import AnySchema

SCHEMAS: tuple[AnySchema, ...] = (
    AMX, CONTRACTION, NARROW_WEIGHTS, PAIRS, WINOGRAD, DEPTHWISE, ATTENTION, FEW_QUERIES, TILE_ATTENTION, RECURRENCE, *LOOPS,
)  # fmt: skip
LIBRARY = library(
    ("convolution", "fft_convolution", "matmul", "linear", "attention", "max_pooling", "average_pooling", "softmax", "log_softmax"), LOOPS
)
