"""The unit of fusion, and what lowering makes of it.

A `Region` is a part of the graph that is computed together: its steps over graph values (inlined operators no longer appear), with the reasons for
its extent. Lowering a region under a schedule gives a `Lowered`: kernels, the calls in order, and the storage they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from tilewright.ir.computation import Step
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall
from tilewright.ir.space import Comparison, SpaceCounts


@dataclass(frozen=True)
class IndexCheck:
    """Indices that a kernel checks at run time: those of `place` (an operator of the user's model) into a dimension of `extent` elements; `least` is
    0, or -extent if negative indices count from the end."""

    place: str
    least: int
    extent: int


KINDS: Mapping[str, str] = MappingProxyType(
    {
        "contraction": "a sum of products and what is done with it",
        "attention": "the softmax of a sum of products, summed with values, and what is done with it",
        "window": "small reductions, one of which a thread or a vector lane computes alone",
        "row reduction": "reductions over whole rows, and the maps between them",
        "scan": "cumulative sums and their like",
        "chain": "regions one after another, in strips of rows, whose results in between stay in tiles",
        "map": "each element by itself",
        "loop": "a loop over a program of its own",
        "torch": "what runs through PyTorch",
    }
)
"""The kinds of region, and what regions of each kind compute."""


@dataclass(frozen=True)
class Region:
    """Operators that one call computes. kind: one of `KINDS`.

    `steps` load graph values, constants or earlier steps; results in `outputs` are stored, others stay inside the kernel. `checks` describes each
    site of checked indices in the steps. `stages`: of a chain, the regions that it consists of, in order; its steps are all of theirs. `wholes`: of a
    chain, pairs of a value that it reads or stores and of a concatenation that it reads, in whose memory that value is."""

    name: str
    kind: str
    nodes: tuple[Node, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    body: Graph | None = None
    checks: tuple[IndexCheck, ...] = ()
    stages: tuple[Region, ...] = ()
    wholes: tuple[tuple[str, str], ...] = field(default=(), metadata={"omitted": ()})

    def flops(self) -> int:
        return sum(step.flops() for step in self.steps)

    def memory_of(self, name: str) -> str:
        """The value in whose memory the kernel of a chain finds a value: a concatenation, or the value itself."""
        return dict(self.wholes).get(name, name)

    def readers_of(self, name: str) -> tuple[int, ...]:
        """The stages of a chain that read a value, by itself or as a part of a concatenation."""
        return tuple(at for at, stage in enumerate(self.stages) if name in stage.inputs or self.memory_of(name) in stage.inputs)


def readers_of(regions: Iterable[Region]) -> dict[str, list[Region]]:
    """The regions that read each value, in order."""
    readers: dict[str, list[Region]] = {}
    for region in regions:
        for name in dict.fromkeys(region.inputs):
            readers.setdefault(name, []).append(region)
    return readers


class Unsuitable(ValueError):
    """The region does not have the form that a schema lowers, or none of its schedules is feasible; the text says what is missing."""


@dataclass(frozen=True)
class Call:
    """One kernel call; its arguments name stored values, workspaces or packed constants, in the order of the kernel's parameters. `trips`: see
    `ir.kernel.Kernel`. `shifts`: elements between the address of each argument and the one that the kernel receives, for a kernel of one image that
    is called for another one (`partition.reuse`); empty if all are 0. On CPUs only."""

    kernel: str
    arguments: tuple[str, ...]
    trips: int = 0
    shifts: tuple[int, ...] = ()

    @classmethod
    def of(cls, kernel: Kernel, arguments: tuple[str, ...]) -> Call:
        """A call with the trips that the kernel was made for."""
        return cls(kernel.name, arguments, kernel.trips)

    @property
    def shifted(self) -> tuple[tuple[str, int], ...]:
        """The arguments with their shifts."""
        return tuple(zip(self.arguments, self.shifts or (0,) * len(self.arguments), strict=True))


AS_THEY_ARE, TF32, TF32_PAIR, F16_PAIR, F16_SCALE = ("", "tf32", "tf32 pair", "f16 pair", "f16 scale")
NUMBERS = MappingProxyType({AS_THEY_ARE: 0, TF32: 0, TF32_PAIR: 2, F16_PAIR: 3, F16_SCALE: 0})
"""As which numbers float32 elements of a constant can be stored, and how many for each, which lie in as many constants one behind the other, along a
new first dimension (0: one without it): as they are; as the nearest TF32 number; also as the nearest to the rest; as numbers of float16, of which the
constant's `f16 scale`, a single float32, is the unit (`runtime.packing`)."""
F16_STEP = 2.0**11
"""The low part of a pair of float16 is stored times this: it is at most a half of the last bit of the high part, which has 11 bits."""


@dataclass(frozen=True)
class Storage:
    """A buffer that a program needs: a value of the graph, a workspace, or a constant packed into another layout. `source` names the constant. `view`
    is (sizes, strides, offset), as for torch.as_strided, if only a part or another view of the constant is stored. `matrix` (a tuple of rows) is
    applied over as many leading dimensions of that view as make up its columns; with it Winograd's filters are transformed at compile time.
    `numbers`: as which numbers float32 elements are stored (`NUMBERS`)."""

    value: Value
    layout: Layout
    source: str | None = None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    matrix: tuple[tuple[float, ...], ...] | None = None
    numbers: str = AS_THEY_ARE


WITHIN = REGISTERS, TILE = ("registers", "tile")
"""Where steps of one kernel pass each other what they compute: in registers, or in a tile, which is in shared memory of a block or of a cluster, or
in the cache of a thread."""


@dataclass(frozen=True)
class Lowered:
    """A region lowered to kernels. `storage` holds what the region needs beyond graph values: workspaces and packed constants; `space` counts the
    candidates from which the schedule was chosen, and `comparison` has the best of them; `measured_seconds` comes from records; `bounds`: least
    seconds of the calls, by what limits them (`selection.bounds`).

    `within`: where the steps of the region's kernel, or of each stage of a chain, pass each other what they compute, at farthest (`WITHIN`).

    `library`, if there is one, runs first. The calls run in order, `repeat` times; kernels with a scalar parameter get the number of the repetition
    (a scan's step). `checks` says, for each buffer passed as FAULTS, what its elements stand for."""

    region: Region
    schedule: str
    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]
    storage: Mapping[str, Storage] = field(default_factory=lambda: MappingProxyType({}))
    predicted_seconds: float = 0.0
    terms: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    repeat: int = 1
    space: SpaceCounts = field(default_factory=SpaceCounts)
    measured_seconds: float | None = None
    bounds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    checks: Mapping[str, tuple[IndexCheck, ...]] = field(default_factory=lambda: MappingProxyType({}))
    library: LibraryCall | None = None
    comparison: Comparison = field(default_factory=Comparison)
    within: tuple[str, ...] = (REGISTERS,)


