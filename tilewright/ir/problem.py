"""What every stage after partitioning takes: a region, and all that is known of the values it touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.ir.expr import variables
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region, Storage


@dataclass(frozen=True, eq=False)
class Problem:
    """A region to compute and what decides how: everything but the machine.

    region: the steps, and the names of what they read and store.
    layouts: by name, how each value that the region reads or stores lies in memory. A step whose result has none is held inside the kernel.
    values: by name, shape and element type of the same values.
    constants: names of values that are known when compiling, so that they may be stored once more, packed or transformed, for this region alone.

    Compared and hashed by identity: `tuning.problems.key_of` digests the content."""

    region: Region
    layouts: Mapping[str, Layout]
    values: Mapping[str, Value]
    constants: frozenset[str] = frozenset()
    found: dict[object, Any] = field(default_factory=dict, init=False, repr=False)
    """What stages found out once and hand on, such as forms by the function that matched them (`kernels.schema.form_of`)."""

    @property
    def dtypes(self) -> dict[str, str]:
        """Element types by name."""
        return {name: value.dtype for name, value in self.values.items()}

    @property
    def is_whole(self) -> bool:
        """Whether nothing outside decides what the region computes, as a loop's step number does."""
        for step in self.region.steps:
            own = {*step.axes, *step.reduction}
            if not variables(*step.bodies, *step.index) <= own:
                return False
        return True

    def with_storage(self, storage: Mapping[str, Storage]) -> Problem:
        """The problem with the buffers that lowering adds among its values."""
        layouts = {name: entry.layout for name, entry in storage.items()}
        values = {name: entry.value for name, entry in storage.items()}
        return replace(self, layouts={**self.layouts, **layouts}, values={**self.values, **values})
