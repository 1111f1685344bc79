"""A reference executor of programs: every kernel, GPU kernels included, runs in the interpreter over NumPy buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.compiled import Bundle, Case, compare
from tests.gpu_cases import BFLOAT16_NAN, at_base, offsets
from tilewright.codegen.interpreter import run
from tilewright.frontend.imported import Imported, unsupported
from tilewright.frontend.torch_import import import_module
from tilewright.frontend.torch_operators import replayed
from tilewright.graph.passes import simplify
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.region import Program, Storage
from tilewright.partition.plan import plan_program
from tilewright.runtime.packing import pack, prepared


def numpy_type(storage: Storage) -> np.dtype[Any]:
    """The type of the interpreter's array; bfloat16 is held as bits."""
    return np.dtype(np.uint16 if storage.value.dtype == "bf16" else ELEMENT_TYPES[storage.value.dtype].numpy)


def poisoned(storage: Storage) -> np.ndarray:
    """A buffer as a kernel may find it: zeros in halo and alignment padding, NaN (the least value for integers) elsewhere."""
    kind = numpy_type(storage)
    flat = np.zeros(storage.layout.size, kind)
    worst: Any = np.nan if kind.kind == "f" else True if kind.kind == "b" else BFLOAT16_NAN if kind == np.uint16 else np.iinfo(kind).min
    flat[offsets(storage.layout).ravel()] = worst
    return flat


def packed(program: Program, storage: Storage) -> np.ndarray:
    assert storage.source is not None
    constant = prepared(program.graph.constants[storage.source], storage)
    flat = pack(constant, storage.layout)
    return (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy().astype(numpy_type(storage))


def run_program(
    program: Program, inputs: Mapping[str, np.ndarray], out_of_range: dict[str, list[int]] | None = None
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Values of the graph's outputs by name, and the interpreter's reports. `out_of_range` receives the indices that kernels found out of range."""
    storage: dict[str, Storage] = dict(program.storage)
    for lowered in program.regions:
        storage.update({name: entry for name, entry in lowered.storage.items() if name not in program.storage})
    checked = {name for lowered in program.regions for name in lowered.checks}
    memory: dict[str, np.ndarray] = {}
    written: set[str] = set()

    def buffer(name: str) -> np.ndarray:
        if name not in memory:
            entry = storage[name]
            if name in inputs:
                assert entry.layout.is_row_major
                memory[name] = np.ascontiguousarray(inputs[name]).reshape(-1)
                assert memory[name].dtype == numpy_type(entry), name
                written.add(name)
            elif entry.source is not None:
                memory[name] = packed(program, entry)
                written.add(name)
            elif name in checked:
                memory[name] = np.zeros(entry.layout.size, np.int64)
            else:
                memory[name] = poisoned(entry)
        return memory[name]

    faults: list[str] = []
    for lowered in program.regions:
        assert lowered.region.kind != "torch", lowered.region.name
        for step in range(lowered.repeat):
            for call in lowered.calls:
                kernel = next(kernel for kernel in lowered.kernels if (kernel.name, kernel.trips) == (call.kernel, call.trips))
                roots = [program.aliases.get(name, name) for name in call.arguments]
                arrays = [at_base(buffer(root), storage[name].layout) for root, name in zip(roots, call.arguments, strict=True)]
                pairs = list(zip(kernel.parameters, call.arguments, strict=True))
                if call.shifts:
                    own_parts = zip(arrays, call.shifts, kernel.parameters, strict=True)
                    arrays = [array[shift : shift + parameter.size] for array, shift, parameter in own_parts]
                for parameter, name in pairs:
                    if parameter.writable and (name in inputs or storage[name].source is not None):
                        faults.append(f"{kernel.name} writes {name}")
                    if not parameter.writable and program.aliases.get(name, name) not in written and storage[name].layout.size:
                        faults.append(f"{kernel.name} reads {name} before it is written")
                # a kernel may rely on the zeros in the halo of its own tiles, and a chain in that of its results; their other elements are poisoned
                wholes = [whole for _, whole in lowered.region.wholes]  # of which it reads what was stored before, and what it has stored itself
                own = (*lowered.storage, *(lowered.region.outputs if lowered.region.stages else ()), *wholes)
                known = {name for name in own if storage[name].source is None and storage[name].layout.is_padded}
                known |= {name for name in wholes if program.aliases.get(name, name) in written}
                ready = [parameter.name for parameter, name in pairs if parameter.writable and name in written | known]
                report = run(kernel, arrays, [step] * len(kernel.scalars), ready)
                faults += report.faults
                stored = [name for parameter, name in pairs if parameter.writable]
                written.update((*stored, *(program.aliases.get(name, name) for name in stored)))
    if out_of_range is not None:
        out_of_range.update((name, memory[name].tolist()) for name in checked & memory.keys())
    results = {}
    for name in program.graph.outputs:
        entry = storage[name]
        results[name] = buffer(name)[offsets(entry.layout).ravel()].reshape(entry.value.shape)
    return results, faults


def returned(imported: Imported, results: Sequence[np.ndarray], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The model's results, given the graph's outputs."""
    leaves = []
    for output in imported.outputs:
        assert output.kind in ("value", "input"), output
        tensor = torch.from_numpy(results[output.index].copy()) if output.kind == "value" else inputs[output.index]
        leaves.append(replayed(tensor, output.calls))
    return leaves


def check_interpreted(cases: Sequence[Case], machine: Machine, threads: int = 1, chains: bool = True) -> Program:
    """Plans the cases as one program for the machine, with chains where they are predicted faster or without any, interprets it on fresh inputs, and
    compares each. Returns the program."""
    for case in cases:
        case.module.eval()
    bundle = Bundle(cases).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imported = import_module(bundle, [x for case in cases for x in case.inputs])
    graph, _ = simplify(imported.graph)
    assert not unsupported(graph)
    program = plan_program(graph, machine, threads, chains=chains)
    inputs = [case.fresh_inputs() for case in cases]
    flat = [x for part in inputs for x in part]
    graph_inputs = {graph.inputs[k]: flat[leaf].numpy() for leaf, k in enumerate(imported.leaves) if k is not None}
    results, faults = run_program(program, graph_inputs)
    leaves = iter(returned(imported, [results[name] for name in graph.outputs], flat))
    failures = list(dict.fromkeys(faults))
    for case, part in zip(cases, inputs, strict=True):
        with torch.no_grad():
            count = len(torch.utils._pytree.tree_leaves(copy.deepcopy(case.module)(*part)))
        try:
            compare(case, [next(leaves) for _ in range(count)], part)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n\n".join(failures)
    return program
