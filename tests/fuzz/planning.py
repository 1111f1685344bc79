"""What becomes of a mutated model: all are read and planned, few are compiled and called."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import torch

import tilewright
from tilewright.compile import read
from tilewright.errors import TilewrightError
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.models import random_tensor
from tilewright.partition.plan import plan_program
from tilewright.runtime.buffers import torch_dtype
from tilewright.runtime.signature import unflatten

COMPILED = 24
"""One case of so many is compiled and called, where it is a model at all."""
LARGEST_CALL = 1 << 24
"""Elements of all values of a model that is called."""


def prepare() -> None:
    """Kernels of mutants are nobody else's, and what is imported once is imported before the children are forked."""
    os.environ["TILEWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="tilewright-fuzz-cache-")
    import onnx.reference  # noqa: F401
    import torch._export.serde.serialize  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tilewright.compile(torch.nn.Linear(2, 2), torch.ones(1, 2))


def read_and_plan(name: str) -> None:
    """Reads the model and plans it for a machine that need not be here; compiles and calls it where its contents fall to that share.
    Results of a mutant may be anything; a call may also be refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(read(name, (), None).graph)
        program = plan_program(graph, machine("x86-avx2"), 1)
        if zlib.crc32(Path(name).read_bytes()) % COMPILED or sum(value.elements for value in graph.values.values()) > LARGEST_CALL:
            return
        del program
        sys.setrecursionlimit(1000)
        executable = tilewright.compile(name, threads=1)
        generator = torch.Generator().manual_seed(0)
        leaves = [
            random_tensor(leaf.shape, torch_dtype(leaf.dtype), generator) if leaf.name else leaf.constant for leaf in executable.signature.inputs
        ]
        arguments, keywords = unflatten(executable.signature.input_tree, iter(leaves))
        try:
            executable(*arguments, **keywords)
        except (TilewrightError, IndexError, RuntimeError):
            pass  # an index out of range, or what PyTorch refuses for its own nodes
