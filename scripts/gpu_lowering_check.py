"""Measures generated convolution kernels against the vendor library, layer by layer; compiling and measuring may take place on different machines.

    python scripts/gpu_lowering_check.py compile FOLDER [--target h200] [--alternatives 8] [--layers R2,R12] [--only direct]
    python scripts/gpu_lowering_check.py run FOLDER [--name gpu_layers_h200]

`compile` needs no GPU: it builds the layers as regions, lowers the chosen schedule and alternatives from the space, and stores cubins with a
manifest; `--only` takes only the candidates of the named schema, and leaves out layers that have none. `run` needs only PyTorch and the
driver: it checks every kernel against PyTorch in float64, times CUDA-graph replays over buffers that rotate through more than 200 MB (weights come
from memory), and compares with the library's convolution in benchmark mode, TF32 off, both layouts.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.layers import LAYERS

WAYS = ("split", "stages", "cluster", "atomics")
"""Parameters in which schedules with the same tiles differ."""
ROTATED_BYTES = 220e6
MOST_SETS = 256


# --- compiling --------------------------------------------------------------------------------------------------------


def compile_layers(folder: Path, target: str, alternatives: int, names: list[str], only: str = "") -> None:
    """Writes cubins and manifest.json to the folder."""
    from concurrent.futures import ProcessPoolExecutor

    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        manifest = [entry for entry in pool.map(partial(compile_layer, folder, target, alternatives, only), names) if entry["candidates"]]
    (folder / "manifest.json").write_text(json.dumps({"target": target, "layers": manifest}, indent=1))
    everything = [record for entry in manifest for record in entry["candidates"]]
    spilled = [record["schedule"] for record in everything if record["spill_bytes"]]
    print(f"{len(everything)} candidates of {len(manifest)} layers in {folder}; {len(spilled)} spill registers: {spilled}")


def compile_layer(folder: Path, target: str, alternatives: int, only: str, name: str) -> dict[str, Any]:
    """One layer's entry of the manifest; its cubins are in the folder."""
    from tilewright.codegen.cuda import dynamic_shared_bytes, print_cuda
    from tilewright.hardware import machine as find_machine
    from tilewright.kernels.registry import lower
    from tilewright.selection.choice import rank
    from tilewright.toolchain.binary import SourceFile, parse_resources
    from tilewright.toolchain.compilers import NvrtcCompiler

    machine = find_machine(target)
    compiler = NvrtcCompiler.find(machine)
    problem = layer_problem(*LAYERS[name])
    ranking = rank(problem, machine)
    candidates = []
    for position, choice in sample(ranking, alternatives, only):
        lowered = lower(problem, choice.schedule, machine)
        packed = {
            n: {"view": s.view, "matrix": s.matrix, "shape": s.value.shape, "pad": s.layout.size} for n, s in lowered.storage.items() if s.source
        }
        place = folder / f"{name}_{position}"
        place.mkdir(exist_ok=True)
        distinct = list({kernel.name: kernel for kernel in lowered.kernels}.values())
        text = print_cuda(distinct)
        (place / "kernel.cu").write_text(text)
        outcome = compiler.compile(SourceFile("kernel.cu", text, "cuda", tuple(k.name for k in distinct)), place)
        if not outcome.succeeded:
            raise SystemExit(outcome.log)
        found = parse_resources(outcome.log)
        candidates.append(
            {
                "rank": position,
                "schedule": lowered.schedule,
                "schema": choice.schema.name,
                "parameters": dataclasses.asdict(choice.schedule),
                "predicted_us": choice.seconds * 1e6,
                "terms_us": {n: t * 1e6 for n, t in choice.terms.items()},
                "kernels": {
                    k.name: {"grid": k.launch.grid, "block": k.launch.block, "dynamic_shared": dynamic_shared_bytes(k)}
                    for k in lowered.kernels
                    if k.launch
                },
                "calls": [[call.kernel, list(call.arguments)] for call in lowered.calls],
                "packed": packed,
                "work": {n: s.layout.size for n, s in lowered.storage.items() if not s.source},
                "folder": place.name,
                "registers": {n: r.registers for n, r in found.items()},
                "spill_bytes": {n: r.spill_bytes for n, r in found.items() if r.spill_bytes},
            }
        )
    return {"layer": name, "candidates": candidates, "feasible": ranking.candidates}


