"""Checks whether a file's statements about a program are consistent, before any memory is allocated for it or a binary is mapped.

Kernels are machine code that trusts its caller: they access as many bytes of each argument as they were compiled for, whatever a manifest says about
shapes and layouts. `check` compares every statement about a program with the others, so that honest kernels stay inside their buffers:

- the facts of each kernel (bytes of each argument, what it writes, steps, launch; of CPU kernels also required features) are those that its binary
  carries as the name of a symbol (`loadable.facts_symbol`), and the buffer of each argument has that many bytes;
- nothing writes to a constant, to an input that a call does not replace by a result stored in it, or to an alias of one; nothing is read before it
  is written;
- values, layouts, views, aliases, weights and the signature agree on shapes and types; sizes and counts are within limits.

No file contains addresses: the memory plan (`memory_plan`) is made from the data checked here. Replaced machine code in a binary can do anything that
the process may do; this is not, and cannot be, detected here. An artifact is code: load only what you would also run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain
from math import prod
from typing import Any

import torch

from tilewright.errors import InvalidArtifact
from tilewright.frontend.torch_operators import permitted_operator, replayed
from tilewright.graph import onnx_call
from tilewright.graph.table import OPERATORS, infer
from tilewright.hardware import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES, FLOAT32, computed_in, size_of
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.kernel import RANGE_BYTES
from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall
from tilewright.ir.region import F16_PAIR, F16_SCALE, NUMBERS, Call, Storage
from tilewright.runtime.loadable import LoadableKernel, LoadableProgram, LoadableRegion
from tilewright.runtime.memory_plan import assign_places
from tilewright.runtime.signature import InputLeaf, OutputLeaf, Signature
from tilewright.runtime.slices import Written, accesses_overlap, is_part

MOST_CALLS = 1 << 22
"""Limit on the kernel calls in one call of a model; each costs some bytes and a microsecond."""
MOST_BUFFERS = 1 << 14
MOST_BYTES = 1 << 46
"""Limit on the bytes of all buffers together: larger than any machine's memory, while sums stay far below 2^63."""


