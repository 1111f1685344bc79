"""Where a network's time goes on the GPU present: each region's share of one call, with its prediction and its bound.

    python -m bench.gpu_regions resnet50 bert_base [--worst 15]

The kernels run one after another; a region's time is that of the program up to and including it less that of the program before it, each the median
of calls that find the L2 cache full of other data. So it includes the state of the caches in the network, and the gap before it. The bound is the
larger of its operations over the sustained rate and its distinct bytes over the sustained bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tilewright
from bench.common import write_results
from bench.gpu_networks import FLUSHED_BYTES, cold_seconds
from tilewright import zoo
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine as find_machine
from tilewright.kernels.gpu.rates import bandwidth
from tilewright.partition.plan import plan_program
from tilewright.runtime.gpu import GpuEngine, gpu_engine


def bounds(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, tuple[float, float]]:
    """(operations, distinct bytes) by region."""
    graph, _ = simplify(import_module(module, inputs).graph)
    program = plan_program(graph, find_machine("cuda"), 1)
    found: dict[str, tuple[float, float]] = {}
    for lowered in program.regions:
        region = lowered.region
        values = {name: program.storage[name].value for name in (*region.inputs, *region.outputs) if name in program.storage}
        found[region.name] = (sum(step.flops() for step in region.steps), sum(value.bytes for value in values.values()))
    return found


def median_seconds(call: Callable[[], object], scratch: torch.Tensor, repeats: int) -> float:
    call()
    return statistics.median(cold_seconds(call, scratch) for _ in range(repeats))


def profile(name: str, batch: int, repeats: int, scratch: torch.Tensor) -> dict[str, Any]:
    """Times in seconds of the whole network (with kernels concurrent where dependences allow, and serial) and of each region."""
    module, _ = zoo.build(name, batch)
    inputs = tuple(x.cuda() for x in zoo.NETWORKS[name].example_inputs(batch))
    module = module.cuda()
    executable = tilewright.compile(module, inputs, unsupported="error")
    operations = bounds(module, inputs)
    machine = find_machine("cuda")
    rate = machine.sustained_flops.get("fp32", machine.peak_flops["fp32"])
    side_by_side = median_seconds(lambda: executable(*inputs), scratch, repeats)
    image = executable.image
    engine: GpuEngine = gpu_engine(image.program, image.binaries, in_order=True)
    outputs = executable._allocate()
    pointers = [tensor.data_ptr() for tensor in (*executable._admission.admit(inputs), *outputs)]

    def run(last: int) -> None:
        engine.bind(pointers)
        engine.run(0, last)
        engine.finish()

    rows = []
    before = 0.0
    for number, row in enumerate(executable.plan.rows):
        after = median_seconds(partial(run, number + 1), scratch, repeats)
        flops, moved = operations[row.name]
        rows.append(
            {
                "region": row.name,
                "kind": row.kind,
                "operators": [operator for _, operator, _ in row.nodes],
                "schedule": row.schedule,
                "kernels": len(row.kernels) * row.repeat,
                "measured_us": (after - before) * 1e6,
                "predicted_us": row.predicted_seconds * 1e6,
                "terms_us": {term: seconds * 1e6 for term, seconds in row.terms.items()},
                "bound_us": max(flops / rate, moved / bandwidth(machine)) * row.repeat * 1e6,
                "flops": flops,
                "bytes": moved,
            }
        )
        before = after
    total = median_seconds(lambda: run(len(rows)), scratch, repeats)
    engine.close()
    return {"network": name, "batch": batch, "side_by_side_us": side_by_side * 1e6, "in_order_us": total * 1e6, "regions": rows}


def show(result: dict[str, Any], worst: int, console: Console) -> None:
    rows = result["regions"]
    predicted, bound = (sum(row[key] for row in rows) for key in ("predicted_us", "bound_us"))
    table = Table(
        "region", "kind", "schedule", "n", "us", "predicted", "bound", "GFLOP", "MB", box=None,
        title=f"{result['network']}: {result['side_by_side_us']:.0f} us, in order {result['in_order_us']:.0f}, "
        f"predicted {predicted:.0f}, bound {bound:.0f}; {len(rows)} regions",
    )  # fmt: skip
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["schedule"], round(row["flops"] / 1e6), row["bytes"]), []).append(row)
    lost = {key: sum(r["measured_us"] - r["bound_us"] for r in same) for key, same in groups.items()}
    for key in sorted(groups, key=lambda k: -lost[k])[:worst]:
        same = groups[key]
        mean = {n: statistics.fmean(r[n] for r in same) for n in ("measured_us", "predicted_us", "bound_us")}
        table.add_row(
            same[0]["region"][:24], f"{key[0]} {'+'.join(dict.fromkeys(same[0]['operators']))}"[:36], key[1].split(" ", 1)[-1][:44], f"{len(same)}",
            f"{mean['measured_us']:.1f}", f"{mean['predicted_us']:.1f}", f"{mean['bound_us']:.1f}",
            f"{same[0]['flops'] / 1e9:.3f}", f"{same[0]['bytes'] / 1e6:.2f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="+", metavar="NETWORK")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--worst", type=int, default=15, help="rows printed a network: equal regions together, by time lost to the bound")
    parser.add_argument("--name", default="gpu_regions_h200", help="the result file's name in bench/results")
    options = parser.parse_args()
    scratch = torch.empty(FLUSHED_BYTES // 4, device="cuda")
    results = []
    for name in options.networks:
        results.append(profile(name, options.batch, options.repeats, scratch))
        write_results(options.name, vars(options), results)
        gc.collect()
        torch.cuda.empty_cache()
    console = Console(width=170)
    for result in results:
        show(result, options.worst, console)


if __name__ == "__main__":
    main()
