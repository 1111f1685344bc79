"""What is decided of a graph before its regions are made, each by the predicted times of both ways: which operators become one, how first layers read
their images, and which results no kernel stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tilewright.errors import contained
from tilewright.ir.dtypes import size_of
from tilewright.ir.graph import Graph
from tilewright.ir.region import MergeDecision, Region, Unsuitable
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.schema import form_of
from tilewright.partition.context import canonical_problem
from tilewright.partition.folded_images import fold_images
from tilewright.partition.joint_loops import join_loops
from tilewright.partition.library_layers import take_layers
from tilewright.partition.merges import Memory, Timed
from tilewright.partition.poolings import Poolings, choose_poolings
from tilewright.partition.predictions import Predictions
from tilewright.partition.prologues import Prologues, choose_prologues
from tilewright.partition.siblings import Merged, merge_siblings


@dataclass(frozen=True)
class Rewritten:
    """A graph of which regions are made. `unstored`: results of maps and contractions that their readers' kernels compute. `decisions`: by the node
    whose region they concern, of each kind of merge."""

    graph: Graph
    unstored: frozenset[str]
    decisions: tuple[Mapping[str, MergeDecision], ...]

    @property
    def considered(self) -> tuple[MergeDecision, ...]:
        return tuple(decision for one in self.decisions for decision in one.values())

    def about(self, region: Region) -> tuple[str, ...]:
        """What was decided about a region's nodes."""
        return tuple(one[node.name].text for node in region.nodes for one in self.decisions if node.name in one)


def rewritten(graph: Graph, predictions: Predictions, memory: Memory) -> Rewritten:
    """The graph with siblings merged, pairs of loops joined, and on GPUs images folded, wherever the models predict a gain, and the results that are
    not stored since they do; on CPUs, where sizes share kernels, as for the size planned first if the memory has one. A library computes the layers
    that the policy says."""
    gpu, policy = predictions.machine.is_gpu, predictions.policy
    kept = Memory() if gpu else memory
    taking = partial(take_layers, graph, predictions.of_nodes, policy)
    vendor = predictions.numerics.vendor
    left = contained("the model", "no library computes layers", taking, lambda _: Merged(graph)) if vendor else Merged(graph)
    merging = partial(merge_siblings, left.graph, predictions.of_regions, kept.siblings, policy)
    merged = contained("the model", "its siblings stay apart", merging, lambda _: Merged(left.graph))
    joining = partial(join_loops, merged.graph, predictions.loops, kept.loops, policy)
    joint = contained("the model", "its loops stay apart", joining, lambda _: Merged(merged.graph))
    folding = partial(_folded, joint.graph, predictions)
    folded = contained("the model", "no image is folded", folding, lambda _: Merged(joint.graph)) if gpu else Merged(joint.graph)
    computing = partial(_prologues, folded.graph, predictions, kept)
    inside = contained("the model", "contractions read what maps store", computing, lambda _: Prologues())
    pooling = partial(_poolings, folded.graph, predictions, inside.values)
    pooled = contained("the model", "poolings read what is stored", pooling, lambda _: Poolings()) if gpu else Poolings()
    decisions = (left.decisions, merged.decisions, joint.decisions, folded.decisions, inside.decisions, pooled.decisions)
    return Rewritten(folded.graph, inside.values | pooled.values, decisions)


def _folded(graph: Graph, predictions: Predictions) -> Merged:
    """The graph with images of few channels folded for tensor cores where the models predict a gain."""
    machine, precision = predictions.machine, predictions.precision

    def lanes(graph: Graph, region: Region) -> int:
        context = predictions.context(graph)
        form = form_of(TENSOR_CORES, canonical_problem(region, context)[0], machine)
        numerics = predictions.numerics
        if isinstance(form, Unsuitable) or (form.facts.kind == "tf32" and not (numerics.tf32 or numerics.tf32_pairs)):
            return 0
        # folded, the factors may be of 16 bits although they are better float32 as they are
        factors = precision.factors(region, frozenset(graph.constants))
        element = min((size_of(precision.stored(region, context.values[name])) for name in factors), default=form.facts.element_bytes)
        return WIDEST_BYTES // element

    return fold_images(graph, lambda graph: predictions.laid_out(graph).regions, predictions.of_regions, lanes, predictions.policy)


def _prologues(graph: Graph, predictions: Predictions, kept: Memory) -> Prologues:
    """The maps that contractions compute where the models predict a gain."""

    def predict(values: frozenset[str], concerns: Callable[[Region], bool]) -> list[Timed]:
        return predictions.of_regions(graph, concerns, values)

    return choose_prologues(predictions.laid_out(graph).regions, graph.outputs, predict, kept.prologues, predictions.policy)


def _poolings(graph: Graph, predictions: Predictions, unstored: frozenset[str]) -> Poolings:
    """The results that kernels of contractions pool where the models predict a gain."""
    regions = predictions.laid_out(graph, unstored).regions
    predict = partial(predictions.in_partition, graph, unstored)
    return choose_poolings(regions, graph.outputs, frozenset(graph.constants), predict, predictions.policy)