def check(program: LoadableProgram, signature: Signature, machine: Machine, states: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError, with the reason, if no compilation of a model could have produced the program."""
    _check_graph(program.graph)
    for name, storage in program.storage.items():
        _check_storage(program, name, storage)
    if len(program.storage) > MOST_BUFFERS or sum(map(program.bytes_of, program.storage)) > MOST_BYTES:
        raise ValueError(f"its {len(program.storage)} buffers are more, or larger, than a machine can have")
    given = {*program.graph.inputs, *program.graph.constants}
    for name in program.aliases:
        _check_alias(program, name, given)
    for kernel in program.kernels.values():
        _check_kernel(kernel, machine)
    if sum(region.repeat * len(region.calls) for region in program.regions) > MOST_CALLS:
        raise ValueError(f"it calls more than {MOST_CALLS} kernels")
    if machine.is_gpu and any(call.shifts for region in program.regions for call in region.calls):
        raise ValueError("it calls a kernel of a GPU for one image of several")
    _check_signature(program, signature, states)
    kept = frozenset(program.graph.inputs) - _updated(program, signature)
    _check_places(program, kept)
    _check_order(program, kept)


def _typed(value: Value) -> tuple[tuple[int, ...], str]:
    return value.shape, value.dtype


def of_tensor(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) in this package's names; the dtype is empty if there is no name for it."""
    known = {kind.torch: name for name, kind in ELEMENT_TYPES.items()}
    return tuple(tensor.shape), known.get(str(tensor.dtype).removeprefix("torch."), "")


# The graph


def _check_graph(graph: Graph) -> None:
    """Every value is an input, a constant, or produced by one node before it is read; nodes produce what their operators produce from their
    inputs."""
    made = set(graph.inputs)
    if len(made) != len(graph.inputs) or made & graph.constants.keys():
        raise ValueError("two inputs of its graph, or an input and a constant, have one name")
    for name in chain(graph.inputs, graph.outputs, graph.constants):
        if name not in graph.values:
            raise ValueError(f"its graph has no value {name}")
    for name, tensor in graph.constants.items():
        if of_tensor(tensor) != _typed(graph.values[name]):
            raise ValueError(f"the weight {name} is {tensor.dtype}{list(tensor.shape)}, and the graph says {graph.values[name]}")
    made |= graph.constants.keys()
    for node in graph.nodes:
        if not made.issuperset(node.inputs):
            raise ValueError(f"node {node.name} reads {min(set(node.inputs) - made)} before it is made")
        if len(set(node.outputs)) != len(node.outputs) or made.intersection(node.outputs) or not graph.values.keys() >= set(node.outputs):
            raise ValueError(f"node {node.name} makes a value that is made already, or that the graph does not have")
        made.update(node.outputs)
        _check_node(graph, node)
    missing = set(graph.outputs) - made
    if missing:
        raise ValueError(f"no node makes the output {min(missing)}")


def _check_node(graph: Graph, node: Node) -> None:
    attributes = node.attributes
    if node.operator == "torch":
        if not {"target", "call"} <= attributes.keys() <= {"target", "call", "reason"} or not isinstance(attributes["target"], str):
            raise ValueError(f"node {node.name} calls no operator of PyTorch's")
        _operator(attributes["target"])
        arguments, keywords = _pair(attributes["call"], node)
        if attributes["target"].startswith(onnx_call.PREFIX):
            onnx_call.check_call(attributes["target"], _sequence(arguments, node))
        for recipe in (*_sequence(arguments, node), *(_pair(keyword, node)[1] for keyword in _sequence(keywords, node))):
            _check_recipe(recipe, node)
    elif node.operator == "scan":
        _check_scan(graph, node)
    elif node.operator in OPERATORS:
        wanted = tuple(_typed(graph.values[name]) for name in node.outputs)
        try:
            found = infer(node.operator, [graph.values[name] for name in node.inputs], attributes)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"node {node.name} is no {node.operator}: {error}") from error
        rounded = tuple((shape, computed_in(dtype)) for shape, dtype in wanted)  # kernels compute with a wider type than 16-bit values have
        if any(one not in (stored, wide) for one, stored, wide in zip(found, wanted, rounded, strict=False)) or len(found) < len(wanted):
            raise ValueError(f"node {node.name} ({node.operator}) makes {found}, and the graph says {wanted}")
    else:
        raise ValueError(f"node {node.name} has the unknown operator {node.operator!a}")


def _operator(target: str, view: bool = False) -> Callable[..., Any]:
    try:
        return permitted_operator(target, view)
    except InvalidArtifact as error:
        raise ValueError(error.cause) from error


def _pair(data: Any, node: Node) -> tuple[Any, Any]:
    if not isinstance(data, tuple) or len(data) != 2:
        raise ValueError(f"node {node.name} has a malformed call")
    return data[0], data[1]


def _sequence(data: Any, node: Node) -> tuple[Any, ...]:
    if not isinstance(data, tuple):
        raise ValueError(f"node {node.name} has a malformed call")
    return data


def _check_recipe(recipe: Any, node: Node) -> None:
    """Checks an argument recipe, as `torch_nodes.make_argument` reads it."""
    kind, value = _pair(recipe, node)
    if kind == "list":
        for item in _sequence(value, node):
            _check_recipe(item, node)
    elif kind == "input":
        if type(value) is not int or not 0 <= value < len(node.inputs):
            raise ValueError(f"node {node.name} is given input {value!a} of {len(node.inputs)}")
    elif kind not in ("value", "dtype", "device", "layout", "memory_format"):
        raise ValueError(f"node {node.name} has an argument of the kind {kind!a}")


