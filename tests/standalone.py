"""Programs for CPUs as stand-alone C: every kernel, and a main that calls them in order over buffers of exactly their size.

They run under sanitizers and under an emulator of another machine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tests.compiled import Case, compare
from tests.gpu_cases import offsets
from tests.interpreted import numpy_type, packed, poisoned
from tilewright.codegen.c import print_c
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware.machine import Machine
from tilewright.ir.region import Program, Storage
from tilewright.partition.plan import plan_program
from tilewright.toolchain.compilers import C_FLAGS

FLAGS = tuple(flag for flag in C_FLAGS if flag not in ("-shared", "-nostartfiles", "-fPIC", "-O2"))
"""Flags that give the text the meaning of the IR, without those for the kind of file and the optimisation level."""
MAIN = """
#include <stdio.h>
#include <stdlib.h>

static void *buffer(FILE *file, long bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes ? bytes : 1) || fread(memory, 1, bytes, file) != (size_t)bytes) exit(3);
    return memory;
}

int main(int count, char **names) {
    FILE *const in = fopen(names[1], "rb"), *const out = fopen(names[2], "wb");
    if (count != 3 || !in || !out) return 2;
%s
    fclose(in);
%s
%s
    fclose(out);
%s
    return 0;
}
"""


def driver(program: Program, storage: Mapping[str, Storage], kernels: str) -> str:
    """The C source that follows the kernels, or their declarations. The file that it reads holds every buffer's initial contents in the order of
    `storage`; it writes the outputs' buffers."""
    names = {name: f"b{i}" for i, name in enumerate(storage)}
    size = {name: entry.layout.size * numpy_type(entry).itemsize for name, entry in storage.items()}

    def address(name: str) -> str:
        """The buffer that a call receives, from its base if it is a slice."""
        root = program.aliases.get(name, name)
        return f"(char *){names[root]} + {storage[name].layout.base * numpy_type(storage[name]).itemsize}" if root != name else names[root]

    declared = [f"    void *{names[name]} = buffer(in, {size[name]});" for name in storage]
    called = program.kernels()
    calls = []
    for lowered in program.regions:
        calls.append(f"    for (int64_t step = 0; step < {lowered.repeat}; ++step) {{")
        for call in lowered.calls:
            arguments = ", ".join(address(argument) for argument in call.arguments)
            scalars = ", ".join([*["step"] * len(called[call.kernel].scalars), str(call.trips)])
            calls.append(f"        {call.kernel}((void *[]){{{arguments}}}, (int64_t[]){{{scalars}}});")
        calls.append("    }")
    written = [f"    fwrite({names[name]}, 1, {size[name]}, out);" for name in program.graph.outputs]
    freed = [f"    free({names[name]});" for name in storage]
    return kernels + MAIN % tuple("\n".join(lines) for lines in (declared, calls, written, freed))


def run_standalone(
    case: Case,
    machine: Machine,
    compiler: Sequence[str],
    folder: Path,
    emulator: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    libraries: Callable[[Program], Sequence[Path]] | None = None,
    threads: int = 1,
) -> str:
    """Plans the case for `threads` threads of the machine, compiles it with the given command, runs it, and compares the results. Returns its output.

    `libraries` makes shared objects of a program's kernels, which are linked in place of their source."""
    case.module.eval()
    imported = import_module(case.module, case.inputs)
    graph, _ = simplify(imported.graph)
    program = plan_program(graph, machine, threads)
    inputs = case.fresh_inputs()
    given = {graph.inputs[k]: inputs[leaf].numpy() for leaf, k in enumerate(imported.leaves) if k is not None}
    every = dict(program.storage)
    for lowered in program.regions:
        every.update({name: entry for name, entry in lowered.storage.items() if name not in program.storage})
    used = dict.fromkeys([name for lowered in program.regions for call in lowered.calls for name in call.arguments])
    used |= dict.fromkeys(program.aliases.values())
    storage = {name: every[name] for name in dict.fromkeys([*used, *graph.outputs])}
    with open(folder / "in", "wb") as file:
        for name, entry in storage.items():
            first = given[name].reshape(-1) if name in given else packed(program, entry) if entry.source is not None else poisoned(entry)
            file.write(np.ascontiguousarray(first).tobytes())
    declarations = "#include <stdint.h>\n" + "".join(f"void {name}(void *const *, const int64_t *);\n" for name in program.kernels())
    linked = [str(path) for path in libraries(program)] if libraries else []
    (folder / "program.c").write_text(driver(program, storage, declarations if libraries else print_c(list(program.kernels().values()))))
    built = subprocess.run([*compiler, "-o", "program", "program.c", *linked, "-lm"], cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[:4000]
    done = subprocess.run(
        [*emulator, "./program", "in", "out"], cwd=folder, capture_output=True, text=True, check=False, env=dict(environment) if environment else None
    )
    assert done.returncode == 0, (done.returncode, done.stderr[:4000])
    data, results = (folder / "out").read_bytes(), {}
    for name in graph.outputs:
        entry = storage[name]
        count = entry.layout.size * numpy_type(entry).itemsize
        flat, data = np.frombuffer(data[:count], numpy_type(entry)), data[count:]
        results[name] = torch.from_numpy(flat[offsets(entry.layout).ravel()].reshape(entry.value.shape).copy())
    assert not data
    assert all(output.kind == "value" for output in imported.outputs)
    compare(case, [results[graph.outputs[output.index]] for output in imported.outputs], inputs)
    return done.stderr
