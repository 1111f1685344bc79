"""Times that no kernel of a chain in tiles can beat on a GPU, and DeepCuts' limit of its operations, which are fused in shared memory.

    seconds >= max(launch, memory, regions, fma, shared)

launch: an empty kernel. memory: bytes that are certainly stored or read outside the chain, as far as level 2 cannot keep them from one call to the
next (`kernels.gpu.bounds`). regions: a block computes its parts of the regions one after another, as often as chunks repeat them, so that it takes at
least the sum of what their schemas' bounds say of one processor; and a processor runs its blocks in rounds of as many as it can hold. fma, shared:
all parts of all blocks of the busiest processor at the full rate of its multiply-adds, and of its shared memory. A tile has the same rows as all
others, those included that adjacent tiles compute too; barriers and the exchanges of a cluster count as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

from tilewright.codegen.cuda import shared_bytes
from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.expr import Load, loads, variables
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.bounds import memory_share
from tilewright.kernels.gpu.deepcuts import Launch
from tilewright.kernels.gpu.deepcuts_limits import Part, fused_seconds, worst_conflicts
from tilewright.kernels.schema import form_of
from tilewright.partition.tiles import Tiling
from tilewright.selection.bounds import as_columns, claimed
from tilewright.selection.ranking import Choice

THROUGHPUT = ("fma", "shared")
"""Terms of a schema's bound that are work of a processor's units, which all blocks share."""


def tile_bounds(tiling: Tiling, choices: Sequence[Choice], kernel: Kernel, processor: Machine, machine: Machine) -> Mapping[str, float]:
    """The longest term of the lower bound of a chain's kernel, in seconds under its name, and DeepCuts' limit where the paper has formulas for all of
    its regions. `choices`: of the regions' parts; `processor`: one of the machine's processors as a machine (`tile_schedules.shared_processor`)."""
    assert kernel.launch is not None
    launch = Launch(tiling.blocks, prod(kernel.launch.block), shared_bytes(kernel))
    parts = [part_of(tiling, number, choice, processor) for number, choice in enumerate(choices)]
    terms = lower_bounds(tiling, parts, launch, processor, machine)
    longest = max(terms, key=lambda name: terms[name])
    try:
        limit = fused_seconds(parts, launch, machine)
    except Unsuitable:
        return MappingProxyType({longest: terms[longest]})
    worst = max(worst_conflicts(part.schema, part.facts, part.candidate) for part in parts)
    return MappingProxyType({longest: terms[longest], **claimed(limit, worst)})


def part_of(tiling: Tiling, number: int, choice: Choice, processor: Machine) -> Part:
    """What a block computes of a region of a chain by a choice."""
    form = form_of(choice.schema, tiling.part(number), processor)
    assert not isinstance(form, Unsuitable), form
    return Part(choice.schema, form.facts, as_columns(choice.schedule), tiling.repeats[number])


def lower_bounds(tiling: Tiling, parts: Sequence[Part], launch: Launch, processor: Machine, machine: Machine) -> dict[str, float]:
    """The named terms of the lower bound, in seconds."""
    together = replace(processor, schedulers_per_processor=1)  # on which a few warps use all lanes, as those of several blocks may
    block = sum(part.times * max(_bound_of(part, processor).values(), default=0.0) for part in parts)
    full = {name: sum(part.times * _bound_of(part, together).get(name, 0.0) for part in parts) for name in THROUGHPUT}
    # how many registers the assembler will use is not known
    resident = int(resident_blocks(machine, int(launch.threads), 1, int(launch.shared_bytes)))
    moved = moved_bytes(tiling.problem)
    return {
        "launch": machine.launch_seconds,
        "memory": memory_share(machine, moved) * moved / machine.memory_bandwidth,
        "regions": -(-tiling.blocks // (machine.processors * resident)) * block,
        **{name: -(-tiling.blocks // machine.processors) * seconds for name, seconds in full.items()},
    }


def _bound_of(part: Part, machine: Machine) -> dict[str, float]:
    """The terms of a part's bound on one processor; none if its schema has no bound."""
    schema = part.schema
    if schema.bound is None:
        return {}
    terms = schema.bound(part.facts, part.candidate, schema.counts(part.facts, part.candidate, machine), machine, 0.0).terms
    return {name: float(seconds[0]) for name, seconds in terms.items()}


def moved_bytes(problem: Problem) -> float:
    """Bytes of a chain's results, and of what its sums of products read outside of it: all of a value, but at most one element for each combination
    of the axes in a load's index. What other regions read may be guarded."""
    inner = {name for stage in problem.region.stages for name in stage.outputs}
    most: dict[str, int] = {}
    for stage in problem.region.stages:
        if stage.kind == "contraction":
            for load in loads(*stage.steps[0].bodies):
                if load.buffer not in inner:
                    most[load.buffer] = max(most.get(load.buffer, 0), _elements(load))
    values = problem.values
    read = sum(values[name].bytes * min(1.0, most[name] / max(values[name].elements, 1)) for name in most)
    return read + sum(values[name].bytes for name in problem.region.outputs)


def _elements(load: Load) -> int:
    """The most elements that a load may read."""
    return prod(axis.extent or 1 for axis in variables(*load.index))
