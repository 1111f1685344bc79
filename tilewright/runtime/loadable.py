"""``LoadableProgram``: what remains of a `Program` once its kernels are compiled, all of it plain data.

Steps and kernel bodies are gone; the graph is kept for `Executable.verify`, for nodes that run through PyTorch, and for the report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import MappingProxyType

from tilewright.codegen.cuda import dynamic_shared_bytes, index_dtype
from tilewright.codegen.intrinsics.launching import awaits_earlier_kernels
from tilewright.codegen.intrinsics.mma import rounds_to_tf32
from tilewright.codegen.intrinsics.wgmma import truncates_to_tf32
from tilewright.hardware import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import INDEX
from tilewright.ir.graph import Graph, Node
from tilewright.ir.kernel import GridOfTrips, Kernel, grid_of_trips, required_features
from tilewright.ir.layout import Box
from tilewright.ir.library import LibraryCall
from tilewright.ir.region import Call, IndexCheck, MergeDecision, Program, Storage
from tilewright.ir.space import Comparison, SpaceCounts
from tilewright.ir.stage import Flow, flow_of
from tilewright.ir.tensor_map import TensorMap


@dataclass(frozen=True)
class LoadableKernel:
    """How one compiled kernel is called. For each parameter, `writes` says whether the kernel writes it, and `extents` how many bytes from its start
    the kernel may access, for any `scalars` below `steps`. `requires`: machine features that its instructions need (`ir.intrinsic`), sorted.
    `trips`: the number of trips (`ir.kernel.Kernel`) that `extents` are for, each of which but the first adds `growths`; 0 without such an argument.

    `grid`, `block`, `shared_bytes` (dynamic shared memory per block) and `scalar_bytes` (size of each of the `scalars` that follow the buffers) are
    for GPU kernels; a CPU kernel receives its scalars as an array of 64-bit integers. `cooperative`: all blocks must be resident at once.
    `waits`: the kernel itself waits for those that it depends on, so that it can begin before they have ended.
    `maps`: the tensor maps that follow the scalars, each with the position of the parameter that it describes.
    `tiles`: of a GPU kernel with trips, how its grid follows from them; `grid` then is that of `trips`.
    `tf32`: float32 factors have 10 bits of mantissa in its products, so that its results have the tolerance of such numbers.
    """

    name: str
    writes: tuple[bool, ...]
    scalars: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    scalar_bytes: int = 8
    extents: tuple[int, ...] = ()
    steps: int = 1
    requires: tuple[str, ...] = ()
    cooperative: bool = False
    trips: int = 0
    growths: tuple[int, ...] = ()
    maps: tuple[tuple[int, TensorMap], ...] = ()
    waits: bool = False
    tf32: bool = False
    tiles: GridOfTrips | None = None

    def grid_of(self, trips: int) -> tuple[int, int, int]:
        """The grid for so many trips."""
        return self.grid if self.tiles is None else (self.tiles.blocks(trips), *self.grid[1:])

    def touched(self, trips: int) -> tuple[int, ...]:
        """The extents for so many trips."""
        if not self.trips:
            return self.extents
        return tuple(extent + growth * (trips - self.trips) for extent, growth in zip(self.extents, self.growths, strict=True))


@dataclass(frozen=True)
class LoadableRegion:
    """One region of the program; see `tilewright.ir.region.Region` and `Lowered`. `nodes` names nodes of the graph."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]
    repeat: int = 1
    schedule: str = ""
    reasons: tuple[str, ...] = ()
    predicted_seconds: float = 0.0
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    space: SpaceCounts = field(default_factory=SpaceCounts)
    measured_seconds: float | None = None
    bounds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    library: LibraryCall | None = None
    comparison: Comparison = field(default_factory=Comparison)
    flow: Flow = field(default_factory=Flow)


