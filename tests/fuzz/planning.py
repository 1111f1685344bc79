"""Processing of mutated models: all are read and planned, a few are compiled and called."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

import tilewright
from tests.fuzz.harness import Broken
from tilewright.compile import read
from tilewright.errors import InternalFault, TilewrightError
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate
from tilewright.hardware import machine
from tilewright.ir.graph import Graph
from tilewright.models import random_tensor
from tilewright.partition.plan import plan_program
from tilewright.runtime.executable import Executable
from tilewright.runtime.packing import torch_dtype
from tilewright.runtime.signature import unflatten

COMPILED = 24
"""One in COMPILED cases is compiled and called, if it is a valid model."""
LARGEST_CALL = 1 << 24
"""Maximum number of elements in all values of a model that is called."""


def prepare() -> None:
    """Gives mutants a kernel cache of their own, and imports everything before the children are forked."""
    os.environ["TILEWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="tilewright-fuzz-cache-")
    import onnx.reference  # noqa: F401
    import torch._export.serde.serialize

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tilewright.compile(torch.nn.Linear(2, 2), torch.ones(1, 2))


def read_and_plan(name: str) -> None:
    """Reads the model and plans it for a machine that need not be present. If its contents select it, compiles and calls it, and compares its results
    with those of the graph as read. Internal faults of Tilewright count as faults even if a region could run through PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", InternalFault)
        read_graph = read(name, (), None).graph
        graph, _ = simplify(read_graph)
        program = plan_program(graph, machine("x86-avx2"), 1)
        if zlib.crc32(Path(name).read_bytes()) % COMPILED or sum(value.elements for value in read_graph.values.values()) > LARGEST_CALL:
            return
        del program
        sys.setrecursionlimit(1000)
        results_are_right(tilewright.compile(name, threads=1), read_graph)


def results_are_right(executable: Executable, graph: Graph) -> None:
    """Calls it on random inputs and compares with the reference evaluation of a graph, ignoring elements that are sensitive to rounding: an element
    counts if inputs that differ in the fifth digit give it almost the same value."""
    generator = torch.Generator().manual_seed(0)
    signature = executable.signature
    leaves = [random_tensor(leaf.shape, torch_dtype(leaf.dtype), generator) if leaf.name else leaf.constant for leaf in signature.inputs]
    named = {leaf.name: value.clone() for leaf, value in zip(signature.inputs, leaves, strict=True) if leaf.name}
    plain = named.keys() >= {*graph.inputs} and not any(node.operator == "torch" for node in graph.nodes)
    arguments, keywords = unflatten(signature.input_tree, iter(leaves))
    try:
        results, _ = tree_flatten(executable(*arguments, **keywords))
    except (TilewrightError, IndexError, RuntimeError):
        return  # an index out of range, or an error of a PyTorch node
    if not plain:
        return
    given = [named[name] for name in graph.inputs]
    with np.errstate(all="ignore"):
        if not _casts_fit(graph, given):
            return
        wanted = evaluate(graph, given)
        nearly = evaluate(graph, [named[name] * (1 + 1e-5) if named[name].is_floating_point() else named[name] for name in graph.inputs])
    for leaf, result in zip(signature.outputs, results, strict=True):
        if leaf.kind == "value":
            _compare(f"output {leaf.index}", np.asarray(result), wanted[leaf.index], nearly[leaf.index])


def _casts_fit(graph: Graph, inputs: list[torch.Tensor]) -> bool:
    """Whether no float is cast to an integer type that cannot hold it, which is undefined."""
    casts = [(node.inputs[0], graph.values[node.outputs[0]].dtype) for node in graph.nodes if node.operator == "cast"]
    casts = [(name, kind) for name, kind in casts if graph.values[name].dtype in ("f32", "f64") and kind not in ("f32", "f64", "bf16", "f16", "bool")]
    for (_, kind), value in zip(casts, evaluate(replace(graph, outputs=tuple(name for name, _ in casts)), inputs), strict=True):
        limits = torch.iinfo(torch_dtype(kind))
        if not ((value > limits.min - 1.0) & (value < limits.max + 1.0)).all():
            return False
    return True


def _compare(place: str, found: np.ndarray, wanted: np.ndarray, nearly: np.ndarray) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise Broken(f"{place} is {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}")
    found, wanted, nearly = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (found, wanted, nearly))
    with np.errstate(all="ignore"):
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
        firm = np.isfinite(wanted) & (np.abs(wanted - nearly) <= 1e-3 * scale) & (np.abs(wanted) < 1e30)
        wrong = firm & ~(np.abs(found - wanted) <= 1e-2 * scale)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Broken(f"{place}: {int(wrong.sum())} of {wrong.size} elements are wrong, {found[at]} for {wanted[at]} at {at}")
