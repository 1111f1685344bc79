"""The input of every stage after partitioning: a region, and all that is known of the values it reads and stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.ir.expr import loads, variables
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout
from tilewright.ir.region import Region, Storage


@dataclass(frozen=True, eq=False)
class Problem:
    """A region to compute and everything that decides how, except the machine.

    region: the steps, and the names of what they read and store.
    layouts: by name, how each value that the region reads or stores is laid out in memory. The result of a step without a layout stays inside the
    kernel.
    values: by name, shape and element type of the same values.
    constants: names of values that are known at compile time. Lowering may store a packed or transformed copy of them for this region.
    one: the problem of one image, if this is that of two, for kernels of any number of images that are called for one (`kernels.images`).

    Compared and hashed by identity: `tuning.problems.key_of` digests the content."""

    region: Region
    layouts: Mapping[str, Layout]
    values: Mapping[str, Value]
    constants: frozenset[str] = frozenset()
    one: Problem | None = None
    found: dict[object, Any] = field(default_factory=dict, init=False, repr=False)
    """Results that one stage passes on to later ones, such as forms, keyed by the function that matched them (`kernels.schema.form_of`)."""

    @property
    def dtypes(self) -> dict[str, str]:
        """Element types by name."""
        return {name: value.dtype for name, value in self.values.items()}

    @property
    def is_whole(self) -> bool:
        """Whether the region depends on no variable from outside, such as a loop's step number."""
        for step in self.region.steps:
            own = {*step.axes, *step.reduction}
            if not variables(*step.bodies, *step.index) <= own:
                return False
        return True

    @property
    def updates(self) -> bool:
        """Whether the region stores some elements of a value and leaves the others as they are (`partition.updates`)."""
        return any(load.buffer in step.names for step in self.region.steps for load in loads(*step.bodies))

    def place_of(self, name: str) -> tuple[slice, ...]:
        """The part that a value is of the value in whose memory it is (`Region.memory_of`): its indices along each dimension."""
        own, whole = self.layouts[name], self.layouts[self.region.memory_of(name)]
        begins = [a[0] - b[0] for a, b in zip(own.box(), whole.box(), strict=True)]
        halos = [a[0] - b[0] for a, b in zip(own.halo, whole.halo, strict=True)]
        return tuple(slice(at + halo, at + halo + extent) for at, halo, extent in zip(begins, halos, own.shape, strict=True))

    def with_storage(self, storage: Mapping[str, Storage]) -> Problem:
        """The problem extended by the buffers that lowering adds."""
        layouts = {name: entry.layout for name, entry in storage.items()}
        values = {name: entry.value for name, entry in storage.items()}
        return replace(self, layouts={**self.layouts, **layouts}, values={**self.values, **values})
