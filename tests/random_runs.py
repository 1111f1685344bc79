"""Runs random graphs, compiled, or planned for a GPU and interpreted, and collects their faults."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

import tilewright
from tests.compiled import Bundle, Case, poison
from tests.interpreted import returned, run_program
from tests.random_graphs import RandomCase
from tilewright.frontend.imported import unsupported
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.partition.plan import plan_program


def together(cases: Sequence[RandomCase]) -> tuple[Bundle, list[torch.Tensor]]:
    """The cases as one module, with its inputs: exporting eight graphs takes little more time than exporting one."""
    parts = [Case(case.name, case.module, case.inputs, fixed=True) for case in cases]
    return Bundle(parts).eval(), [x for case in cases for x in case.inputs]


def compiled_faults(cases: Sequence[RandomCase], target: str, threads: int = 1) -> list[list[str]]:
    """The faults of each case, with all cases compiled as one program for a present target and called twice over poisoned memory."""
    module, inputs = together(cases)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*operators? runs? through PyTorch")
        executable = tilewright.compile(module, inputs, target=target, threads=threads)
    try:
        poison(executable)
        at = [x.to(executable._device) for x in inputs]
        faults: list[list[str]] = [[] for _ in cases]
        for _ in range(2):
            for own, case, found in zip(faults, cases, executable(*at), strict=True):
                own += case.wrong(found)
        return faults
    finally:
        executable.close()


def interpreted_faults(cases: Sequence[RandomCase], target: str) -> list[list[str]]:
    """The faults of each case, with all cases planned for a target as one program and its kernels interpreted; races and accesses out of bounds in
    any kernel are listed with the first case. Cases with operators that run through PyTorch are left out."""
    module, inputs = together(cases)
    imported = import_module(module, inputs)
    graph, _ = simplify(imported.graph)
    if unsupported(graph):
        covered = [not unsupported(simplify(import_module(case.module, case.inputs).graph)[0]) for case in cases]
        if not all(covered):
            kept = iter(interpreted_faults([case for case, one in zip(cases, covered, strict=True) if one], target) if any(covered) else [])
            return [next(kept) if one else [] for one in covered]
    program = plan_program(graph, machine(target), 1)
    given = {graph.inputs[k]: inputs[leaf].numpy() for leaf, k in enumerate(imported.leaves) if k is not None}
    results, reported = run_program(program, given)
    leaves = iter(returned(imported, [results[name] for name in graph.outputs], inputs))
    found = [case.wrong([next(leaves) for _ in case.outputs]) for case in cases]
    found[0] = [*found[0], *dict.fromkeys(reported)]
    return found
