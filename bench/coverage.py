"""The part of each zoo network that runs through PyTorch: nodes and arithmetic operations, per target.

    python -m bench.coverage --targets native,h200

Plans every network (nothing is compiled or run) and counts. Operations of a node that runs through PyTorch are counted with PyTorch's own
counter, since the operator table does not know it.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from rich.console import Console
from rich.table import Table

from bench.common import write_results
from tilewright import zoo
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.graph.table import STRUCTURAL, computation
from tilewright.hardware import identified_machine
from tilewright.ir.graph import Graph
from tilewright.partition.plan import plan_program

HEAVY = ("conv", "mm", "linear", "matmul", "attention", "lstm", "gru", "rnn")


def counts(graph: Graph) -> tuple[int, int, list[str]]:
    """(nodes, operations of generated code, ATen targets that run through PyTorch), with loop bodies counted once per iteration."""
    nodes, flops, through_torch = 0, 0, []
    for node in graph.nodes:
        if node.operator == "scan":
            inner = counts(node.attributes["body"])
            nodes += inner[0]
            flops += inner[1] * node.attributes["length"]
            through_torch += inner[2]
            continue
        nodes += 1
        if node.operator == "torch":
            through_torch.append(str(node.attributes["target"]))
        elif node.operator not in STRUCTURAL:
            flops += computation(node, graph.values).flops()
    return nodes, flops, through_torch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK")
    parser.add_argument("--targets", default="native,h200")
    parser.add_argument("--name", default="coverage")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    table = Table("network", "nodes", "through PyTorch", "of which heavy", "GFLOP generated", "regions", "kernels " + options.targets)
    for name in options.networks or list(zoo.NETWORKS):
        module, inputs = zoo.build(name)
        with torch.no_grad():
            graph, _ = simplify(read(module, inputs).graph)
        nodes, flops, through_torch = counts(graph)
        programs = {target: plan_program(graph, identified_machine(target), 2) for target in options.targets.split(",")}
        kernels = {target: len(program.kernels()) for target, program in programs.items()}
        regions = {target: len(program.regions) for target, program in programs.items()}
        fallen = {target: sum(r.region.kind == "torch" for r in program.regions) for target, program in programs.items()}
        heavy = [target for target in through_torch if any(word in target for word in HEAVY)]
        results.append(
            {"network": name, "nodes": nodes, "through_torch": through_torch, "heavy_through_torch": heavy, "flops": flops,
             "regions": regions, "kernels": kernels, "regions_through_torch": fallen}
        )  # fmt: skip
        table.add_row(
            name, str(nodes), str(len(through_torch)), str(len(heavy)), f"{flops / 1e9:.2f}", str(max(regions.values())),
            " ".join(str(k) for k in kernels.values()),
        )  # fmt: skip
        write_results(options.name, vars(options), results)
    Console().print(table)


if __name__ == "__main__":
    main()