def _check_scan(graph: Graph, node: Node) -> None:
    """Checks a loop: see `graph.reference` for the meaning of its attributes."""
    attributes = node.attributes
    body, states, sequences, length = (attributes.get(key) for key in ("body", "states", "sequences", "length"))
    if not isinstance(body, Graph) or not all(type(n) is int and n >= 0 for n in (states, sequences, length)):
        raise ValueError(f"node {node.name} is no loop")
    assert isinstance(states, int) and isinstance(sequences, int)
    _check_graph(body)
    reverse, results = attributes.get("reverse"), len(node.outputs) - states
    if not isinstance(reverse, tuple) or len(reverse) != sequences + results or not all(isinstance(one, bool) for one in reverse):
        raise ValueError(f"node {node.name} does not say in which order its loop passes over each sequence")
    numbers = (len(node.inputs), len(node.outputs))
    if numbers != (len(body.inputs), len(body.outputs)) or states + sequences > len(body.inputs) or states > len(body.outputs):
        raise ValueError(f"node {node.name} and the body of its loop have different numbers of inputs or outputs")
    for position, (outer, inner) in enumerate(zip(node.inputs, body.inputs, strict=True)):
        shape, dtype = _typed(body.values[inner])
        if _typed(graph.values[outer]) != ((length, *shape) if states <= position < states + sequences else shape, dtype):
            raise ValueError(f"node {node.name} and the body of its loop differ about {outer}")
    for position, (outer, inner) in enumerate(zip(node.outputs, body.outputs, strict=True)):
        shape, dtype = _typed(body.values[inner])
        if _typed(graph.values[outer]) != (shape if position < states else (length, *shape), dtype):
            raise ValueError(f"node {node.name} and the body of its loop differ about {outer}")


# Memory


def _check_storage(program: LoadableProgram, name: str, storage: Storage) -> None:
    """The layout has the value's shape; a value of the graph is stored with its shape; a constant has as many elements as are packed."""
    value, layout = storage.value, storage.layout
    if value.name != name or value.shape != layout.shape or any(dim >= len(layout.shape) for dim, _ in layout.order):
        raise ValueError(f"the layout of {name} is not one of {value}")
    if layout.around and name not in program.aliases:
        raise ValueError(f"{name} is a slice, and does not say of what")
    _check_factors(name, layout)
    known = program.graph.values.get(name)
    if known is not None and (known.shape != value.shape or computed_in(known.dtype) != computed_in(value.dtype)):
        raise ValueError(f"{name} is stored as {value}, and the graph says {known}")
    source = program.constant_source(name)
    if source is None:
        if storage.view is not None or storage.matrix is not None or storage.numbers:
            raise ValueError(f"{name} is a part of a constant, and does not say which")
        return
    if source not in program.graph.constants:
        raise ValueError(f"{name} is made from the constant {source}, which is not there")
    parts = NUMBERS[storage.numbers]
    if storage.numbers and value.dtype != ("f16" if storage.numbers == F16_PAIR else FLOAT32):
        raise ValueError(f"{name} is {storage.numbers} of {value.dtype}")
    if parts and value.shape[:1] != (parts,):
        raise ValueError(f"{name} has no first dimension of {parts} for the parts of its elements")
    if storage.numbers == F16_SCALE and value.shape != (1,):
        raise ValueError(f"{name} is the unit of a constant, and not a single number")
    elements, available = prod(program.graph.values[source].shape), prod(program.graph.values[source].shape)
    if storage.view is not None:
        sizes, strides, offset = storage.view
        if len(sizes) != len(strides):
            raise ValueError(f"{name} is no view")
        elements = prod(sizes)
        if elements and offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= available:
            raise ValueError(f"{name} is a view beyond the constant {source}")
    made, result = elements, prod(value.shape) // max(parts, 1)
    if storage.matrix is not None:
        rows, columns = len(storage.matrix), len(storage.matrix[0])
        if elements % columns:
            raise ValueError(f"{name} is not what its matrix makes of the constant {source}")
        made = elements // columns * rows
    if storage.numbers != F16_SCALE and made != result:
        raise ValueError(f"{name} has {result} elements, and is made from {elements} of the constant {source}")


