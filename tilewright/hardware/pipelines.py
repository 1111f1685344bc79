"""Execution pipelines of CPU cores: ports, issue width, and the cost of each kind of instruction.

`Machine.pipeline` names the table of a machine's core. A row gives, for one kind of instruction, and one vector width in bits if that matters ("fma
512"), its latency in cycles and its micro-operations, each of which occupies one of the named ports for some cycles. `analysis/cpu/pipeline.py` reads
the tables. None of these numbers were measured for this project; assumptions are marked in `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tilewright.hardware import documents as named


@dataclass(frozen=True)
class Cost:
    """Cost of one instruction. `uses` are pairs (ports, cycles): the instruction occupies one of these ports for these cycles. `slots` is its share
    of the issue width.
    `accumulate`: cycles from a multiply-add to the next one that adds to its result, if lower than `latency`, else 0."""

    latency: float
    uses: tuple[tuple[tuple[str, ...], int], ...] = ()
    slots: int = 1
    accumulate: float = 0


@dataclass(frozen=True)
class Pipeline:
    """A core: `issue_width` instructions enter per cycle, `window` may be in flight (0: in-order execution), and `scheduler` of them may wait for
    operands. `fuses`: a load and the operation on its result share one issue slot, and so do a comparison and the branch on it."""

    name: str
    ports: tuple[str, ...]
    issue_width: int
    window: int
    scheduler: int
    fuses: bool
    costs: Mapping[str, Cost]
    sources: Mapping[str, str] = field(default_factory=dict)

    def cost(self, kind: str, bits: int = 0) -> Cost:
        """The row of a kind of instruction on vectors of `bits` bits.

        Raises:
            KeyError: if the table has none.
        """
        row = self.costs.get(f"{kind} {bits}") or self.costs.get(kind)
        if row is None:
            raise KeyError(f"the table of {self.name} has no row for {kind!r}")
        return row


def op(latency: float, *uses: str, slots: int = 1, accumulate: float = 0) -> Cost:
    """A cost in short notation: "0 1" is one of two ports for one cycle, "0:5" is port 0 for five cycles."""
    taken = []
    for use in uses:
        names, _, cycles = use.partition(":")
        taken.append((tuple(names.split()), int(cycles or 1)))
    return Cost(latency, tuple(taken), slots, accumulate)


_FREE = {"move": op(0), "vector move": op(0), "zero": op(0), "nop": op(0)}
"""Cores of Intel and AMD rename registers instead of moving them, and recognise instructions that zero a register."""

HASWELL = Pipeline(
    "haswell", ("0", "1", "2", "3", "4", "5", "6", "7"), 4, 192, 60, True,
    MappingProxyType({
        **_FREE,
        "fma": op(5, "0 1"), "add": op(3, "1"), "multiply": op(5, "0 1"), "logic": op(1, "5"), "vector integer": op(1, "1 5"),
        "vector multiply": op(10, "0", "0", slots=2), "vector shift": op(1, "0"), "compare": op(3, "1"), "maximum": op(3, "1"),
        "round": op(6, "1", "1", slots=2), "convert": op(3, "1"), "compare flags": op(3, "1"),
        "divide": op(13, "0:7"), "divide 256": op(21, "0:14", "0", "1 5", slots=3),
        "square root": op(13, "0:7"), "square root 256": op(21, "0:14", "0", "1 5", slots=3),
        "shuffle": op(1, "5"), "permute": op(3, "5"), "blend": op(1, "0 1 5"), "blend variable": op(2, "5", "5", slots=2),
        "to vector": op(1, "5"), "to general": op(1, "0"), "gather": op(22, "0:12", "2:4", "3:4", "5:6", slots=34),
        "load": op(5, "2 3"), "vector load": op(7, "2 3"), "store": op(1, "2 3 7", "4"), "vector store": op(1, "2 3 7", "4"),
        "prefetch": op(0, "2 3"),
        "integer": op(1, "0 1 5 6"), "shift": op(1, "0 6"), "address": op(1, "1 5"), "address 3": op(3, "1"), "product": op(3, "1"),
        "quotient": op(98, "0:24", "1:10", "5:12", "6:24", slots=40), "conditional": op(2, "0 6", "0 1 5 6", slots=2),
        "branch": op(1, "6"), "call": op(3, "6", "2 3 7", "4", slots=3), "return": op(7, "6", "2 3", slots=2), "clear": op(0, slots=4),
    }),
    {
        "ports": f"{named.FOG}, Haswell", "issue_width": f"{named.FOG}, Haswell", "window": f"{named.INTEL_MANUAL}, Haswell: 192",
        "scheduler": f"{named.INTEL_MANUAL}, Haswell: 60",
        "costs": f"{named.LLVM_HASWELL}; {named.FOG}, Haswell: moves that take no port; branches assumed: taken, on port 6",
    },
)  # fmt: skip

_WIDE = {
    "fma 512": op(4, "0 5"), "add 512": op(4, "0 5"), "multiply 512": op(4, "0 5"), "logic 512": op(1, "0 5"), "vector integer 512": op(1, "0 5"),
    "vector multiply 512": op(10, "0", "0", slots=2), "vector shift 512": op(1, "0"), "maximum 512": op(4, "0 5"), "convert 512": op(4, "0 5"),
    "round 512": op(8, "0 5", "0 5", slots=2), "divide 512": op(18, "0:10", "0", "5", slots=3), "square root 512": op(20, "0:12", "0", "5", slots=3),
    "blend 512": op(1, "0 5"), "shuffle 512": op(1, "5"), "mask": op(1, "0"), "compare mask": op(4, "5"), "mask from general": op(1, "5"),
    "mask to general": op(3, "0"), "blend mask": op(1, "0 1 5"), "blend mask 512": op(1, "0 5"),
}  # fmt: skip

SKYLAKE_SERVER = Pipeline(
    "skylake-server", ("0", "1", "2", "3", "4", "5", "6", "7"), 4, 224, 97, True,
    MappingProxyType({
        **_FREE, **_WIDE,
        "fma": op(4, "0 1"), "add": op(4, "0 1"), "multiply": op(4, "0 1"), "logic": op(1, "0 1 5"), "vector integer": op(1, "0 1 5"),
        "vector multiply": op(10, "0 1", "0 1", slots=2), "vector shift": op(1, "0 1"), "compare": op(4, "0 1"), "maximum": op(4, "0 1"),
        "round": op(8, "0 1", "0 1", slots=2), "convert": op(4, "0 1"), "compare flags": op(2, "0"),
        "divide": op(11, "0:3"), "divide 256": op(11, "0:5"), "square root": op(12, "0:3"), "square root 256": op(12, "0:6"),
        "shuffle": op(1, "5"), "permute": op(3, "5"), "blend": op(1, "0 1 5"), "blend variable": op(2, "0 1 5", "0 1 5", slots=2),
        "to vector": op(1, "5"), "to general": op(2, "0"), "gather": op(22, "0", "2:4", "3:4", "5", slots=5),
        "load": op(5, "2 3"), "vector load": op(7, "2 3"), "vector load 512": op(8, "2 3"), "store": op(1, "2 3 7", "4"),
        "vector store": op(1, "2 3 7", "4"), "prefetch": op(0, "2 3"),
        "integer": op(1, "0 1 5 6"), "shift": op(1, "0 6"), "address": op(1, "1 5"), "address 3": op(3, "1"), "product": op(3, "1"),
        "quotient": op(76, "0:10", "1:5", "5:11", "6:6", slots=32), "conditional": op(1, "0 6"),
        "branch": op(1, "6"), "call": op(3, "6", "2 3 7", "4", slots=3), "return": op(7, "6", "2 3", slots=2), "clear": op(0, slots=4),
    }),
    {
        "ports": f"{named.FOG}, Skylake", "issue_width": f"{named.FOG}, Skylake", "window": f"{named.INTEL_MANUAL}, Skylake Server: 224",
        "scheduler": f"{named.INTEL_MANUAL}, Skylake: 97",
        "costs": f"{named.LLVM_SKYLAKE}; {named.INTEL_MANUAL}, Skylake Server: 512-bit instructions take ports 0 and 1 together, or port 5; "
        f"{named.FOG}, Skylake: moves that take no port; branches assumed: taken, on port 6",
    },
)  # fmt: skip

GOLDEN_COVE = Pipeline(
    "golden-cove", ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "tiles"), 6, 512, 97, True,
    MappingProxyType({
        **_FREE, **_WIDE,
        "fma": op(4, "0 1"), "add": op(3, "1 5"), "multiply": op(4, "0 1"), "logic": op(1, "0 1 5"), "vector integer": op(1, "0 1 5"),
        "vector multiply": op(10, "0 1", "0 1", slots=2), "vector shift": op(1, "0 1"), "compare": op(4, "0 1"), "maximum": op(4, "0 1"),
        "round": op(8, "0 1", "0 1", slots=2), "convert": op(4, "0 1"), "compare flags": op(3, "0"),
        "divide": op(11, "0:3"), "divide 256": op(11, "0:5"), "square root": op(12, "0:3"), "square root 256": op(12, "0:6"),
        "shuffle": op(1, "1 5"), "permute": op(3, "5"), "blend": op(1, "0 1 5"), "blend variable": op(3, "0 1 5", "0 1 5", "0 1 5", slots=3),
        "to vector": op(2, "5"), "to general": op(3, "0"), "gather": op(24, "0", "2:4", "3:4", "5", slots=5),
        "load": op(5, "2 3 11"), "vector load": op(7, "2 3 11"), "vector load 512": op(8, "2 3"), "store": op(1, "7 8", "4 9"),
        "vector store": op(1, "7 8", "4 9"), "vector store 512": op(1, "7 8", "4", "9"), "prefetch": op(0, "2 3 11"),
        "integer": op(1, "0 1 5 6 10"), "shift": op(1, "0 6"), "address": op(1, "0 1 5 6 10"), "address 3": op(2, "1 5"), "product": op(3, "1"),
        "quotient": op(15, "1:5", slots=4), "conditional": op(1, "0 6"),
        "branch": op(1, "6"), "call": op(3, "6", "7 8", "4 9", slots=3), "return": op(7, "6", "2 3 11", slots=2), "clear": op(0, slots=4),
        "tile product": op(52, "tiles:16"), "tile load": op(45, "2:8", "3:8", slots=8), "tile store": op(1, "7:16", "4:16", slots=16),
    }),
    {
        "ports": f"{named.INTEL_MANUAL}, Golden Cove", "issue_width": f"{named.INTEL_MANUAL}, Golden Cove: six",
        "window": f"{named.INTEL_MANUAL}, Golden Cove: 512", "scheduler": "assumed: 97, for arithmetic, as of Skylake",
        "costs": f"{named.INTEL_MANUAL}, Golden Cove: execution ports, three loads of 256 bits or two of 512, one store of 512; "
        f"{named.UOPS}, Alder Lake-P: ports and latencies; 512-bit instructions assumed: as of Skylake Server, on ports 0 and 5; "
        f"{named.INTEL_MANUAL}, AMX: a tile product in 16 cycles, its result after 52, a tile load in 8, a store in 16 cycles; "
        "assumed: 8 and 16 micro-operations of loads and stores",
    },
)  # fmt: skip

ZEN3 = Pipeline(
    "zen3", ("a0", "a1", "a2", "a3", "b1", "g0", "g1", "g2", "f0", "f1", "f2", "f3", "s0", "s1"), 6, 256, 64, True,
    MappingProxyType({
        **_FREE,
        "fma": op(4, "f0 f1"), "add": op(3, "f2 f3"), "multiply": op(3, "f0 f1"), "logic": op(1, "f0 f1 f2 f3"),
        "vector integer": op(1, "f0 f1 f2 f3"), "vector multiply": op(3, "f0 f3"), "vector shift": op(1, "f1 f2"), "compare": op(1, "f0 f1"),
        "maximum": op(1, "f0 f1"), "round": op(3, "f2 f3"), "convert": op(3, "f2 f3"), "compare flags": op(4, "f0 f1", "s0 s1", slots=2),
        "divide": op(11, "f1:3"), "square root": op(15, "f1:5"),
        "shuffle": op(1, "f1 f2"), "permute": op(4, "f1 f2"), "blend": op(1, "f0 f1"), "blend variable": op(1, "f0 f1"),
        "to vector": op(2, "s0 s1"), "to general": op(2, "s0 s1"), "gather": op(20, "g0:4", "g1:4", slots=39),
        "load": op(4, "g0 g1 g2"), "vector load": op(7, "g0 g1"), "store": op(1, "g1 g2"), "vector store": op(1, "g2", "s0"),
        "prefetch": op(0, "g0 g1 g2"),
        "integer": op(1, "a0 a1 a2 a3"), "shift": op(1, "a1 a2"), "address": op(1, "a0 a1 a2 a3"), "address 3": op(2, "a0 a1 a2 a3"),
        "product": op(3, "a1"), "quotient": op(17, "a0:17", slots=2), "conditional": op(1, "a0 a3"),
        "branch": op(1, "a0 b1"), "call": op(3, "a0 b1", "g1 g2", slots=2), "return": op(7, "a0 b1", "g0 g1", slots=2), "clear": op(0, slots=4),
    }),
    {
        "ports": f"{named.AMD_ZEN3}: four integer pipes, one more for branches, three address units, four vector pipes of 256 bits, and two for "
        "stores and moves to integers",
        "issue_width": f"{named.AMD_ZEN3}: six dispatched", "window": f"{named.AMD_ZEN3}: 256",
        "scheduler": f"{named.AMD_ZEN3}: two of 32 entries for vectors",
        "costs": f"{named.AMD_ZEN3}: execution resources, three accesses, of them two vector loads and one vector store; {named.LLVM_ZEN3}: "
        f"latencies, pipes of divisions, shuffles, shifts and conversions, and a cycle more between integers and vectors; {named.FOG}, Zen 3: "
        "addresses on all integer pipes, micro-operations of gathers; gathers assumed: of eight elements; permutations assumed: across lanes",
    },
)  # fmt: skip

ZEN5 = Pipeline(
    "zen5",
    ("a0", "a1", "a2", "a3", "a4", "a5", "g0", "g1", "g2", "g3", "f0", "f1", "f2", "f3", "s0", "s1"), 8, 448, 114, True,
    MappingProxyType({
        **_FREE,
        "fma": op(4, "f0 f1"), "add": op(3, "f2 f3"), "multiply": op(3, "f0 f1"), "logic": op(2, "f0 f1 f2 f3"),
        "vector integer": op(2, "f0 f1 f2 f3"), "vector multiply": op(3, "f0 f3"), "vector shift": op(2, "f1 f2"), "compare": op(2, "f0 f1"),
        "maximum": op(2, "f0 f1"), "round": op(3, "f2 f3"), "convert": op(3, "f2 f3"), "compare flags": op(4, "f0 f1", "s0 s1", slots=2),
        "divide": op(11, "f1:3"), "divide 512": op(11, "f1:6"), "square root": op(15, "f1:5"), "square root 512": op(15, "f1:10"),
        "shuffle": op(2, "f1 f2"), "permute": op(4, "f1 f2"), "blend": op(2, "f0 f1"), "blend variable": op(2, "f0 f1"),
        "mask": op(2, "f2 f3"), "compare mask": op(4, "f0 f1"), "mask from general": op(3, "s0 s1"), "mask to general": op(3, "s0 s1"),
        "blend mask": op(2, "f0 f1"),
        "to vector": op(3, "s0 s1"), "to general": op(3, "s0 s1"), "gather": op(24, "g0:8", "g1:8", slots=40),
        "load": op(4, "g0 g1 g2 g3"), "vector load": op(7, "g0 g1"), "store": op(1, "g2 g3"), "vector store": op(1, "g2 g3", "s0 s1"),
        "vector store 512": op(1, "g2", "s0"), "prefetch": op(0, "g0 g1 g2 g3"),
        "integer": op(1, "a0 a1 a2 a3 a4 a5"), "shift": op(1, "a1 a2 a3"), "address": op(1, "a0 a1 a2 a3 a4 a5"),
        "address 3": op(2, "a0 a1 a2 a3 a4 a5"), "product": op(3, "a0 a1 a2"), "quotient": op(18, "a0:18", slots=2), "conditional": op(1, "a0 a3"),
        "branch": op(1, "a3 a4 a5"), "call": op(3, "a3 a4 a5", "g2 g3", slots=2), "return": op(7, "a3 a4 a5", "g0 g1", slots=2),
        "clear": op(0, slots=4),
    }),
    {
        "ports": f"{named.AMD_ZEN5}: six integer and four address units, four vector pipes of 512 bits and two for stores and moves to integers",
        "issue_width": f"{named.AMD_ZEN5}: eight dispatched", "window": f"{named.AMD_ZEN5}: 448",
        "scheduler": f"{named.AMD_ZEN5}: three of 38 entries for vectors",
        "costs": f"{named.AMD_ZEN5}: execution resources, two vector loads and two stores, or one of 512 bits; {named.LLVM_ZEN4}: latencies, and "
        f"pipes of divisions, shuffles, shifts and conversions; {named.YEE_ZEN5}: integer vector operations of one cycle have a latency of two; "
        "branches assumed: three units; gathers assumed: of sixteen elements",
    },
)  # fmt: skip

CORTEX_A53 = Pipeline(
    "cortex-a53", ("A0", "A1", "M", "D", "LS", "B", "V0", "V1", "F"), 2, 0, 0, False,
    MappingProxyType({
        "zero": op(4, "V0 V1"), "nop": op(0), "move": op(1, "A0 A1"), "vector move": op(4, "V0", "V1"),
        "fma": op(8, "V0 V1", accumulate=4), "fma 128": op(8, "V0", "V1", accumulate=4), "add": op(4, "V0 V1"), "add 128": op(4, "V0", "V1"),
        "multiply": op(4, "V0 V1"), "multiply 128": op(4, "V0", "V1"), "logic": op(4, "V0", "V1"), "vector integer": op(4, "V0", "V1"),
        "vector multiply": op(4, "V0", "V1"), "vector shift": op(4, "V0", "V1"), "compare": op(4, "V0", "V1"), "maximum": op(4, "V0", "V1"),
        "round": op(4, "V0", "V1"), "convert": op(4, "V0", "V1"), "compare flags": op(4, "V0 V1"), "divide": op(18, "V0", "F:14"),
        "square root": op(17, "V0", "F:13"), "divide 128": op(36, "V0", "V1", "F:28"), "square root 128": op(34, "V0", "V1", "F:26"),
        "shuffle": op(4, "V0", "V1"), "permute": op(4, "V0", "V1"), "blend": op(4, "V0", "V1"),
        "to vector": op(4, "V0 V1"), "to general": op(4, "V0 V1"),
        "load": op(3, "LS"), "load pair": op(3, "LS", slots=2), "vector load": op(4, "LS", slots=2), "vector load 128": op(5, "LS:2", slots=4),
        "broadcast load": op(4, "LS", slots=2), "store": op(1, "LS"), "store pair": op(1, "LS", slots=2), "vector store": op(1, "LS"),
        "vector store 128": op(1, "LS:2", slots=2), "prefetch": op(0, "LS"),
        "integer": op(1, "A0 A1"), "shift": op(1, "A0 A1"), "address": op(2, "A0 A1"), "product": op(3, "M", slots=2), "quotient": op(9, "D:9"),
        "conditional": op(1, "A0 A1"), "branch": op(1, "B"), "call": op(1, "B"), "return": op(1, "B"),
    }),
    {
        "ports": f"{named.GCC_A53}; {named.LLVM_A53}", "issue_width": f"{named.LLVM_A53}: two", "window": f"{named.LLVM_A53}: in order",
        "scheduler": f"{named.LLVM_A53}: none, in order",
        "costs": f"{named.GCC_A53}: latencies with bypasses, two 64-bit vector units; {named.LLVM_A53}: division and the accumulators' bypass; "
        f"{named.NCNN_A53}: vector loads are issued alone, and one of 128 bits takes two cycles",
    },
)  # fmt: skip

NEOVERSE_N1 = Pipeline(
    "neoverse-n1", ("B", "S0", "S1", "M", "L0", "L1", "D0", "D1", "V0", "V1"), 4, 128, 120, False,
    MappingProxyType({
        "zero": op(0), "nop": op(0), "move": op(1, "S0 S1 M"), "vector move": op(2, "V0 V1"),
        "fma": op(4, "V0 V1", accumulate=2), "add": op(2, "V0 V1"), "multiply": op(3, "V0 V1"), "logic": op(2, "V0 V1"),
        "vector integer": op(2, "V0 V1"), "vector multiply": op(5, "V0", "V0"), "vector shift": op(2, "V1"), "compare": op(2, "V0 V1"),
        "maximum": op(2, "V0 V1"), "round": op(4, "V0", "V0"), "convert": op(4, "V0", "V0"), "compare flags": op(2, "V0"),
        "divide": op(10, "V0:7"), "square root": op(10, "V0:7"), "shuffle": op(2, "V0 V1"), "permute": op(2, "V0 V1"), "blend": op(2, "V0 V1"),
        "to vector": op(3, "M"), "to general": op(2, "V1"),
        "load": op(4, "L0 L1"), "load pair": op(4, "L0 L1", slots=2), "vector load": op(5, "L0 L1"), "broadcast load": op(7, "L0 L1", "V0 V1"),
        "store": op(1, "L0 L1", "D0 D1"), "store pair": op(1, "L0 L1", "L0 L1", "D0 D1"), "vector store": op(2, "L0 L1", "V0 V1"),
        "vector store 128": op(2, "L0 L1", "L0 L1", "V0 V1"), "prefetch": op(0, "L0 L1"),
        "integer": op(1, "S0 S1 M"), "shift": op(1, "S0 S1 M"), "address": op(2, "M"), "product": op(4, "M:3"), "quotient": op(20, "M:5"),
        "conditional": op(1, "S0 S1 M"), "branch": op(1, "B"), "call": op(1, "B", "S0 S1 M"), "return": op(1, "B"),
    }),
    {
        "ports": named.LLVM_N1, "issue_width": f"{named.N1_GUIDE}: four decoded a cycle", "window": f"{named.LLVM_N1}: 128",
        "scheduler": "assumed: 120",
        "costs": f"{named.LLVM_N1}; {named.N1_GUIDE}: a multiply-add forwards its result to the next one's addend after two cycles; a 128-bit store "
        "assumed: one vector micro-operation (LLVM's model has two)",
    },
)  # fmt: skip

PIPELINES = MappingProxyType({core.name: core for core in (HASWELL, SKYLAKE_SERVER, GOLDEN_COVE, ZEN3, ZEN5, CORTEX_A53, NEOVERSE_N1)})
"""Every table, by the name in `Machine.pipeline`."""
