"""The whole pipeline: a model and a target go in, an executable comes out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from tilewright.errors import (
    InvalidInput,
    InvalidModel,
    KernelFailed,
    UnknownTarget,
    UnsupportedOption,
    contained,
    warn_not_compiled,
)
from tilewright.frontend.copies import Copies
from tilewright.frontend.imported import Imported, report_unsupported
from tilewright.frontend.imported import unsupported as unsupported_nodes
from tilewright.frontend.narrowed import NarrowedModel
from tilewright.frontend.ranged import ranges_of
from tilewright.frontend.sized import DeclaredModel, ModuleModel, OnnxModel, SizedModel
from tilewright.frontend.symbolic import SymbolicProgram, import_program
from tilewright.frontend.torch_export import load_exported
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import is_present, planned_threads
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Kernel
from tilewright.ir.region import Program
from tilewright.kernels.schema import Numerics
from tilewright.models import inputs_of, resolve
from tilewright.partition.merges import Memory
from tilewright.partition.plan import plan_program
from tilewright.partition.precision import check_precision
from tilewright.partition.without_kernels import through_torch, without_kernels
from tilewright.runtime.buffers import SharedConstants
from tilewright.runtime.dynamic import MOST_PROGRAMS, WAIT_SECONDS, Built, DynamicExecutable, Served
from tilewright.runtime.executable import Executable, Image, check_threads, executable_of, image_of
from tilewright.runtime.kernel_source import kernel_source
from tilewright.runtime.signature import CONSTANT_TYPES, described, signature_of
from tilewright.stages import Progress, Stages
from tilewright.system.collection import collection_paused
from tilewright.toolchain import Binary, Early, SourceFile, compile_kernels
from tilewright.tuning.choices import remembered
from tilewright.tuning.partitions import Network, Planning, fastest
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import chooser_for, distinct_problems, tune


@dataclass(frozen=True)
class Family:
    """What programs of one model for several sizes share, on one machine with the same options: its parameters, constants, and what planning
    them found."""

    copies: Copies = field(default_factory=Copies)
    constants: SharedConstants = field(default_factory=SharedConstants)
    memory: Memory = field(default_factory=Memory)


class Options(TypedDict, total=False):
    """The options of `compile` that do not change what it returns."""

    example_keywords: Mapping[str, Any] | None
    batch: int | None
    precision: str
    trials: int
    vendor: bool
    unsupported: str
    threads: int | None
    records: str | Path | None
    deterministic: bool
    winograd: bool
    check: bool
    progress: Progress | None
    wait: float | bool
    programs: int
    quick: bool
    family: Family | None


Examples = Sequence[Any] | torch.Tensor | None
Target = str | Machine | None


@overload
def compile(
    module: Any, example_inputs: Examples = None, target: Target = None, *, dynamic: None = None, **options: Unpack[Options]
) -> Executable: ...


@overload
def compile(
    module: Any, example_inputs: Examples = None, target: Target = None, *, dynamic: Any, **options: Unpack[Options]
) -> DynamicExecutable: ...


def compile(
    module: Any,
    example_inputs: Examples = None,
    target: Target = None,
    *,
    example_keywords: Mapping[str, Any] | None = None,
    batch: int | None = None,
    precision: str = "fp32",
    trials: int = 0,
    vendor: bool = False,
    unsupported: str = "warn",
    threads: int | None = None,
    records: str | Path | None = None,
    deterministic: bool = True,
    winograd: bool = True,
    check: bool = False,
    progress: Progress | None = None,
    dynamic: Any = None,
    wait: float | bool = WAIT_SECONDS,
    programs: int = MOST_PROGRAMS,
    quick: bool = True,
    family: Family | None = None,
) -> Executable | DynamicExecutable:
    """Compiles a model for a target, using performance models and earlier measurements.

    Args:
        module: an nn.Module (with `example_inputs`), an ExportedProgram, an onnx.ModelProto, the path of a .pt2 or .onnx file, or any other name of a
            model on the command line ("zoo:lenet5").
        example_inputs: positional inputs; their shapes and dtypes are what the executable accepts.
        batch: the first extent of the example inputs of a model given by its name, or with first extents that are free, such as a file; others are
            given by `example_inputs`.
        target: None (the device of the inputs), "native" (this CPU), "cuda" (the GPU present), or a catalogue name ("h200").
        trials: the number of each region's candidates, the models' favourites, to measure first; needs the target machine. 0: none.
        precision: "fp32"; on GPUs "fp16" and "bf16", on CPUs with AVX512-BF16 "bf16": values stored between kernels and the factors of contractions
            are rounded to 16 bits, sums and everything else are float32; inputs and outputs keep their types. On GPUs (sm_80) also "tf32": the
            factors of contractions are rounded to 10 bits of mantissa where that is faster; "fp32-tensor": they may be split into pairs of such
            numbers, so that sums have errors like those in float32; and "fp32-tensor-fp16": the same of pairs of float16, whose first factors are
            below 65,520 (others give NaN).
        records: the file of measurements (default: the user's); measurements take precedence over the models, and trials are added to the file.
        deterministic: False lets a GPU add the parts of a split sum by atomic operations, in no fixed order, if that is faster: two calls may then
        differ in the last bits. The choice of kernels is deterministic either way.
        winograd: False computes all sums directly. Winograd's algorithm is faster for most 3x3, 5x5 and 1x7 convolutions, Fourier transforms for most
            with larger filters; their errors depend on the largest value of a block of the input, and infinities and NaN reach every result of that
            block.
        check: True makes each call on a GPU wait for its results and itself raise IndexOutOfRange, which otherwise the next call or `synchronize`
            raises. It sets the executable's attribute `check`, which may be changed.
        vendor: True considers library kernels too, through PyTorch: oneDNN and BLAS on a CPU, cuDNN and cuBLAS on a GPU, and its own for attention
            and pooling. Nothing predicts their times, so that one is chosen only if it was measured on this machine, with `trials` or earlier, and
            was the fastest.
        unsupported: "warn" runs unsupported operators through PyTorch and lists them once; "error" refuses the model.
        threads: CPU threads to plan for and to run with (default: TILEWRIGHT_THREADS; else `torch.get_num_threads()` at this moment, but
            all of a CPU's cores if its code cannot run here).
        progress: called as progress(stage, done, total) with a stage of `stages.STAGES`; total is 0 while it is not known.
        dynamic: None: the executable accepts the sizes of the example inputs. Otherwise the result is a `DynamicExecutable`, which accepts other
            sizes too: of the dimensions that are named ({"x": {0: "batch"}}, or `torch.export`'s dynamic_shapes), or with True of all that the model
            leaves free. A file declares which sizes can be free, and may be named a part of them.
        wait: seconds that a call with sizes not seen before waits for its program before it runs eager; True: as long as it takes.
        programs: the most programs that a `DynamicExecutable` keeps, those used last.
        quick: on CPUs a program for sizes not seen before has the schedules of others at first, which takes a fraction of the time; once no new sizes
            have come for some seconds, the program that is predicted best for these sizes takes its place, whose results may differ in the last bits.
            False: there is only the latter.
        family: shared with earlier and later compilations of this model for other sizes, on the same machine with the same options.

    Raises:
        UnknownTarget, TargetNotPresent, UnknownModel, InvalidModel, UnsupportedOperator, UnsupportedOption, CompilerMissing, CacheError: each with
        cause and remedy.
    """
    check_options(precision, trials, vendor, unsupported, threads, records, deterministic, winograd, check, wait, programs, quick)
    if torch.get_default_device().type == "meta":
        raise InvalidInput("the default device is 'meta', whose tensors hold no values", 'compile outside of `with torch.device("meta")`')
    stages = Stages(progress)
    _refuse_arrays(example_inputs, example_keywords)
    if not isinstance(example_inputs, (torch.Tensor, Sequence, type(None))) or isinstance(example_inputs, str):
        raise InvalidInput(f"example_inputs is {described(example_inputs)}", "pass the model's positional inputs as a tuple")
    if not isinstance(target, (str, Machine, type(None))):
        raise UnknownTarget(f"target is {described(target)}", "pass a name of `tilewright targets`, or None")
    module, inputs = _given(module, (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs, batch)
    machine = find_machine(default_target(inputs) if target is None else target)
    check_precision(precision, machine)
    stages.report("export")
    numerics = Numerics(atomics=not deterministic, winograd=winograd, vendor=vendor).at(precision)
    by_code = dynamic is None  # calls wait for the programs of new sizes, and comparing code takes up to half of their time
    request = Request(module, machine, precision, trials, unsupported, planned_threads(machine, threads), records, numerics, check, by_code)
    if dynamic is None:
        with stages.stage("export"), collection_paused():
            imported = read(module, inputs, example_keywords, family.copies if family is not None else None, machine.is_gpu)
        return compiled(imported, request, stages, family)
    family = family or Family()
    examples = _example_leaves(module, inputs, example_keywords)
    with stages.stage("export"), collection_paused():
        model = sized(module, inputs, example_keywords, dynamic, examples, family.copies, machine.is_gpu)
    key = model.key(examples)
    if isinstance(module, torch.nn.Module):
        model.check_sizes(key)
    else:  # nothing else has compared these examples with what the model declares
        model.check(examples)
    imported = model.bind(key)
    ranges = ranges_of(model, key)
    rounded = None if ranges is None else ranges.rounded(key)

    later = replace(request, trials=0, unsupported="error" if unsupported == "error" else "")

    def build(served: Served, as_before: bool, progress: Progress | None) -> Built:
        key, several = served
        bound, frame = ranges.bind(key) if several and ranges is not None else (model.bind(key), None)
        return compiled(bound, later, Stages(progress), family, as_before, sizes=True), frame

    served = (key, False) if rounded is None else (rounded, True)
    bound, frame = (imported, None) if ranges is None or rounded is None else ranges.bind(rounded)
    repeats = quick and not machine.is_gpu  # where sizes share kernels
    as_before = repeats and not trials and bool(family.memory.schedules)
    first = compiled(bound, request, stages, family, as_before, sizes=True), frame
    signature = signature_of(imported, _parameters(module), _defaults(module))
    eager = module if isinstance(module, torch.nn.Module) and is_present(machine) else None
    return DynamicExecutable(model, ranges, build, signature, (served, first, as_before), eager, wait, programs, repeats)


def sized(
    module: Any,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any] | None,
    dynamic: Any,
    leaves: Sequence[Any],
    copies: Copies | None = None,
    on_gpu: bool = False,
) -> SizedModel:
    """A model whose sizes may differ from call to call; `leaves` are those of its examples, `copies` those of earlier readings of it, `on_gpu` says
    where it is to run. Raises InvalidModel if none of its sizes may, InvalidInput if there are no examples, and UnsupportedOption for a `dynamic`
    that does not fit it."""
    module_given = isinstance(module, torch.nn.Module)
    model = ModuleModel(module, inputs, keywords, dynamic, copies, on_gpu) if module_given else _with_own_sizes(module, copies, on_gpu)
    if not model.names:
        what = "or give examples whose free dimensions have at least two entries" if module_given else "or export it with free sizes"
        raise InvalidModel("no size of the model is free", f"leave out `dynamic`, {what}")
    if not leaves:
        raise InvalidInput("the first program needs sizes", "pass example_inputs too")
    return model if dynamic is True or isinstance(model, ModuleModel) else NarrowedModel(model, leaves, dynamic)


def _example_leaves(module: Any, inputs: Sequence[Any], keywords: Mapping[str, Any] | None) -> list[Any]:
    """The leaves of the example inputs, which an exported program may have itself."""
    examples = tree_leaves((inputs, dict(keywords or {})))
    if not examples and isinstance(module, torch.export.ExportedProgram):
        examples = tree_leaves(module.example_inputs or ())
    return examples


def _with_own_sizes(module: Any, copies: Copies | None = None, on_gpu: bool = False) -> DeclaredModel:
    """A file, or what such files hold, whose free sizes it declares itself."""
    if isinstance(module, torch.export.ExportedProgram):
        return SymbolicProgram(module, copies=copies, on_gpu=on_gpu)
    if isinstance(module, (str, Path)) and str(module).endswith(".pt2"):
        return SymbolicProgram(load_exported(module), copies=copies, on_gpu=on_gpu)
    if _is_onnx(module):
        return OnnxModel(module)
    raise _no_model(module)


@dataclass(frozen=True)
class Request:
    """What `compile` is asked for, apart from the graph: the model, for its parameters' names and defaults, the target, and the options.
    `unsupported`: as there, or "" if the caller warns of the operators. `by_code`: whether compiled code may decide between candidates."""

    module: Any
    machine: Machine
    precision: str
    trials: int
    unsupported: str
    threads: int
    records: str | Path | None
    numerics: Numerics
    check: bool
    by_code: bool


def compiled(
    imported: Imported,
    request: Request,
    stages: Stages | None = None,
    family: Family | None = None,
    as_before: bool = False,
    sizes: bool = False,
) -> Executable:
    """The executable of a model that was read. `family`: that of its programs for other sizes, which it is planned like, without predictions, if
    `as_before` is true. `sizes`: such programs are to have its kernels on GPUs too."""
    shared, memory = (family.constants, family.memory) if family is not None else (None, None)
    machine, numerics, module, stages = request.machine, request.numerics, request.module, stages or Stages()
    with stages.stage("simplify"):
        graph = contained("the model", "is not simplified", lambda: simplify(imported.graph)[0], lambda _: imported.graph)
    if shared is not None:
        graph = replace(graph, constants=shared.constants(graph.constants))
    if request.unsupported:
        report_unsupported((*unsupported_nodes(graph), *(imported.tail.nodes if imported.tail is not None else ())), request.unsupported)
    if request.trials:
        with stages.stage("measure"):
            measure(graph, request, stages.report, imported.updates)
    names, defaults = _parameters(module), _defaults(module)

    def image(program: Program, whole: bool) -> Image | str:
        """The image of a program that trials measure, or why there is none; not for lack of a kernel unless it has to be `whole`."""
        binaries, faults = binaries_of(program, machine, lambda *_: None)
        if faults and whole:
            return f"a kernel does not compile: {next(iter(faults.values())).splitlines()[0]}"
        return image_of(without_kernels(program, faults), imported, machine, binaries, None, names, defaults)

    with Early(machine) as early:

        def begin(kernels: Sequence[Kernel]) -> None:
            for kernel in kernels:
                early.begin(kernel_source(kernel, machine))

        def ready(kernels: Sequence[Kernel]) -> None:
            contained("kernels", "are compiled later", partial(begin, kernels), lambda _: None)

        with chooser_for(machine, request.records, numerics, request.by_code) as (chooser, recorded):
            stored = remembered(numerics)
            fixed = (graph, machine, request.threads, chooser, request.precision, numerics, stored)
            planned = partial(plan_program, *fixed, recorded=recorded, updates=imported.updates, sizes=sizes)
            memory = memory or Memory()
            before = memory.copied()
            with collection_paused():
                program = planned(stages=stages, memory=memory, ready=ready, as_before=as_before)
            if recorded is not None and not as_before:
                network = Network(graph, machine, request.threads, request.precision, numerics, tuple(imported.updates))
                planning = Planning(planned, before, memory)
                with stages.stage("partitions"):
                    program = fastest(network, program, planning, image, request.trials, request.records, partial(stages.report, "partitions"))
        with stages.stage("compile"):
            program, binaries = build(program, machine, stages.report, early)
    live = module if isinstance(module, torch.nn.Module) else None

    def executable(program: Program, binaries: Sequence[Binary]) -> Executable:
        texts = _texts(program, machine)
        made = executable_of(program, imported, machine, binaries, texts, live, names, request.threads, defaults, request.check, shared)
        made.compile_seconds = stages.seconds
        return made

    def without_any(why: str) -> Executable:
        return executable(through_torch(program, {index: [why] for index in range(len(program.regions))}), ())

    stages.report("packing")
    with stages.stage("packing"):
        return contained("the model", "all of it runs through PyTorch", lambda: executable(program, binaries), without_any)


def _given(module: Any, inputs: Sequence[Any] | None, batch: int | None) -> tuple[Any, tuple[Any, ...]]:
    """The module and its example inputs; a model that is given by a name of the command line is made, and has inputs of its own, as has one with free
    sizes for a batch."""
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise UnsupportedOption(f"batch={batch!r} is no number of entries", "use a whole number from 1 up")
    if isinstance(module, (str, Path)) and Path(module).suffix not in (".pt2", ".onnx"):
        model = resolve(str(module), batch)
        return model.module, tuple(inputs) if inputs else model.inputs(0) if model.inputs else ()
    if batch is None:
        return module, tuple(inputs or ())
    if inputs or isinstance(module, torch.nn.Module):
        given = "it has example_inputs" if inputs else "a module has no inputs of its own"
        raise UnsupportedOption(f"batch={batch!r} is given, and {given}", "give example_inputs of that batch alone")
    if isinstance(module, (str, Path)):
        model = resolve(str(module), batch)
        return model.module, model.inputs(0) if model.inputs else ()
    return module, inputs_of(f"this {type(module).__name__}", _with_own_sizes(module), batch)(0)


def _refuse_arrays(inputs: Any, keywords: Any) -> None:
    """Raises InvalidInput for examples that are arrays of NumPy, which `torch.export` refuses less clearly."""
    for name, examples in (("example_inputs", inputs), ("example_keywords", keywords)):
        for path, leaf in tree_flatten_with_path(examples)[0]:
            if isinstance(leaf, np.ndarray):
                raise InvalidInput(f"{name}{keystr(path)} is {described(leaf)}", "pass torch.from_numpy(array)")


def read(
    module: Any, inputs: Sequence[Any], keywords: Mapping[str, Any] | None = None, copies: Copies | None = None, on_gpu: bool = False
) -> Imported:
    """The model as a graph, from any supported kind of model. Operators on tensors of types on which no kernel computes run through
    PyTorch, or are refused in ONNX. `copies` of PyTorch's parameters are those of earlier readings; `on_gpu` says where the model is to run. Raises
    InvalidModel for anything that is no model."""
    if isinstance(module, torch.export.ExportedProgram):
        return import_program(module, inputs, keywords, copies, on_gpu)
    if isinstance(module, torch.nn.Module):
        return import_module(module, inputs, keywords, copies, on_gpu)
    if isinstance(module, (str, Path)) and str(module).endswith(".pt2"):
        return import_program(load_exported(module), inputs, keywords, copies, on_gpu)
    if _is_onnx(module):
        from tilewright.frontend.onnx_import import import_onnx

        return import_onnx(module, inputs or None)
    raise _no_model(module)


def _is_onnx(module: Any) -> bool:
    onnx = sys.modules.get("onnx")  # a caller with a ModelProto has imported onnx
    return (onnx is not None and isinstance(module, onnx.ModelProto)) or (isinstance(module, (str, Path)) and str(module).endswith(".onnx"))


def _no_model(module: Any) -> InvalidModel:
    return InvalidModel(
        f"{module!r} is no model" if isinstance(module, (str, Path)) else f"a {type(module).__name__} is no model",
        "give an nn.Module, an ExportedProgram, an onnx.ModelProto, the path of a .pt2 or .onnx file, or a name such as zoo:lenet5",
    )


def build(program: Program, machine: Machine, progress: Progress, early: Early | None = None) -> tuple[Program, tuple[Binary, ...]]:
    """Compiles the program's kernels, of which `early` has begun some. A region whose kernel does not compile runs through PyTorch."""
    binaries, faults = binaries_of(program, machine, progress, early, warn=True)
    return without_kernels(program, faults) if faults else program, binaries


def binaries_of(
    program: Program, machine: Machine, progress: Progress, early: Early | None = None, warn: bool = False
) -> tuple[tuple[Binary, ...], dict[str, str]]:
    """The program's kernels compiled, and by the names of those that are not, why. `warn`: of the latter."""
    files: list[SourceFile] = []
    faults: dict[str, str] = {}
    for name, kernel in program.kernels().items():
        file = contained(_using(program, name), "runs through PyTorch", partial(_printed, kernel, machine), str)
        if isinstance(file, str):
            faults[name] = file
        else:
            files.append(file)

    def compiled(files: Sequence[SourceFile]) -> list[Binary | KernelFailed]:
        return compile_kernels(files, machine, progress=lambda done, total: progress("compile", done, total), early=early)

    def one_by_one(_: str) -> list[Binary | KernelFailed]:
        results: list[Binary | KernelFailed] = []
        for one in files:
            results += contained(_using(program, one.name), "runs through PyTorch", partial(compiled, [one]), _failed)
        return results

    results = contained("the kernels", "are compiled one by one", partial(compiled, files), one_by_one)
    failed = {file.name: result for file, result in zip(files, results, strict=True) if not isinstance(result, Binary)}
    if failed and warn:
        listing = "\n".join(f"  {failure}" for failure in failed.values())
        many = f"{len(failed)} kernels do not compile, and their regions run"
        what = many if len(failed) > 1 else "1 kernel does not compile, and its region runs"
        warn_not_compiled(f"{what} through PyTorch:\n{listing}")
    binaries = tuple(result for result in results if isinstance(result, Binary))
    faults |= {name: str(failure) for name, failure in failed.items()}
    return binaries, faults


def measure(graph: Graph, request: Request, progress: Progress, updates: Sequence[tuple[int, int]] = ()) -> None:
    """Measures candidates of the graph's regions that are not in the records yet, and adds them. `updates`: as for `plan_program`."""
    machine, threads, numerics = request.machine, request.threads, request.numerics
    problems = distinct_problems(graph, machine, threads, request.precision, numerics, updates=updates)
    with Records(request.records) as store:
        tune(
            problems, machine, request.trials, store, threads=threads, numerics=numerics,
            report=lambda done, total, _: progress("measure", done, total), compiled=partial(progress, "compile"),
        )  # fmt: skip


def _printed(kernel: Kernel, machine: Machine) -> SourceFile | str:
    return kernel_source(kernel, machine)


def source_files(program: Program, machine: Machine) -> list[SourceFile]:
    """One source file for each distinct kernel."""
    return [kernel_source(kernel, machine) for kernel in program.kernels().values()]


def _failed(why: str) -> list[Binary | KernelFailed]:
    return [KernelFailed(why)]


def _using(program: Program, name: str) -> str:
    """The names of the nodes that a kernel computes."""
    nodes = {node.described: None for part in program.regions if any(kernel.name == name for kernel in part.kernels) for node in part.region.nodes}
    return ", ".join(nodes) or f"kernel {name}"


def _texts(program: Program, machine: Machine) -> dict[str, str]:
    return {f"{source.name}.{'cu' if machine.is_gpu else 'c'}": source.text for source in source_files(program, machine)}


def default_target(inputs: Sequence[Any]) -> str:
    """The target of a model with these inputs if its caller names none."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return "cuda" if any(tensor.is_cuda for tensor in tensors) else "native"


def check_options(
    precision: str = "fp32",
    trials: int = 0,
    vendor: bool = False,
    unsupported: str = "warn",
    threads: int | None = None,
    records: str | Path | None = None,
    deterministic: bool = True,
    winograd: bool = True,
    check: bool = False,
    wait: float | bool = WAIT_SECONDS,
    programs: int = MOST_PROGRAMS,
    quick: bool = True,
) -> None:
    """Raises UnsupportedOption for values that `compile` does not offer."""
    check_precision(precision)
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 0:
        raise UnsupportedOption(f"trials={trials!r} is no number of candidates", "use 0, or how many of each region are measured")
    if not isinstance(records, (str, Path, type(None))):
        raise UnsupportedOption(f"records is {described(records)}", "pass the path of a file of records, or None")
    if not isinstance(deterministic, bool):
        raise UnsupportedOption(f"deterministic is {described(deterministic)}", "use True, or False where sums may be added in any order")
    if not isinstance(winograd, bool):
        raise UnsupportedOption(f"winograd is {described(winograd)}", "use True, or False to have all sums computed directly")
    if not isinstance(check, bool):
        raise UnsupportedOption(f"check is {described(check)}", "use True to have calls on a GPU wait for errors of indices, or False")
    if not isinstance(wait, (bool, int, float)) or not wait >= 0:
        raise UnsupportedOption(f"wait={wait!r} is no time", "use seconds, or True to wait as long as it takes")
    if not isinstance(programs, int) or isinstance(programs, bool) or programs < 1:
        raise UnsupportedOption(f"programs={programs!r} is no number of programs", "keep at least 1")
    if not isinstance(quick, bool):
        raise UnsupportedOption(f"quick is {described(quick)}", "use True, or False to have programs for new sizes planned for them at once")
    if not isinstance(vendor, bool):
        raise UnsupportedOption(f"vendor is {described(vendor)}", "use True to consider library kernels, where they were measured, or False")
    if unsupported not in ("warn", "error"):
        raise UnsupportedOption(f"unsupported={unsupported!r} is not known", 'use "warn" or "error"')
    if threads is not None:
        check_threads(threads)


def _parameters(module: Any) -> tuple[str, ...]:
    """Names of the module's positional parameters, which callers may pass by keyword."""
    if not isinstance(module, torch.nn.Module):
        return ()
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _defaults(module: Any) -> dict[str, Any]:
    """Defaults of the module's parameters that are numbers, strings or None: a caller may also pass them."""
    if not isinstance(module, torch.nn.Module):
        return {}
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
    return {name: p.default for name, p in parameters.items() if type(p.default) in CONSTANT_TYPES}