def _check_factors(name: str, layout: Layout) -> None:
    """The outer part of a dimension precedes its factors."""
    seen = set()
    for dim, factor in layout.order:
        if factor and dim not in seen:
            raise ValueError(f"the layout of {name} has a factor before its outer part")
        seen.add(dim)


def _check_alias(program: LoadableProgram, name: str, given: Set[str]) -> None:
    """An alias is a slice of its root, or has the same number of bytes, and the same type. Slices belong to buffers in the arena, or to results that
    are stored as PyTorch receives them."""
    root = program.root(name)
    if name in given:
        raise ValueError(f"{name} is an input or a constant, and an alias of {root}")
    base = program.storage.get(root)
    if base is None or root in program.faults:
        raise ValueError(f"{name} is an alias of {root}, which has no storage")
    own = program.storage.get(name)
    if own is not None:
        dense = not own.layout.is_padded and not base.layout.is_padded and own.layout.size == base.layout.size
        same = own.value.dtype == base.value.dtype and own.source is None and (dense or is_part(own.layout, base.layout))
    else:
        value = program.graph.values.get(name)
        same = value is not None and value.dtype == base.value.dtype and value.elements == base.layout.size
    if not same:
        raise ValueError(f"{name} is an alias of {root}, and no part of it, or of another size or type")
    if not program.box(name):
        return
    if name in program.graph.outputs or root in given:
        raise ValueError(f"{name} is a slice of {root}, and a result, or {root} is an input or a constant")
    if root in map(program.root, program.graph.outputs) and not base.layout.is_row_major:
        raise ValueError(f"{name} is a slice of the result {root}, which is not stored as it is passed")


def _check_kernel(kernel: LoadableKernel, machine: Machine) -> None:
    if len(kernel.extents) != len(kernel.writes):
        raise ValueError(f"kernel {kernel.name} has {len(kernel.writes)} parameters and {len(kernel.extents)} extents")
    if len(kernel.growths) != (len(kernel.writes) if kernel.trips else 0):
        raise ValueError(f"kernel {kernel.name} has {len(kernel.writes)} parameters and {len(kernel.growths)} growths")
    if min(kernel.touched(1), default=0) < 0:
        raise ValueError(f"kernel {kernel.name} has growths above its extents")
    for feature in kernel.requires:
        if not machine.has(feature):
            raise ValueError(f"kernel {kernel.name} requires {feature}, which {machine.name} does not have")
    for position, described in kernel.maps:
        if position >= len(kernel.extents) or described.end * size_of(described.dtype) > kernel.extents[position]:
            raise ValueError(f"kernel {kernel.name} has the tensor map {described.name} of more than its parameter")
    if (kernel.tiles is not None) != (machine.is_gpu and kernel.trips > 0):
        raise ValueError(f"kernel {kernel.name} has tiles of its trips without having trips, or trips without tiles")
    if kernel.tiles is not None and (kernel.cooperative or kernel.grid != kernel.grid_of(kernel.trips)):
        raise ValueError(f"kernel {kernel.name} has a grid that does not follow from its trips")
    block = prod(kernel.block)
    if not machine.is_gpu:
        if (*kernel.grid, *kernel.block, kernel.shared_bytes) != (1, 1, 1, 1, 1, 1, 0) or kernel.cooperative or kernel.maps:
            raise ValueError(f"kernel {kernel.name} is for a CPU, and has a grid")
    elif block > machine.threads_per_block or kernel.shared_bytes > machine.shared_bytes_per_block:
        raise ValueError(f"kernel {kernel.name} asks for {block} threads and {kernel.shared_bytes} B of shared memory, more than {machine.name} has")
    elif kernel.cooperative and prod(kernel.grid) > machine.processors:
        raise ValueError(f"kernel {kernel.name} asks for {prod(kernel.grid)} blocks at once, and {machine.name} has {machine.processors} processors")


