"""Library calls as CUDA graphs over memory that stays in place, to be nodes of a larger graph.

A library decides on the host, in its first call, what to launch: cuDNN times its algorithms, cuBLAS makes a handle, kernels are loaded. A capture
permits none of that, so each call runs before it is captured, on the same thread, since PyTorch keeps cuDNN's choices by thread. What calls allocate
comes from one pool, which lives as long as any of the graphs. cuBLAS's workspaces too: PyTorch keeps one for each stream, in memory that it may
release later, so they are released before the captures, which then allocate their own, and after them, so that no later call of this stream uses
memory of the pool.

Two of the graphs must never run at the same time, as they share this memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tilewright.errors import UnsupportedOption


def captured(calls: Sequence[Callable[[], object]], device: torch.device) -> list[torch.cuda.CUDAGraph]:
    """Each call as a graph, see `handle_of`. Runs each call once, on a stream of its own; float32 is not rounded to TF32.

    Raises:
        UnsupportedOption: if this PyTorch cannot hand out what it has captured.
    """
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        cause = f"PyTorch {torch.__version__} cannot make a library's operators nodes of a CUDA graph"
        raise UnsupportedOption(cause, "install PyTorch 2.8 or later, or use vendor=False")
    torch.cuda.synchronize(device)  # what the calls read may still be on its way, on any stream
    stream, pool, graphs = torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), []
    with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream), _without_tf32():
        for call in calls:
            call()
        stream.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        for call in calls:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
            graphs.append(graph)
        torch._C._cuda_clearCublasWorkspaces()
    return graphs


def handle_of(graph: torch.cuda.CUDAGraph) -> int:
    """The driver's handle of a captured graph, valid while `graph` lives. What the graph uses is valid as long, also where it was copied."""
    return int(graph.raw_cuda_graph())


@contextmanager
def _without_tf32() -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, False
    try:
        yield
    finally:
        products.allow_tf32 = before
