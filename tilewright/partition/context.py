"""What regions are planned with: the chooser of schedules, and the context of a graph's regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, MergeDecision, Region
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.canonical import canonical, key_of
from tilewright.partition.chains import Ready
from tilewright.partition.judges import judge_of
from tilewright.partition.merges import BY_MERGES, Measured, Memory, Policy
from tilewright.partition.strip_judge import StripJudge
from tilewright.partition.tile_judge import TileJudge
from tilewright.selection.choice import choose
from tilewright.selection.ranking import Choice
from tilewright.stages import Stages

Chooser = Callable[[Problem, Machine, int], Choice]
"""Decides the schedule of a canonical problem for a machine and, on a CPU, a number of threads: `selection.choice.choose`, or records before it."""


Recorded = Callable[[Problem, Machine, int, Chooser], Measured | None]
"""What was measured of a canonical chain, and of its regions apart by the schedules that the chooser takes; None unless both were."""


@dataclass(frozen=True)
class Context:
    """Context for lowering regions."""

    graph: Graph
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    machine: Machine
    threads: int
    choose: Chooser = choose
    numerics: Numerics = USUAL
    stages: Stages = field(default_factory=Stages)
    lowered: dict[object, Lowered] = field(default_factory=dict)
    """Lowered canonical problems: networks repeat layers."""
    persistent: bool = True
    """Whether all steps of a recurrent layer may be one kernel."""
    memory: Memory = field(default_factory=Memory)
    ready: Ready = lambda kernels: None
    as_before: bool = False
    """Whether regions that the memory knows take their schedules from it."""
    sizes: bool = False
    """Whether the program is one of several for different sizes, which share kernels on a GPU too."""
    policy: Policy = BY_MERGES
    considered: list[MergeDecision] = field(default_factory=list)
    """What was decided about loops when they were lowered."""

    @cached_property
    def judge(self) -> StripJudge | TileJudge:
        """Predicts chains."""
        return judge_of(self.machine, self.threads, self.numerics, self.stages.ranked, self.memory)


def deciding_once(chooser: Chooser) -> Chooser:
    """The chooser, which is asked once for each canonical problem: regions are in several chains."""
    known: dict[object, Choice] = {}

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        key = key_of(problem)
        if key not in known:
            known[key] = chooser(problem, machine, threads)
        return known[key]

    return chosen


def canonical_problem(region: Region, context: Context) -> tuple[Problem, object, dict[str, str]]:
    """The region's problem with canonical names, what equal problems have in common, and the region's names by canonical ones."""
    same = canonical(Problem(region, context.layouts, context.values, frozenset(context.graph.constants)))
    return same.problem, key_of(same.problem), same.actual