@dataclass(frozen=True)
class LoadableProgram:
    """A compiled model. `storage` holds every buffer that a call names, including those of single regions. `faults` maps the name of each buffer in
    which kernels report indices out of range to the meaning of its elements. `search`: the merges of operators and regions that were considered;
    `partitions`: the whole graph's that trials compared."""

    graph: Graph
    target: str
    regions: tuple[LoadableRegion, ...]
    kernels: Mapping[str, LoadableKernel]
    storage: Mapping[str, Storage]
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    faults: Mapping[str, tuple[IndexCheck, ...]] = field(default_factory=lambda: MappingProxyType({}))
    search: tuple[MergeDecision, ...] = ()
    partitions: tuple[MergeDecision, ...] = ()

    @cached_property
    def index_checks(self) -> tuple[IndexCheck, ...]:
        """The checks of all elements of the buffers in `faults`, one buffer after another."""
        return tuple(check for checks in self.faults.values() for check in checks)

    @cached_property
    def updated(self) -> frozenset[str]:
        """The graph's inputs that calls update in place: aliases share their storage."""
        return frozenset(map(self.root, self.aliases)).intersection(self.graph.inputs)

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        return MappingProxyType({node.name: node for node in self.graph.nodes})

    def root(self, name: str) -> str:
        """The value that owns the storage of `name`: `name` itself unless it is an alias. Raises ValueError for a cycle of aliases."""
        return self._roots.get(name, name)

    @cached_property
    def _roots(self) -> Mapping[str, str]:
        roots: dict[str, str] = {}
        for name in self.aliases:
            way: dict[str, None] = {}
            while name in self.aliases and name not in roots:
                if name in way:
                    raise ValueError(f"the aliases of {name} form a circle")
                way[name] = None
                name = self.aliases[name]
            roots.update(dict.fromkeys(way, roots.get(name, name)))
        return roots

    def bytes_of(self, name: str) -> int:
        """Bytes of a buffer, including halo and rounding; of a slice those that are its own."""
        storage = self.storage[name]
        return storage.layout.own_size * size_of(storage.value.dtype)

    def box(self, name: str) -> Box:
        """The part that a slice, halo included, occupies of the buffer that owns its storage; empty for everything else, which occupies all of it."""
        storage = self.storage.get(name)
        return storage.layout.box() if storage is not None and name in self.aliases and storage.layout.around else ()

    def base_bytes(self, name: str) -> int:
        """Bytes between the start of the buffer that owns the storage of `name` and the address that kernels receive for it."""
        storage = self.storage.get(name)
        return storage.layout.base * size_of(storage.value.dtype) if storage is not None and name in self.aliases else 0

    def element_bytes(self, name: str) -> int:
        """Bytes of an element of a buffer."""
        return size_of((self.storage.get(name) or self.storage[self.root(name)]).value.dtype)

    def constant_source(self, name: str) -> str | None:
        """The graph constant that a buffer is a packed copy of; None if it is no constant."""
        source = self.storage[name].source
        if source is not None:
            return source
        return name if name in self.graph.constants else None


def loadable_kernel(kernel: Kernel) -> LoadableKernel:
    """How to call a kernel, derived from its IR."""
    touched = LoadableKernel(
        kernel.name,
        tuple(buffer.writable for buffer in kernel.parameters),
        len(kernel.scalars),
        extents=tuple(buffer.size * size_of(buffer.dtype) for buffer in kernel.parameters),
        steps=min((variable.extent or 1 for variable in kernel.scalars), default=1),
        requires=required_features(kernel),
        trips=kernel.trips,
        growths=tuple(buffer.growth * size_of(buffer.dtype) for buffer in kernel.parameters) if kernel.trips else (),
    )
    if kernel.launch is None:
        return touched
    launch = kernel.launch
    shared, scalar = dynamic_shared_bytes(kernel), size_of(index_dtype(kernel))
    positions = {buffer.name: position for position, buffer in enumerate(kernel.parameters)}
    return replace(
        touched,
        grid=launch.grid,
        block=launch.block,
        shared_bytes=shared,
        scalar_bytes=scalar,
        cooperative=kernel.cooperative,
        maps=tuple((positions[described.buffer], described) for described in kernel.maps),
        waits=awaits_earlier_kernels(kernel),
        tf32=rounds_to_tf32(kernel) or truncates_to_tf32(kernel),
        tiles=grid_of_trips(kernel) if kernel.trips else None,
    )


