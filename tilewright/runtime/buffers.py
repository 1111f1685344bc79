"""The memory of one executable: its arena, its packed constants, and the location of each buffer of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from weakref import WeakValueDictionary

import torch

from tilewright.errors import IndexOutOfRange
from tilewright.frontend.tensor_memory import same_bits
from tilewright.runtime.accesses import Extent
from tilewright.runtime.loadable import LoadableProgram
from tilewright.runtime.memory_plan import MemoryPlan, Places, assign_places, plan_memory
from tilewright.runtime.output_pool import LEAST_BYTES, OutputPool
from tilewright.runtime.packing import pack, prepared, torch_dtype, unpack


class SharedConstants:
    """Constants that the programs of one model, for different sizes, share: as the model has them, and packed as kernels read them. Each lives as
    long as a program uses it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        self._packed: WeakValueDictionary[tuple[object, ...], torch.Tensor] = WeakValueDictionary()

    def constants(self, constants: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The constants of a graph; those that are equal to one of the same name in an earlier graph are the same tensor."""
        result = {}
        for name, tensor in constants.items():
            known = self._known.get(name)
            same = known is tensor or (known is not None and same_bits(known, tensor))
            result[name] = self._known[name] = known if known is not None and same else tensor
        return MappingProxyType(result)

    def packed(self, program: LoadableProgram, names: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Flat tensors on the device for the named buffers; those with the same source, view, matrix, layout and dtype are one tensor."""
        result: dict[str, torch.Tensor] = {}
        for name in names:
            storage = program.storage[name]
            source = program.constant_source(name)
            assert source is not None, name
            constant = program.graph.constants[source]
            # a program keeps its constants, so that no other tensor has the address while what is packed lives; an empty one has no address
            place = (constant.data_ptr(), constant.shape, constant.dtype) if constant.numel() else source
            key = (place, storage.view, storage.matrix, storage.numbers, storage.layout, storage.value.dtype, device)
            made = self._packed.get(key)
            if made is None:
                made = pack(prepared(constant, storage), storage.layout).to(device)
                self._packed[key] = made
            result[name] = made
        return result


def allocation(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, zeroed: bool = False) -> Callable[[], torch.Tensor]:
    """A function that makes fresh row-major tensors, uninitialised unless `zeroed`; a GPU must be PyTorch's current device.

    Large tensors on a CPU come from a pool. For others the function that PyTorch's own generated code calls is used if this PyTorch has it: it takes
    a third of the time of `torch.empty`.
    """
    if zeroed:
        return partial(torch.zeros, shape, dtype=dtype, device=device)
    if device.type == "cpu" and prod(shape) * dtype.itemsize >= LEAST_BYTES:
        return OutputPool(shape, dtype)
    quick = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    if quick is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    strides = tuple(prod(max(extent, 1) for extent in shape[i + 1 :]) for i in range(len(shape)))
    return partial(quick, shape, strides, dtype)


class Buffers:
    """Arena and constants on one device. Clones share the constants, but not the arena.

    The caller's buffers have no fixed address: `external` gives their number, inputs first, then outputs, and `slot` the number of the address, among
    those of `addresses`, that kernels receive for them or for slices of them. `constants` are those of a clone; others are packed, or shared through
    `shared_constants`.
    """

    def __init__(
        self,
        program: LoadableProgram,
        device: torch.device,
        alignment: int,
        constants: Mapping[str, torch.Tensor] | None = None,
        shared_constants: SharedConstants | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """`cache_bytes`: as in `plan_memory`."""
        self.program = program
        self.device = device
        self.places: Places = assign_places(program)
        self.plan: MemoryPlan = plan_memory(program, alignment, cache_bytes)
        if constants is None:
            constants = (shared_constants or SharedConstants()).packed(program, self.places.constants, device)
        self.constants: Mapping[str, torch.Tensor] = MappingProxyType(dict(constants))
        # Zeroed once: halos and rounding are never written afterwards.
        self.arena = torch.zeros(max(self.plan.bytes, 1) + alignment, dtype=torch.uint8, device=device)
        self._base = -self.arena.data_ptr() % alignment
        self._views: dict[str, torch.Tensor] = {}
        tensors = len(self.places.inputs) + len(self.places.outputs)
        sliced = {(number, program.base_bytes(name)) for name in program.aliases if (number := self.external(name)) is not None}
        self._sliced = tuple(sorted((number, base) for number, base in sliced if base))
        self._slots = {place: tensors + at for at, place in enumerate(self._sliced)}
        self.slots = tensors + len(self._sliced)
        # Indices out of range, 0 if there are none. For a GPU in pinned host memory that kernels write to, so that it can be read without waiting for
        # them.
        self.faults = torch.zeros(len(program.index_checks), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._fault_places: dict[str, int] = {}
        for name in program.faults:
            self._fault_places[name] = self.faults.data_ptr() + 8 * sum(len(program.faults[other]) for other in self._fault_places)

    def external(self, name: str) -> int | None:
        """The number of the caller's tensor that contains a buffer; None for the arena and constants."""
        root = self.program.root(name)
        if root in self.places.inputs:
            return self.places.inputs[root]
        if root in self.places.outputs:
            return len(self.places.inputs) + self.places.outputs[root]
        return None

    def slot(self, name: str) -> int | None:
        """The number of the address that kernels receive for one of the caller's tensors or a slice of it; None for the arena and constants."""
        number = self.external(name)
        return None if number is None else self._slots.get((number, self.program.base_bytes(name)), number)

    def addresses(self, tensors: Sequence[int]) -> list[int]:
        """The addresses of all slots, given those of the caller's tensors."""
        return [*tensors, *(tensors[number] + base for number, base in self._sliced)]

    def address(self, name: str) -> int:
        """The fixed address that kernels receive for a buffer in the arena, a slice of one, or a constant."""
        root = self.program.root(name)
        if root in self.constants:
            return self.constants[root].data_ptr()
        if root in self._fault_places:
            return self._fault_places[root]
        return self.arena.data_ptr() + self._base + self.plan.offsets[root] + self.program.base_bytes(name)

    def constants_of(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The constants among buffers, each once."""
        roots = dict.fromkeys(map(self.program.root, names))
        return [self.constants[root] for root in roots if root in self.constants]

    def take_fault(self) -> IndexOutOfRange | None:
        """The error for an index out of range that a kernel has reported, if any; clears all reports."""
        for number, index in enumerate(self.faults.tolist()):
            if index:
                self.faults.zero_()
                check = self.program.index_checks[number]
                return IndexOutOfRange.at(check.place, index, check.extent)
        return None

    def extent(self, name: str) -> Extent:
        """The location of a buffer, used to find overlaps."""
        root = self.program.root(name)
        if root not in self.plan.offsets:
            return Extent(root, 0, 1, root, self.program.box(name))
        start = self.plan.offsets[root]
        return Extent("arena", start, start + max(self.plan.sizes[root], 1), root, self.program.box(name))

    def flat(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The storage of a buffer as a one-dimensional tensor of its dtype; writes to it change the buffer."""
        root = self.program.root(name)
        if root in self.places.inputs:
            return inputs[self.places.inputs[root]].view(-1)
        if root in self.places.outputs:
            return outputs[self.places.outputs[root]].view(-1)
        if root in self.constants:
            return self.constants[root]
        if root not in self._views:
            storage = self.program.storage[root]
            start = self._base + self.plan.offsets[root]
            section = self.arena[start : start + self.plan.sizes[root]]
            self._views[root] = section.view(torch_dtype(storage.value.dtype))
        return self._views[root]

    def value(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """A stored value of the graph in its logical shape: a view, or a copy for split layouts."""
        flat = self.flat(name, inputs, outputs)
        storage = self.program.storage.get(name)
        if storage is None:  # an alias that no kernel names: row-major, over its whole root
            return flat.view(self.program.graph.values[name].shape)
        return unpack(flat, storage.layout)

    def is_stored(self, name: str) -> bool:
        """Whether the value can be read after its region has run."""
        root = self.program.root(name)
        return root in self.places.inputs or root in self.places.outputs or root in self.constants or root in self.plan.offsets
