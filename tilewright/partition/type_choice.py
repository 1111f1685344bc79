"""Types by prediction: where factors of 16 bits do not pay, a region of a float32 model keeps them in float32, or rounds them where it reads them.

A precision of 16 bits stores values between kernels so. What it costs arises where such values meet those that stay float32, as inputs of the model
and what PyTorch nodes write do: a factor among them is copied by a kernel of its own. So each region that multiplies (sums of products, attention,
loops) and has such a neighbour, or beside it another region with float32 factors, has alternatives: its first factor is rounded where it is read,
without a copy; or all its factors are float32, which tensor cores may round to TF32. What reads or stores them is predicted with the types at hand
both ways, and the faster one is taken. Regions between values of 16 bits convert nothing and are not asked.

Maps and reductions need no such choice: they read any type and compute in float32, and 16 bits are never more bytes. Nor do weights, which are
converted when a program is made, nor results of the model, which products store from their float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.graph import Graph
from tilewright.ir.region import Region
from tilewright.partition.layout_choice import Alternative, Judge, Judged, Laid, decide, told
from tilewright.partition.layouts import BY_RULE, LaidOut, Storing, in_graph
from tilewright.partition.precision import Precision, rounds

Offer = Callable[[Region], Alternative | None]
"""The alternative that a region has, if it has one."""


@dataclass(frozen=True)
class Types:
    """How regions with other factors than the precision says are stored, and what was decided about them."""

    storing: Storing = BY_RULE
    decisions: dict[Alternative, Judged] = field(default_factory=dict)

    def laid(self, laid: Laid) -> Laid:
        """Makes the partition that `laid` makes with these types, whose regions state what was decided."""
        return (lambda storing: told(laid(self.storing | storing), self.decisions)) if self.decisions else laid


def choose_types(graph: Graph, laid: Laid, judge: Judge, precision: Precision) -> Types:
    """The regions whose factors are stored otherwise than the precision says, since that is predicted, or was measured, to be faster. Those beside
    regions that are decided to differ are asked next, until none is left."""
    if not precision.by_region:
        return Types()
    constants = frozenset(graph.constants)
    plain, storing, decisions = laid(BY_RULE), BY_RULE, dict[Alternative, Judged]()
    asked: set[str] = set()

    def rounded(region: Region) -> Alternative | None:
        copied = [name for name in precision.factors(region, constants) if name not in graph.values and rounds(region, name, constants)]
        said = "computed from factors that are rounded where it reads them"
        return Alternative(name := _result(region), Storing(rounding=frozenset({name})), said, "from copies") if copied else None

    def widened(region: Region) -> Alternative:
        return Alternative(name := _result(region), Storing(wide=frozenset({name})), "computed from float32 factors", "from factors of 16 bits")

    while found := [region for region in _beside_float32(graph, plain, precision) if _result(region) not in asked]:
        asked |= {_result(region) for region in found}
        offers: tuple[Offer, ...] = (rounded, widened)
        for offer in offers:
            some = [one for region in found if (one := offer(region)) is not None]
            plain, storing, decided = decide(some, laid, judge, plain, storing)
            decisions |= decided
    return Types(storing, decisions)


def _result(region: Region) -> str:
    """The value of the graph by which a region is known in every partition."""
    return in_graph(region.outputs[0])


def _beside_float32(graph: Graph, laid_out: LaidOut, precision: Precision) -> Iterator[Region]:
    """The regions with factors of another type than the graph's that read or store float32, or read what is converted for them alone."""
    constants = frozenset(graph.constants)
    converted = {name for region in laid_out.regions if not region.nodes for name in region.outputs}
    for region in laid_out.regions:
        if not region.nodes or region.kind not in ("contraction", "attention", "loop"):
            continue
        factors = [laid_out.values[name].dtype for name in precision.factors(region, constants)]
        passed = [name for name in (*region.inputs, *region.outputs) if name not in constants]
        if any(dtype != FLOAT32 for dtype in factors) and any(laid_out.values[name].dtype == FLOAT32 or name in converted for name in passed):
            yield region