def layer_problem(outputs: int, channels: int, size: int, filter_size: int, stride: int) -> Any:
    """A convolution, channels last, with a stored halo."""
    from tilewright.ir.computation import StepBuilder, Tensor
    from tilewright.ir.graph import Value
    from tilewright.ir.layout import channels_last, row_major
    from tilewright.ir.problem import Problem
    from tilewright.ir.region import Region

    padding = filter_size // 2
    extent = size * stride
    x = Tensor("x", (1, channels, extent, extent), "f32")
    w = Tensor("w", (outputs, channels, filter_size, filter_size), "f32")
    builder = StepBuilder("conv")
    (result,) = builder.reduce(
        "sum",
        (1, outputs, size, size),
        (filter_size, filter_size, channels),
        lambda n, k, oy, ox, fy, fx, c: x(n, c, oy * stride + fy - padding, ox * stride + fx - padding) * w(k, c, fy, fx),
    )
    steps = builder.finish([result], ["out"]).steps
    values = {t.name: Value(t.name, t.shape, "f32") for t in (x, w)} | {"out": Value("out", result.shape, "f32")}
    halo = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    layouts = {
        "x": channels_last(x.shape).with_halo(halo),
        "w": row_major(w.shape),
        "out": channels_last(result.shape),
    }
    return Problem(Region("out", "contraction", (), steps, ("x", "w"), ("out",)), layouts, values, frozenset({"w"}))


