"""Small programs with hand-written kernels, for tests of the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilewright.hardware import Machine, host_cpu
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.kernel import Block, Buffer, Kernel
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.region import Call, Lowered, Program, Region, Storage
from tilewright.runtime.executable import Executable, Image
from tilewright.runtime.kernel_source import declared
from tilewright.runtime.loadable import facts_symbol, loadable
from tilewright.runtime.signature import LEAF, InputLeaf, OutputLeaf, Signature, Tree
from tilewright.toolchain import Binary, SourceFile, compile_kernels

HEADER = "#include <stdint.h>\n#include <omp.h>\n"


def c_kernel(name: str, body: str, inputs: int) -> str:
    """`body` computes `y` from `x0`, `x1`...; all are float."""
    loads = "".join(f"const float *x{i} = arguments[{i}]; " for i in range(inputs))
    return f"void {name}(void *const *arguments, const int64_t *scalars) {{ {loads} float *y = arguments[{inputs}]; (void)scalars; {body} }}\n"


def compiled(text: str, entries: Sequence[str]) -> Binary:
    built = compile_kernels([SourceFile("test", HEADER + text, "c", tuple(entries))], host_cpu())[0]
    assert isinstance(built, Binary), built
    return built


def positional_signature(inputs: Sequence[tuple[str, tuple[int, ...], str]], outputs: int, mutations: Sequence[tuple[int, int]] = ()) -> Signature:
    """The signature of a function of tensors (name, shape, dtype) that returns one tensor, or a tuple of several."""
    arguments = Tree("tuple", (LEAF,) * len(inputs))
    return Signature(
        tuple(InputLeaf(f"args[{i}]", name, tuple(shape), dtype) for i, (name, shape, dtype) in enumerate(inputs)),
        Tree("tuple", (arguments, Tree("dict"))),
        tuple(OutputLeaf("value", i) for i in range(outputs)),
        LEAF if outputs == 1 else Tree("tuple", (LEAF,) * outputs),
        tuple(mutations),
    )


class ProgramBuilder:
    """Collects regions of one kernel each. Values are float32 and row-major unless a layout is given."""

    def __init__(self, inputs: Mapping[str, Sequence[int]], constants: Mapping[str, torch.Tensor] | None = None) -> None:
        self.values: dict[str, Value] = {}
        self.storage: dict[str, Storage] = {}
        self.nodes: list[Node] = []
        self.regions: list[Lowered] = []
        self.text = ""
        self.entries: list[str] = []
        self.aliases: dict[str, str] = {}
        self.inputs = tuple(inputs)
        self.constants = dict(constants or {})
        for name, shape in inputs.items():
            self.value(name, shape)
        for name, tensor in self.constants.items():
            self.value(name, tuple(tensor.shape))

    def value(self, name: str, shape: Sequence[int], layout: Layout | None = None, source: str | None = None) -> None:
        value = Value(name, tuple(shape), "f32")
        if source is None:
            self.values[name] = value
        self.storage[name] = Storage(value, layout or row_major(value.shape), source)

    def kernel(
        self,
        operator: str,
        inputs: Sequence[str],
        output: str,
        shape: Sequence[int],
        body: str,
        attributes: Mapping[str, object] | None = None,
        layout: Layout | None = None,
        repeat: int = 1,
        scalars: int = 0,
        arguments: Sequence[str] | None = None,
    ) -> None:
        """Adds a node, and a region whose one kernel consists of the C statements `body` and reads `arguments` (default: `inputs`)."""
        from tilewright.ir.expr import Var

        if output not in self.storage:
            self.value(output, shape, layout)
        name = f"kernel{len(self.regions)}"
        reads = tuple(arguments if arguments is not None else inputs)
        node = Node(f"node_{output}", operator, tuple(inputs), (output,), attributes or {}, f"model.{output}")
        parameters = [Buffer(f"a{i}", "f32", self.storage[x].layout.size) for i, x in enumerate(reads)]
        parameters.append(Buffer("y", "f32", self.storage[output].layout.size, writable=True))
        kernel = Kernel(name, tuple(parameters), Block(()), scalars=tuple(Var(f"s{i}", repeat) for i in range(scalars)))
        region = Region(f"region{len(self.regions)}", "map", (node,), (), tuple(inputs), (output,), ("a reason",))
        self.regions.append(Lowered(region, "plain", (kernel,), (Call(name, (*reads, output)),), predicted_seconds=1e-6, repeat=repeat))
        self.nodes.append(node)
        self.text += c_kernel(name, body, len(reads))
        self.entries.append(name)

    def torch(self, target: str, call: object, inputs: Sequence[str], outputs: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """Adds a node that runs through PyTorch."""
        for name, (shape, dtype) in outputs.items():
            self.values[name] = Value(name, tuple(shape), dtype)
            self.storage[name] = Storage(self.values[name], row_major(tuple(shape)))
        node = Node(f"node{len(self.nodes)}", "torch", tuple(inputs), tuple(outputs), {"target": target, "call": call})
        region = Region(f"region{len(self.regions)}", "torch", (node,), (), tuple(inputs), tuple(outputs))
        self.regions.append(Lowered(region, "", (), ()))
        self.nodes.append(node)

    def alias(self, name: str, of: str, shape: Sequence[int], layout: Layout | None = None) -> None:
        """Adds a view without code."""
        self.value(name, shape, layout)
        self.aliases[name] = of
        node = Node(f"node_{name}", "reshape", (of,), (name,), {"shape": tuple(shape)})
        self.nodes.append(node)
        self.regions.append(Lowered(Region(f"region{len(self.regions)}", "alias", (node,), (), (of,), (name,)), "", (), ()))

    def program(self, outputs: Sequence[str]) -> Program:
        graph = Graph(tuple(self.nodes), self.inputs, tuple(outputs), self.values, self.constants)
        return Program(graph, "native", tuple(self.regions), self.storage, self.aliases)

    def signature(self, outputs: int, mutations: Sequence[tuple[int, int]] = ()) -> Signature:
        specs = [(name, self.values[name].shape, self.values[name].dtype) for name in self.inputs]
        return positional_signature(specs, outputs, mutations)

    def image(self, outputs: Sequence[str], signature: Signature | None = None, machine: Machine | None = None) -> Image:
        machine = machine or host_cpu()
        program = loadable(self.program(outputs))
        text = self.text + "".join(declared(facts_symbol(kernel, machine), "c") for kernel in program.kernels.values())
        binaries = (compiled(text, self.entries),) if self.entries else ()
        sources = {"kernels.c": HEADER + text}
        return Image(program, signature or self.signature(len(outputs)), machine, binaries, sources)

    def executable(self, outputs: Sequence[str], signature: Signature | None = None, **options: object) -> Executable:
        return Executable(self.image(outputs, signature), **options)  # type: ignore[arg-type]


def leaf(name: str, shape: Sequence[int], place: str) -> InputLeaf:
    return InputLeaf(place, name, tuple(shape), "f32")


def chain(length: int = 5, shape: Sequence[int] = (6, 7)) -> ProgramBuilder:
    """y = relu(relu(x * w + w) * w + w)... over a constant w."""
    builder = ProgramBuilder({"x": shape}, {"w": torch.randn(*shape, generator=torch.Generator().manual_seed(3))})
    elements = torch.Size(shape).numel()
    loop = f"for (int i = 0; i < {elements}; i++)"
    before = "x"
    for i in range(length):
        builder.kernel("mul", (before, "w"), f"p{i}", shape, f"{loop} y[i] = x0[i] * x1[i];")
        builder.kernel("add", (f"p{i}", "w"), f"q{i}", shape, f"{loop} y[i] = x0[i] + x1[i];")
        builder.kernel("relu", (f"q{i}",), f"r{i}", shape, f"{loop} y[i] = x0[i] > 0 ? x0[i] : 0;")
        before = f"r{i}"
    return builder


def chain_reference(x: torch.Tensor, w: torch.Tensor, length: int = 5) -> torch.Tensor:
    for _ in range(length):
        x = torch.relu(x * w + w)
    return x