def _updated(program: LoadableProgram, signature: Signature) -> set[str]:
    """The graph's inputs that a call may write to: those whose new value is stored in them."""
    pairs = [(signature.inputs[leaf].name, output) for leaf, output in signature.mutations]
    pairs += [(state.input, state.output) for state in signature.states]
    return {given for given, output in pairs if program.root(program.graph.outputs[output]) == given}


def _check_places(program: LoadableProgram, kept: Set[str]) -> None:
    """Inputs and outputs are stored as PyTorch passes them, and every buffer that a call names is at least as large as its kernel accesses. Nothing
    writes to the inputs that are `kept`."""
    graph = program.graph
    for name in graph.inputs:
        storage = program.storage.get(name)
        if storage is not None and (not storage.layout.is_row_major or storage.value.dtype != graph.values[name].dtype or storage.source is not None):
            raise ValueError(f"the input {name} is not stored as it is passed")
    for name in graph.outputs:
        root = program.root(name)
        if root not in program.storage and root not in graph.inputs and name not in graph.constants:
            raise ValueError(f"the output {name} is nowhere")
        if root in program.storage and program.storage[root].value.dtype != graph.values[name].dtype:
            raise ValueError(f"the output {name} is stored in another type")
    for name in program.faults:  # memory of its own, which only calls write and nothing else accesses
        if program.root(name) != name or program.storage[name].source is not None:
            raise ValueError(f"{name} is for indices out of range, and an alias or a constant")
    read_only = {*kept, *assign_places(program).constants}
    for region in program.regions:
        if region.library is not None:
            _check_library_call(program, region, region.library, read_only)
        for call in region.calls:
            _check_call(program, region, call, read_only)


def _check_call(program: LoadableProgram, region: LoadableRegion, call: Call, read_only: set[str]) -> None:
    kernel = program.kernels[call.kernel]
    where = f"region {region.name} calls {kernel.name}"
    if kernel.scalars and region.repeat > kernel.steps:
        raise ValueError(f"{where} for {region.repeat} steps, and it was made for {kernel.steps}")
    tiles = kernel.tiles
    if tiles is not None:
        rows = call.trips * tiles.rows
        if rows <= tiles.each or (tiles.whole and rows % tiles.each) or max(kernel.touched(call.trips)) > RANGE_BYTES:
            raise ValueError(f"{where} for {call.trips} trips, for which it is not made")
    arguments = call.arguments
    times = Counter(program.root(name) for name in arguments)
    for at, ((name, shift), extent, writes) in enumerate(zip(call.shifted, kernel.touched(call.trips), kernel.writes, strict=True)):
        root = program.root(name)
        held = program.bytes_of(root) - program.base_bytes(name) - shift * program.element_bytes(name)
        if held < extent:
            raise ValueError(f"{where}, which touches {extent} bytes of {name}, and {name} has {held}")
        if writes and root in read_only:
            raise ValueError(f"{where}, which writes to {name}: an input or a constant")
        if writes and times[root] > 1 and any(accesses_overlap(program, name, other) for other in (*arguments[:at], *arguments[at + 1 :])):
            raise ValueError(f"{where} with {name} twice, and it writes to it")


def _check_library_call(program: LoadableProgram, region: LoadableRegion, call: LibraryCall, read_only: set[str]) -> None:
    """A library's operator gets views of the shapes that it is defined for, within their buffers; inputs that it reorders once are constant."""
    call.check()
    where = f"region {region.name} calls a library"
    dtypes = [program.storage[view.name].value.dtype for view in call.views]
    inputs = dtypes[: len(call.inputs)]
    call.check_types(*inputs)
    for view, dtype, expected in zip(call.views, dtypes, (*inputs, *(inputs[0] for _ in call.outs)), strict=True):
        held = program.bytes_of(program.root(view.name)) - program.base_bytes(view.name)
        if dtype != expected or held < view.end * size_of(dtype):
            raise ValueError(f"{where} with {view.end} elements of {view.name}, which holds {held} bytes of {dtype}")
    for number, view in enumerate(call.outs):
        out, others = program.root(view.name), (*call.inputs, *call.outs[:number])
        if out in read_only or out in program.faults or any(accesses_overlap(program, view.name, other.name) for other in others):
            raise ValueError(f"{where} that stores its result in {view.name}: an input, a constant, or what it reads or stores")
    if region.repeat != 1 or any(program.constant_source(view.name) is None for view in call.constants):
        raise ValueError(f"{where} in a loop, or with an input that is not constant")


