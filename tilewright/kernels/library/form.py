"""The operators of a library that compute a region, and the epilogue that each leaves for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.library.attention import attention_operation
from tilewright.kernels.library.pooling import pooling_operations
from tilewright.kernels.library.products import product_operations
from tilewright.kernels.library.softmax import softmax_operations
from tilewright.kernels.library.views import Operation


@dataclass(frozen=True)
class LibraryForm:
    """The operators that compute the region, or what it begins with, by name; `facts` are these names."""

    operations: Mapping[str, Operation]

    @property
    def facts(self) -> tuple[str, ...]:
        return tuple(self.operations)


Ways = Mapping[str, Callable[[], Operation]]
"""What finds the operation of each operator, or raises ValueError: Unsuitable, or because views overlap."""
FINDERS: Mapping[str, tuple[Callable[[Problem], Ways], ...]] = {
    "attention": (lambda problem: {"attention": partial(attention_operation, problem)},),
    "contraction": (product_operations,),
    "row reduction": (product_operations, pooling_operations, softmax_operations),
    "window": (product_operations, pooling_operations),
}
"""What is looked for in regions of each kind."""


def library_form(problem: Problem, operators: Sequence[str]) -> LibraryForm:
    """Those of the operators with which a library can compute the region. Raises Unsuitable if there is none."""
    operations: dict[str, Operation] = {}
    reasons: list[str] = []
    for find in FINDERS[problem.region.kind]:
        try:
            ways = find(problem)
        except Unsuitable as reason:
            reasons.append(str(reason))
            continue
        for name, way in ways.items():
            if name in operators:
                try:
                    operations[name] = way()
                except ValueError as reason:
                    reasons.append(f"{name}: {reason}")
    if not operations:
        raise Unsuitable("; ".join(reasons))
    return LibraryForm(operations)