def sample(ranking: Any, alternatives: int, only: str = "") -> Iterator[tuple[int, Any]]:
    """(rank, choice) of the first choice, the next one with other tile shapes, and others further down (ranks in a geometric sequence); only of the
    schema `only`, if given."""
    near = max(1, alternatives // 3)
    wanted: set[int] = set()
    further = alternatives - near
    for number in range(further):
        wanted.add(int(2 * (ranking.candidates / 4) ** ((number + 1) / further)))
    seen: set[tuple[Any, ...]] = set()
    last = max(wanted, default=0)
    for position, choice in enumerate(choice for choice in ranking if only in ("", choice.schema.name)):
        key = (choice.schema.name, *(value for axis, value in dataclasses.asdict(choice.schedule).items() if axis not in WAYS))
        if position in wanted or (key not in seen and len(seen) <= near):
            seen.add(key)
            yield position, choice
        if position > last and len(seen) > near:
            break


# --- running ----------------------------------------------------------------------------------------------------------


class Driver:
    """The few driver functions needed to launch a cubin."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")

    def functions(self, path: Path, kernels: dict[str, Any]) -> dict[str, ctypes.c_void_p]:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), path.read_bytes())
        found = {}
        for name, facts in kernels.items():
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            if facts["dynamic_shared"]:
                self.call("cuFuncSetAttribute", function, 8, facts["dynamic_shared"])
            found[name] = function
        return found

    def launch(self, function: ctypes.c_void_p, facts: dict[str, Any], pointers: list[int], stream: int) -> None:
        values = [ctypes.c_void_p(pointer) for pointer in pointers]
        packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call(
            "cuLaunchKernel", function, *facts["grid"], *facts["block"], facts["dynamic_shared"],
            ctypes.c_void_p(stream), packed, None,
        )  # fmt: skip


def run_layers(folder: Path, name: str) -> None:
    """Checks and times every candidate of the manifest on the GPU present; prints a table and writes bench/results/`name`.json."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    manifest = json.loads((folder / "manifest.json").read_text())
    driver = Driver()
    torch.zeros(1, device="cuda")
    results = []
    print(f"{'layer':6}{'library us':>11}{'chosen us':>11}{'best us':>9}{'predicted':>10}{'rank':>6}{'loss':>6}  chosen | best")
    for entry in manifest["layers"]:
        record = run_layer(torch, driver, folder, entry)
        results.append(record)
        good = [c for c in record["candidates"] if c["error"] is None]
        if not good:
            print(f"{record['layer']:6} every candidate failed: {record['candidates'][0]['error']}")
            continue
        chosen, best = record["candidates"][0], min(good, key=lambda c: c["measured_us"])
        if chosen["error"]:
            print(f"{record['layer']:6} the chosen candidate failed: {chosen['error']}")
            continue
        record["spearman"] = spearman([c["predicted_us"] for c in good], [c["measured_us"] for c in good])
        record["loss_of_chosen"] = chosen["measured_us"] / best["measured_us"] - 1
        print(
            f"{record['layer']:6}{record['library_us']:11.1f}{chosen['measured_us']:11.1f}{best['measured_us']:9.1f}"
            f"{chosen['predicted_us']:10.1f}{record['spearman']:6.2f}{record['loss_of_chosen']:6.2f}  "
            f"{chosen['schedule'].removeprefix('contraction ')} | {best['schedule'].removeprefix('contraction ')} (rank {best['rank']})",
            flush=True,
        )
        for candidate in record["candidates"]:
            if candidate["error"]:
                print(f"       FAILED {candidate['schedule']}: {candidate['error']}")
    if name:
        from bench.common import write_results

        settings = {"target": manifest["target"], "rotated_bytes": ROTATED_BYTES, "cudnn": torch.backends.cudnn.version()}
        print(write_results(name, settings, results))


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation; ranks of equal values are not averaged (times are hardly ever equal)."""
    ranks = [{at: rank for rank, at in enumerate(sorted(range(len(v)), key=v.__getitem__))} for v in (first, second)]
    count = len(first)
    if count < 2:
        return 1.0
    return 1 - 6 * sum((ranks[0][i] - ranks[1][i]) ** 2 for i in range(count)) / (count * (count**2 - 1))


def run_layer(torch: Any, driver: Driver, folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    outputs, channels, size, filter_size, stride = LAYERS[entry["layer"]]
    padding, extent = filter_size // 2, size * stride
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, channels, extent, extent, device="cuda", generator=generator)
    w = torch.randn(outputs, channels, filter_size, filter_size, device="cuda", generator=generator)
    expected = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding)
    padded = torch.nn.functional.pad(x, (padding,) * 4).permute(0, 2, 3, 1).contiguous().reshape(-1)
    bytes_each = 4 * (padded.numel() + w.numel() + expected.numel())
    sets = max(2, min(MOST_SETS, ceil(ROTATED_BYTES / bytes_each)))
    library = min(
        timed(torch, library_calls(torch, x, w, stride, padding, sets, layout), sets) for layout in (torch.contiguous_format, torch.channels_last)
    )
    scale = expected.abs().max().item()
    candidates = []
    for candidate in entry["candidates"]:
        found = {k: candidate[k] for k in ("rank", "schedule", "schema", "parameters", "predicted_us", "terms_us", "registers", "spill_bytes")}
        found |= {"measured_us": None, "relative_error": None, "error": None}
        try:
            path = folder / candidate["folder"] / "kernel.cubin"
            functions = driver.functions(path, candidate["kernels"])
            buffers = make_buffers(torch, candidate, padded, w, expected.numel(), sets)

            def launch(number: int, candidate: Any = candidate, functions: Any = functions, buffers: Any = buffers) -> None:
                stream = torch.cuda.current_stream().cuda_stream
                for kernel, arguments in candidate["calls"]:
                    pointers = [buffers[name][number].data_ptr() for name in arguments]
                    driver.launch(functions[kernel], candidate["kernels"][kernel], pointers, stream)

            launch(0)
            torch.cuda.synchronize()
            result = buffers["out"][0].reshape(1, size, size, outputs).permute(0, 3, 1, 2)
            found["relative_error"] = ((result.double() - expected).abs().max() / scale).item()
            if not found["relative_error"] < 1e-4:
                found["error"] = f"wrong result: relative error {found['relative_error']:.2e}"
            else:
                found["measured_us"] = timed(torch, launch, sets)
        except RuntimeError as error:
            found["error"] = str(error)
        candidates.append(found)
    return {"layer": entry["layer"], "library_us": library, "sets": sets, "candidates": candidates}


def make_buffers(torch: Any, candidate: dict[str, Any], padded: Any, w: Any, outputs: int, sets: int) -> dict[str, Any]:
    """Every argument, `sets` times."""
    buffers = {"x": padded.expand(sets, -1).contiguous(), "out": torch.zeros(sets, outputs, device="cuda")}
    for name, facts in candidate["packed"].items():
        sizes, strides, offset = facts["view"]
        packed, shape = torch.as_strided(w, sizes, strides, offset), facts["shape"]
        if facts["matrix"] is not None:
            matrix = torch.tensor(facts["matrix"], dtype=torch.float64, device="cuda")
            packed = (matrix @ packed.double().reshape(matrix.shape[1], -1)).float().reshape(shape)
        width = facts["pad"] // prod(shape[:-1])
        packed = torch.nn.functional.pad(packed, (0, width - shape[-1])).contiguous().reshape(-1)
        buffers[name] = packed.expand(sets, -1).contiguous()
    for name, count in candidate["work"].items():
        buffers[name] = torch.zeros(1, count, device="cuda").expand(sets, -1)
    return buffers


def library_calls(torch: Any, x: Any, w: Any, stride: int, padding: int, sets: int, layout: Any) -> Callable[[int], None]:
    inputs = [x.clone().to(memory_format=layout) for _ in range(sets)]
    weights = [w.clone().to(memory_format=layout) for _ in range(sets)]

    def call(number: int) -> None:
        torch.nn.functional.conv2d(inputs[number], weights[number], None, stride, padding)

    with torch.no_grad():
        call(0)
    return call


def timed(torch: Any, call: Callable[[int], None], sets: int, repeats: int = 9) -> float:
    """Microseconds per call: median over replays of a graph that makes the call once for each set of buffers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for number in range(2):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for number in range(sets):
            call(number)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / sets)
    return float(statistics.median(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("compile", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--alternatives", type=int, default=8)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--only", default="", help="the name of a schema")
    parser.add_argument("--name", default="gpu_layers_h200", help="the result file's name in bench/results; empty for none")
    options = parser.parse_args()
    if options.mode == "compile":
        compile_layers(options.folder, options.target, options.alternatives, options.layers.split(","), options.only)
    else:
        run_layers(options.folder, options.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