def _check_order(program: LoadableProgram, kept: Set[str]) -> None:
    """Regions and calls read only what was written before."""
    written = Written(program)
    for name in chain(program.graph.inputs, program.graph.constants, (name for name in program.storage if program.constant_source(name) is not None)):
        written.add(name)
    for region in program.regions:
        for name, writes in _accesses(program, region, kept):
            root = program.root(name)
            empty = root in program.storage and not program.bytes_of(root)
            if not writes and not empty and not written.holds(name):
                raise ValueError(f"region {region.name} reads {name} before anything is written to it")
            if writes:
                written.add(name)
    for name in program.graph.outputs:
        root = program.root(name)
        if not written.holds(name) and program.bytes_of(root):
            raise ValueError(f"nothing is written to the output {name}")


def _accesses(program: LoadableProgram, region: LoadableRegion, kept: Set[str]) -> Iterator[tuple[str, bool]]:
    """Accesses (buffer, whether it is written), in order."""
    if region.kind == "torch":
        if region.calls or region.library is not None or region.repeat != 1:
            raise ValueError(f"region {region.name} runs through PyTorch, and calls kernels")
        local: set[str] = set()
        for node in (program.nodes[name] for name in region.nodes):
            for name in node.inputs:
                if name not in local and program.root(name) in program.storage:
                    yield name, False
                elif name not in local and name not in program.graph.constants:
                    raise ValueError(f"region {region.name} reads {name}, which is nowhere")
            local.update(node.outputs)
        for name in region.outputs:
            root = program.root(name)
            constant = root in program.storage and program.constant_source(root) is not None
            if name not in local or constant or root in kept or root in program.faults:
                raise ValueError(f"region {region.name} does not make {name}, or writes to an input or a constant")
            if root in program.storage:
                yield name, True
    if region.library is not None:
        yield from (*((view.name, False) for view in region.library.inputs), *((view.name, True) for view in region.library.outs))
    for call in region.calls:
        pairs = list(zip(call.arguments, program.kernels[call.kernel].writes, strict=True))
        yield from (pair for pair in pairs if not pair[1])
        yield from (pair for pair in pairs if pair[1])


# How it is called


def _is_tensor(leaf: InputLeaf) -> bool:
    kinds = {"float": (float,), "int": (int,), "bool": (bool,)}
    kind = ELEMENT_TYPES.get(leaf.dtype)
    elements = leaf.constant if isinstance(leaf.constant, tuple) else None
    if kind is None or kind.kind not in kinds or elements is None or len(elements) != prod(leaf.shape):
        return False
    within = kind.kind == "float" or all(kind.lowest <= element <= kind.highest for element in elements)
    return all(type(element) in kinds[kind.kind] for element in elements) and within