MergeKey: TypeAlias = tuple[str, tuple[str, ...]]
"""What identifies a merge in a graph: its kind and its results."""


@dataclass(frozen=True)
class Ways:
    """Seconds of a merge, together and apart, as predicted, and as measured if trials measured both."""

    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None


@dataclass(frozen=True)
class MergeDecision:
    """Whether operators or regions were merged, or a value stored otherwise than by rule: the values that are their results, whether it was done, and
    the predicted times of both ways. `kind`: what was decided ("chain", "siblings", "storage", ...); merges of one kind with the same results are the
    same. `ways`: the times of a merge, if both ways are possible. Artifacts store neither of these two."""

    results: tuple[str, ...]
    taken: bool
    text: str
    kind: str = field(default="", compare=False)
    ways: Ways | None = field(default=None, compare=False)

    @property
    def key(self) -> MergeKey:
        return self.kind, self.results

    def __str__(self) -> str:
        return f"{'taken' if self.taken else 'refused'}: {self.text}"


@dataclass(frozen=True)
class Program:
    """A whole model lowered to kernels: what `runtime` executes and artifacts store.

    `regions` run in order. `storage` gives every stored value its layout: graph inputs and outputs (row-major, as PyTorch passes them),
    intermediate values, constants (as they are read by kernels), workspaces. `aliases` maps a value to the one whose storage it shares; the layout of
    a slice says where it is there, and kernels receive the address at `Layout.base`. `search`: the merges and layouts that were considered;
    `partitions`: the whole graph's that trials compared."""

    graph: Graph
    target: str
    regions: tuple[Lowered, ...]
    storage: Mapping[str, Storage]
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    search: tuple[MergeDecision, ...] = ()
    partitions: tuple[MergeDecision, ...] = ()

    def kernels(self) -> dict[str, Kernel]:
        return {kernel.name: kernel for region in self.regions for kernel in region.kernels}