def facts_symbol(kernel: LoadableKernel, machine: Machine) -> str:
    """The name of a symbol that encodes all of this but `tf32`, which no call depends on. A kernel's binary contains it, so that no other file can
    claim anything else about that binary: `map_f8d1_r3072_w10368` reads 3,072 bytes of its first argument and writes 10,368 of its second; with
    `r3072p1024` 1,024 bytes more for each trip after the first. A digest stands for tensor maps. For CPU code the name also contains the digest of
    the instruction sets (`Machine.isa`) that it may use, such as `_isa0123456789abcdef`, and then the features that it requires."""
    growths = [f"p{growth}" for growth in kernel.growths] if kernel.trips else [""] * len(kernel.writes)
    parts = zip(kernel.writes, kernel.touched(1), growths, strict=True)
    touched = "".join(f"_{'w' if write else 'r'}{extent}{growth}" for write, extent, growth in parts)
    scalars = f"_{kernel.scalars}x{kernel.scalar_bytes}_below{kernel.steps}" if kernel.scalars else ""
    tiles = kernel.tiles
    shape = (*kernel.grid_of(1), *kernel.block, kernel.shared_bytes)
    tiling = "" if tiles is None else f"_{tiles.rows}by{tiles.each}x{tiles.across}{'whole' * tiles.whole}"
    together = "_together" if kernel.cooperative else ""
    launch = ("" if shape == (1, 1, 1, 1, 1, 1, 0) else "_launch" + "_".join(map(str, shape)) + together) + tiling
    maps = f"_maps{hashlib.sha256(repr(kernel.maps).encode()).hexdigest()[:16]}" if kernel.maps else ""
    digest = hashlib.sha256(" ".join(machine.isa).encode()).hexdigest()[:16]
    needs = "" if machine.is_gpu else "_".join((f"_isa{digest}", *kernel.requires))
    waits = "_waits" if kernel.waits else ""
    return f"{kernel.name}{touched}{scalars}{launch}{waits}{maps}{needs}"


def loadable(program: Program) -> LoadableProgram:
    """The program without steps and kernel bodies.

    Raises:
        ValueError: if a call names an unknown kernel or buffer, or passes a wrong number of arguments.
    """
    kernels = {name: loadable_kernel(kernel) for name, kernel in program.kernels().items()}
    storage = dict(program.storage)
    regions = []
    for lowered in program.regions:
        storage.update({name: entry for name, entry in lowered.storage.items() if name not in program.storage})
        region = lowered.region
        regions.append(
            LoadableRegion(
                region.name,
                region.kind,
                tuple(node.name for node in region.nodes),
                region.inputs,
                region.outputs,
                lowered.calls,
                lowered.repeat,
                lowered.schedule,
                region.reasons,
                lowered.predicted_seconds,
                MappingProxyType(dict(lowered.terms)),
                lowered.space,
                lowered.measured_seconds,
                MappingProxyType(dict(lowered.bounds)),
                lowered.library,
                lowered.comparison,
                flow_of(lowered),
            )
        )
    result = LoadableProgram(
        program.graph,
        program.target,
        tuple(regions),
        MappingProxyType(kernels),
        MappingProxyType(storage),
        MappingProxyType(dict(program.aliases)),
        MappingProxyType({name: checks for lowered in program.regions for name, checks in lowered.checks.items()}),
        program.search,
        program.partitions,
    )
    check(result)
    return result


def check(program: LoadableProgram) -> None:
    """Raises ValueError if a name is undefined, or a call does not match its kernel, the kernel's launch, or its buffers."""
    for name in program.aliases:
        program.root(name)
    for region in program.regions:
        for call in region.calls:
            kernel = program.kernels.get(call.kernel)
            if kernel is None:
                raise ValueError(f"region {region.name} calls the unknown kernel {call.kernel}")
            if len(kernel.writes) != len(call.arguments):
                raise ValueError(f"kernel {call.kernel} has {len(kernel.writes)} parameters, called with {len(call.arguments)}")
            if bool(kernel.trips) != bool(call.trips):
                raise ValueError(f"kernel {call.kernel} is called with {call.trips} trips")
            if len(call.shifts) not in (0, len(call.arguments)):
                raise ValueError(f"kernel {call.kernel} is called with {len(call.arguments)} arguments and {len(call.shifts)} shifts")
            if prod(kernel.grid) < 1 or prod(kernel.block) < 1:
                raise ValueError(f"kernel {call.kernel} is launched with grid {kernel.grid} and block {kernel.block}")
            for name in call.arguments:
                if name not in program.storage and program.root(name) not in program.storage:
                    raise ValueError(f"kernel {call.kernel} is called with {name}, which has no storage")
        for view in region.library.views if region.library is not None else ():
            if view.name not in program.storage:
                raise ValueError(f"region {region.name} calls a library with {view.name}, which has no storage")
        for name in region.nodes:
            if name not in program.nodes:
                raise ValueError(f"region {region.name} names the unknown node {name}")
    for name, checks in program.faults.items():
        entry = program.storage.get(name)
        if entry is None or entry.value.dtype != INDEX or entry.layout.size > len(checks) or name in program.graph.values:
            raise ValueError(f"{name} is no place for {len(checks)} indices that are out of range")
    for name in (*program.graph.inputs, *program.graph.outputs):
        if name not in program.graph.values:
            raise ValueError(f"the graph has no value {name}")