def _check_signature(program: LoadableProgram, signature: Signature, states: Mapping[str, torch.Tensor]) -> None:
    """Arguments and results are the graph's inputs and outputs, each once, with equal shapes and types."""
    graph, inputs = program.graph, signature.inputs
    tree = signature.input_tree
    kinds = (tree.kind, *(child.kind for child in tree.children))
    if kinds != ("tuple", "tuple", "dict") or not all(isinstance(key, str) for key in tree.children[1].keys):
        raise ValueError("its signature has no positional and keyword arguments")
    if tree.leaves != len(inputs) or signature.output_tree.leaves != len(signature.outputs):
        raise ValueError("the trees of its inputs and outputs do not have as many leaves as there are inputs and outputs")
    sources = [leaf.name for leaf in inputs if leaf.name] + [state.input for state in signature.states]
    if sorted(sources) != sorted(graph.inputs):
        raise ValueError("the inputs of its signature are not those of its graph, each once")
    for leaf in inputs:
        if leaf.name and (leaf.shape, leaf.dtype) != _typed(graph.values[leaf.name]):
            raise ValueError(f"input {leaf.place} is {leaf.dtype}{list(leaf.shape)}, and the graph says {graph.values[leaf.name]}")
        if leaf.strides is not None and len(leaf.strides) != len(leaf.shape):
            raise ValueError(f"input {leaf.place} has {len(leaf.strides)} strides and the shape {list(leaf.shape)}")
        if not leaf.name and leaf.dtype and not _is_tensor(leaf):
            raise ValueError(f"input {leaf.place} is no constant of type {leaf.dtype} and shape {list(leaf.shape)}")
    if {state.name for state in signature.states} != set(states) or len(signature.states) != len(states):
        raise ValueError("its states are not those of its weights")

    def output(index: int) -> Value:
        if not 0 <= index < len(graph.outputs):
            raise ValueError(f"there is no output {index} of {len(graph.outputs)}")
        return graph.values[graph.outputs[index]]

    for state in signature.states:
        if not of_tensor(states[state.name]) == _typed(graph.values[state.input]) == _typed(output(state.output)):
            raise ValueError(f"the state {state.name} has another shape or type than the graph says")
    for position, index in signature.mutations:
        if position >= len(inputs) or not inputs[position].name or (inputs[position].shape, inputs[position].dtype) != _typed(output(index)):
            raise ValueError(f"input {position} is not one that output {index} can be written to")
    later = {result.index for result in signature.outputs if result.kind == "tail"}
    if signature.tail is not None:
        onnx_call.check_model(signature.tail.model, len(signature.tail.inputs), len(later))
        for index in signature.tail.inputs:
            output(index)
    if later != set(range(len(later))) or (signature.tail is None) != (not later):
        raise ValueError("it returns other results of its tail than there are")
    for result in signature.outputs:
        if result.kind == "value":
            _check_view(result, *_typed(output(result.index)))
        elif result.kind == "input":
            if not 0 <= result.index < len(inputs) or not inputs[result.index].name:
                raise ValueError(f"it returns input {result.index}, which is no tensor of its inputs")
            _check_view(result, inputs[result.index].shape, inputs[result.index].dtype)
        elif result.kind == "state":
            if not 0 <= result.index < len(signature.states):
                raise ValueError(f"it returns state {result.index} of {len(signature.states)}")
            _check_view(result, *_typed(graph.values[signature.states[result.index].input]))
        elif result.kind == "parameter":
            if result.value not in graph.constants:
                raise ValueError(f"it returns the parameter {result.value!a}, which is not there")
            _check_view(result, *_typed(graph.values[result.value]))


def _check_view(leaf: OutputLeaf, shape: tuple[int, ...], dtype: str) -> None:
    """A returned view of a tensor of this shape and type: its calls are tried on one without memory."""
    view = torch.empty(shape, dtype=getattr(torch, ELEMENT_TYPES[dtype].torch), device="meta")
    for call in _calls(leaf.calls):
        _operator(call[0], view=True)
        try:
            view = replayed(view, [call])
        except (InvalidArtifact, RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            what = f"{leaf.kind} {leaf.value if leaf.kind == 'parameter' else leaf.index}"
            raise ValueError(f"{call[0]} makes no view of {what}: {str(error).splitlines()[0]}") from error


def _calls(data: Any) -> Sequence[tuple[str, tuple[Any, ...]]]:
    if not isinstance(data, tuple) or not all(isinstance(c, tuple) and len(c) == 2 and [type(part) for part in c] == [str, tuple] for c in data):
        raise ValueError("it returns a view that says not of what")
    return data
