"""Kernel IR as CUDA C++: what NVRTC compiles, without any header.

A kernel is ``extern "C" __global__ void NAME(const T *a, T *b, ..., INT scalar, ...)`` with its buffers in the order of the parameters, then its
scalars and `trips`, if it has them, which are 32-bit `int` unless `index_dtype(kernel)` is "i64" (some buffer has 2^31 elements or more), and its
tensor maps, of 128 bytes each.
Shared buffers are static up to 48 KiB in all; above that they are stored in dynamic shared memory, and the launch needs
`dynamic_shared_bytes(kernel)`; buffers of scopes that follow one another share places (`shared_offsets`). Vectors are the built-in ones (`float4`),
and `float8` for what is stored as eight 16-bit floats; their loads and stores in global and shared memory need an address aligned to the whole
vector, or to its 16 bytes. Arithmetic on vectors is written out lane by lane. Both sides of a `select` with a vector condition may be read. Integer
arithmetic wraps; a floating-point number that does not fit the integer type it is cast to saturates; integer division by zero gives 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from tilewright.codegen.c import identifier_of
from tilewright.codegen.conversions import CUDA_CONVERSIONS, conversion_name
from tilewright.codegen.helpers import CUDA_TYPES, LIBRARY, Helper, HelperTable, narrow_functions, ordered
from tilewright.codegen.printer import CONDITIONAL, OR, SUM, UNARY, Code, Printer
from tilewright.codegen.sharing import certainly_evaluated, used_variables
from tilewright.ir.dtypes import ELEMENT_TYPES, FLOAT32, NARROW_FLOATS, is_float, size_of
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, children, const, floordiv, mod, range_of, walk
from tilewright.ir.kernel import (
    TRIPS,
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Let,
    Place,
    Statement,
    Store,
    With,
    is_own_part,
    statements,
)
from tilewright.ir.scalar import REINTERPRETED
from tilewright.ir.tensor_map import MAP_BYTES

STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory that a kernel may declare statically (CUDA C++ Programming Guide, "Technical Specifications")."""

_ALIGNMENT = 16
_COMPONENTS = "xyzwabcd"
_REINTERPRET = {FLOAT32: "__float_as_int", "i32": "__int_as_float", "f64": "__double_as_longlong", "i64": "__longlong_as_double"}


def shared_offsets(kernel: Kernel) -> dict[str, int]:
    """Byte offsets of the shared buffers, aligned as they ask: one after another in a scope, and beside one another's places in scopes that follow
    one another, such as the bodies of two loops. The kernel has a barrier between accesses of buffers in one place."""
    return _shared_places(kernel)[0]


def shared_bytes(kernel: Kernel) -> int:
    """Shared memory per block in bytes, whether static or dynamic."""
    return _shared_places(kernel)[1]


def shares_places(kernel: Kernel) -> bool:
    """Whether some shared buffers have the same place."""
    offsets = shared_offsets(kernel)
    buffers = (s.buffer for s in statements(kernel.body) if isinstance(s, Allocate) and s.buffer.name in offsets)
    places = sorted((offsets[buffer.name], _bytes_of_block(buffer, kernel.cluster)) for buffer in buffers)
    return any(first + size > other for (first, size), (other, _) in pairwise(places))


def _shared_places(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Byte offsets of the shared buffers, and the bytes of all together."""
    offsets: dict[str, int] = {}
    total = 0

    def place(root: Statement, end: int) -> int:
        """The end of the statement's own buffers, which those of inner scopes follow."""
        nonlocal total
        if isinstance(root, Block):
            for member in root.statements:
                inner = place(member, end)
                end = inner if isinstance(member, Allocate) else end
        elif isinstance(root, (For, With)):
            place(root.body, end)
        elif isinstance(root, If):
            place(root.then, end)
            if root.otherwise is not None:
                place(root.otherwise, end)
        elif isinstance(root, Allocate) and root.buffer.space in ("shared", "cluster"):
            if root.buffer.name in offsets:
                raise ValueError(f"kernel {kernel.name} allocates the shared buffer {root.buffer.name} twice")
            end = -(-end // root.buffer.alignment) * root.buffer.alignment
            offsets[root.buffer.name] = end
            end += _bytes_of_block(root.buffer, kernel.cluster)
            total = max(total, end)
        return end

    place(kernel.body, 0)
    return offsets, total


def _bytes_of_block(buffer: Buffer, cluster: int) -> int:
    """Bytes of shared memory per block that a buffer occupies."""
    elements = buffer.size // cluster if buffer.space == "cluster" else buffer.size
    return -(-elements * size_of(buffer.dtype) // _ALIGNMENT) * _ALIGNMENT


def _shared_alignment(kernel: Kernel) -> int:
    """Bytes to which shared memory is aligned as a whole."""
    return max((s.buffer.alignment for s in statements(kernel.body) if isinstance(s, Allocate)), default=_ALIGNMENT)


def dynamic_shared_bytes(kernel: Kernel) -> int:
    """Bytes of dynamic shared memory to launch with; 0 if the buffers are declared statically."""
    total = shared_bytes(kernel)
    return total if total > STATIC_SHARED_LIMIT else 0


def index_dtype(kernel: Kernel) -> str:
    """The type of index arithmetic and scalar parameters: "i32", or "i64" if a buffer has 2^31 elements or more."""
    return "i64" if any(buffer.size >= 2**31 for buffer in kernel.parameters) else "i32"


def _nan_extremum(operation: str) -> Helper:
    relation = ">" if operation == "max" else "<"
    return Helper(
        f"""static __device__ __forceinline__ float tw_{operation}_f32(float a, float b) {{
#if __CUDA_ARCH__ >= 800
    float result;
    asm("{operation}.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    const float m = a {relation} b ? a : b;  // b where either is NaN
    return a != a ? a : m;
#endif
}}"""
    )


def _atomic_add(lanes: int) -> Helper:
    """Adds each lane; as one transaction if the machine has vector atomics (PTX: red, compute capability 9.0)."""
    fields = [f"value.{component}" for component in _COMPONENTS[:lanes]]
    inputs = ", ".join(f'"f"({field})' for field in fields)
    places = ", ".join(f"%{i + 1}" for i in range(lanes))
    apart = " ".join(f"atomicAdd(target + {i}, {field});" for i, field in enumerate(fields))
    return Helper(
        f"""static __device__ __forceinline__ void tw_atomic_add{lanes}(float *target, float{lanes} value) {{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v{lanes}.f32 [%0], {{{places}}};" :: "l"(__cvta_generic_to_global(target)), {inputs} : "memory");
#else
    {apart}
#endif
}}"""
    )


def _cluster_load(own: str, kind: str, count: int, constraint: str, word: str, name: str) -> Helper:
    """Reads the shared memory of another block in the cluster, given its rank: a value of type `kind`, of `count` words, where the block itself has
    elements of type `own`. `word`: the type of a word in PTX, for registers of `constraint`."""
    fields = ["value"] if count == 1 else [f"value.{component}" for component in _COMPONENTS[:count]]
    targets = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"={constraint}"({field})' for field in fields)
    shape, target = (word, targets) if count == 1 else (f".v{count}{word}", f"{{{targets}}}")
    return Helper(
        f"""static __device__ __forceinline__ {kind} {name}(const {own} *own, int rank) {{
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(rank));
    {kind} value;
    asm volatile("ld.shared::cluster{shape} {target}, [%{count}];" : {outputs} : "r"(address) : "memory");
    return value;
}}"""
    )


def _cluster_loads() -> dict[str, Helper]:
    """By name the loads of float32 and, as bits, of 16-bit floats: a single one, or eight in four words."""
    known = {f"tw_cluster_load{lanes}": ("float", "float" if lanes == 1 else f"float{lanes}", lanes, "f", ".f32") for lanes in (1, 2, 4)}
    known["tw_cluster_load1_b16"] = ("unsigned short", "unsigned short", 1, "h", ".b16")
    known["tw_cluster_load8_b16"] = ("unsigned short", "uint4", 4, "r", ".b32")
    return {name: _cluster_load(*of, name) for name, of in known.items()}


def _checking(inside: str, dtype: str) -> Helper:
    """The helper that turns an index that is data into a position of a dimension; an index out of range is stored as a fault and gives 0. The store
    is predicated: across a branch the compiler would not issue later loads together with those of other indices."""
    name = "tw_checked" if inside == "index" else "tw_counted"
    kind = CUDA_TYPES[dtype]
    return Helper(
        f"""static __device__ __forceinline__ {kind} {name}_{dtype}(long long index, long long extent, long long *fault) {{
    const long long position = {inside};
    const bool inside = (unsigned long long)position < (unsigned long long)extent;
    asm volatile("{{ .reg .pred outside; setp.eq.u32 outside, %0, 0; @outside st.global.u64 [%1], %2; }}"
                 :: "r"((unsigned)inside), "l"(__cvta_generic_to_global(fault)), "l"(index));
    return inside ? ({kind})position : 0;
}}"""
    )


def _vector_of_8(kind: str) -> Helper:
    """A type like the built-in ones, which end at four elements: what a thread computes with eight 16-bit elements."""
    element = {"uchar": "unsigned char"}.get(kind, kind)
    given, fields = (", ".join(f"{prefix}{component}" for component in _COMPONENTS) for prefix in (f"{element} ", ""))
    return Helper(
        f"""struct {kind}8 {{ {element} {fields}; }};
static __device__ __forceinline__ {kind}8 make_{kind}8({given}) {{ return {{{fields}}}; }}"""
    )


def _special(name: str, instruction: str) -> Helper:
    """A function of the special function unit (PTX: relative error at most 2^-22); subnormal numbers are zeros."""
    return Helper(
        f"""static __device__ __forceinline__ float {name}(float x) {{
    float result;
    asm("{instruction}.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}}"""
    )


_QUALIFIER = "static __device__ __forceinline__"
_BUILTIN: Mapping[str, Helper] = {
    **CUDA_CONVERSIONS,
    **{f"{kind}8": _vector_of_8(kind) for kind in ("float", "uchar")},
    "tw_load8": Helper(
        """static __device__ __forceinline__ float8 tw_load8(const float *from) {
    const float4 a = *reinterpret_cast<const float4 *>(from), b = *reinterpret_cast<const float4 *>(from + 4);
    return make_float8(a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
}""",
        ("float8",),
    ),
    "tw_store8": Helper(
        """static __device__ __forceinline__ void tw_store8(float *to, float8 a) {
    *reinterpret_cast<float4 *>(to) = make_float4(a.x, a.y, a.z, a.w);
    *reinterpret_cast<float4 *>(to + 4) = make_float4(a.a, a.b, a.c, a.d);
}""",
        ("float8",),
    ),
    "tw_tensor_map": Helper(f"struct __align__(64) tw_tensor_map {{ unsigned char bytes[{MAP_BYTES}]; }};"),
    "tw_power": _special("tw_power", "ex2"),
    "tw_reciprocal": _special("tw_reciprocal", "rcp"),
    **narrow_functions(_QUALIFIER, "tw_power", "tw_reciprocal({})"),
    "tw_nearest_tf32_f32": Helper(
        f"""{_QUALIFIER} float tw_nearest_tf32_f32(float x) {{
#if __CUDA_ARCH__ >= 800
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
#else
    return x == x ? __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000) : x;
#endif
}}"""
    ),
    "tw_max_f32": _nan_extremum("max"),
    "tw_min_f32": _nan_extremum("min"),
    **{f"tw_atomic_add{lanes}": _atomic_add(lanes) for lanes in (2, 4)},
    **_cluster_loads(),
    "tw_cluster_address": Helper(
        """static __device__ __forceinline__ float *tw_cluster_address(float *own, int rank) {
    float *other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(own), "r"(rank));
    return other;
}"""
    ),
    **{f"tw_checked_{dtype}": _checking("index", dtype) for dtype in ("i32", "i64")},
    **{f"tw_counted_{dtype}": _checking("index < 0 ? index + extent : index", dtype) for dtype in ("i32", "i64")},
}
_HELPERS = HelperTable(_BUILTIN, CUDA_TYPES, _QUALIFIER)


class CudaPrinter(Printer):
    """Prints kernels one after another; `source()` returns the file."""

    language = "CUDA"
    spread = True

    def __init__(self) -> None:
        super().__init__()
        self.wide_index = False
        self.widen = False
        self.lane: int | None = None
        self.placed: dict[str, int] = {}
        self.cluster = 1

    # --- types ---

    @property
    def index_type(self) -> str:
        return "long long" if self.wide_index else "int"

    def type_name(self, dtype: str, lanes: int = 1, mask: int = 0) -> str:
        if lanes == 1:
            return "bool" if dtype == "bool" else CUDA_TYPES[dtype]
        if lanes == 8 and dtype in NARROW_FLOATS:
            return "uint4"
        if lanes == 8 and dtype in (FLOAT32, "bool"):
            return self.need(f"{ELEMENT_TYPES[dtype].cuda_vector}8")
        if lanes * size_of(dtype) > 16 or lanes not in (2, 4):
            raise ValueError(f"CUDA has no vector of {lanes} {dtype}")
        return f"{ELEMENT_TYPES[dtype].cuda_vector}{lanes}"

    def let_type(self, value: Expr, mask: int) -> str:
        if value.dtype == INDEX and value.lanes == 1:
            return "long long" if self.needs_wide(value) else self.index_type
        return super().let_type(value, mask)

    def needs_wide(self, value: Expr) -> bool:
        """Whether an index expression may exceed 32 bits: it contains data, or its known range exceeds them."""
        if value.dtype != INDEX or self.wide_index:
            return False
        if isinstance(value, Load) or isinstance(value, Var) and self.is_wide(value):
            return True
        if isinstance(value, Const):
            return not -(2**31) <= int(value.value) < 2**31
        if isinstance(value, Apply):
            if _is_checked(value):
                return False
            return value.operation in ("cast", "reinterpret") or _outgrows(value) or any(self.needs_wide(a) for a in value.args if a.dtype == INDEX)
        return False

    def special_float(self, value: float, dtype: str) -> str:
        element = ELEMENT_TYPES[dtype]
        bits = np.array(np.nan if value != value else value, element.numpy).view(f"uint{8 * element.bytes}")
        return f"{_REINTERPRET[REINTERPRETED[dtype]]}({int(bits):#x}{'LL' if element.bytes == 8 else ''})"

    # --- memory ---

    def place(self, name: str, offset: Expr) -> str:
        """A scalar element."""
        text, buffer = self.buffer(name)
        if buffer.lanes > 1:
            vector = text if buffer.size == buffer.lanes else f"{text}[{self.text(floordiv(offset, buffer.lanes))}]"
            component = mod(offset, buffer.lanes)
            if isinstance(component, Const):
                return f"{vector}.{_COMPONENTS[int(component.value)]}"
            return f"(&{vector}.x)[{self.text(component)}]"
        if buffer.space == "register" and buffer.size == 1:
            return text
        return f"{text}[{self.text(offset)}]"

    def vector_place(self, name: str, offset: Expr, lanes: int, writes: bool) -> Code:
        text, buffer = self.buffer(name)
        if buffer.lanes == lanes:
            return Code(text if buffer.size == lanes else f"{text}[{self.text(floordiv(offset, lanes))}]")
        return Code(f"*reinterpret_cast<{'' if writes else 'const '}{self.type_name(buffer.dtype, lanes)} *>({self.pointer(text, offset)})", UNARY)

    def pointer(self, text: str, offset: Expr) -> str:
        return text if offset == Const(0, INDEX) else f"{text} + {self.text(offset, SUM)}"

    def in_pieces(self, buffer: Buffer, lanes: int) -> bool:
        """Whether a vector is accessed element by element: in an array of registers, so that the array stays in registers."""
        return buffer.space == "register" and buffer.lanes != lanes

    def in_two(self, buffer: Buffer, lanes: int) -> bool:
        """Whether a vector in memory is wider than the widest access, of 16 bytes."""
        return lanes * size_of(buffer.dtype) > _ALIGNMENT and buffer.lanes != lanes

    def load(self, node: Load) -> Code:
        text, buffer = self.buffer(node.buffer)
        if buffer.space == "cluster":
            rank, within = self.in_cluster(buffer, node.index[0])
            if is_own_part(buffer, node.index[0], self.cluster):
                code = Code(self.place(node.buffer, within)) if node.lanes == 1 else self.vector_place(node.buffer, within, node.lanes, False)
            else:
                function = self.need(f"tw_cluster_load{node.lanes}{'_b16' if buffer.dtype in NARROW_FLOATS else ''}")
                code = Code(f"{function}({text} + {self.text(within, SUM)}, {self.text(rank)})")
        elif node.lanes == 1:
            code = Code(self.place(node.buffer, node.index[0]))
        elif self.in_pieces(buffer, node.lanes):
            code = self.gathered([self.place(node.buffer, node.index[0] + lane) for lane in range(node.lanes)], buffer.dtype)
        elif self.in_two(buffer, node.lanes):
            code = Code(f"{self.need('tw_load8')}({self.pointer(text, node.index[0])})")
        else:
            code = self.vector_place(node.buffer, node.index[0], node.lanes, False)
        return self.converted(buffer.dtype, node.dtype, code, node.lanes) if self.converts(node.buffer, node.dtype) else code

    def converted(self, source: str, target: str, code: Code, lanes: int) -> Code:
        return Code(f"{self.need(conversion_name(source, target, lanes))}({code.text})")

    def in_cluster(self, buffer: Buffer, offset: Expr) -> tuple[Expr, Expr]:
        """The block whose part of a "cluster" buffer has this place, and the offset in it."""
        part = buffer.size // self.cluster
        return floordiv(offset, part), mod(offset, part)

    def store(self, statement: Store) -> None:
        value = statement.value
        if self.buffer(statement.buffer)[1].space == "cluster":
            # a block stores only to its own part
            statement = Store(statement.buffer, self.in_cluster(self.buffer(statement.buffer)[1], statement.offset)[1], value)
        _, buffer = self.buffer(statement.buffer)
        if value.lanes == 1:
            self.assign(self.place(statement.buffer, statement.offset), statement)
        elif self.in_pieces(buffer, value.lanes):
            code = self.expression(value)
            name = code.text
            if not name.isidentifier():
                name = self.fresh("t")
                self.line(f"const {self.type_name(value.dtype, value.lanes)} {name} = {code.text};")
            for lane in range(value.lanes):
                self.line(f"{self.place(statement.buffer, statement.offset + lane)} = {name}.{_COMPONENTS[lane]};")
        elif self.in_two(buffer, value.lanes):
            target_address = self.pointer(self.buffer(statement.buffer)[0], statement.offset)
            self.line(f"{self.need('tw_store8')}({target_address}, {self.text(value)});")
        else:
            target = self.vector_place(statement.buffer, statement.offset, value.lanes, True)
            self.line(f"{target.text} = {self.text(value)};")

    def atomic_add(self, root: AtomicAdd) -> None:
        self.prepare(root.offset, root.value)
        target, buffer = self.buffer(root.buffer)
        assert buffer.space == "global" and buffer.dtype == FLOAT32, "atomic additions are to float32 in global memory"
        lanes = root.value.lanes
        function = self.need(f"tw_atomic_add{lanes}") if lanes > 1 else "atomicAdd"
        self.line(f"{function}({target} + {self.text(root.offset, SUM)}, {self.text(root.value)});")

    def address(self, place: Place) -> str:
        text, buffer = self.buffer(place.buffer)
        if buffer.space == "register" and buffer.size == buffer.lanes:
            return f"&{text}"
        if buffer.space == "cluster":
            rank, within = self.in_cluster(buffer, place.offset)
            return f"{self.need('tw_cluster_address')}({text} + {self.text(within, SUM)}, {self.text(rank)})"
        return super().address(Place(place.buffer, floordiv(place.offset, buffer.lanes)) if buffer.lanes > 1 else place)

    def allocate(self, buffer: Buffer) -> None:
        name = self.declare_buffer(buffer)
        kind = CUDA_TYPES[buffer.dtype] if buffer.lanes == 1 else self.type_name(buffer.dtype, buffer.lanes)
        if buffer.space in ("shared", "cluster") and buffer.name in self.placed:
            self.line(f"{kind} *const {name} = reinterpret_cast<{kind} *>(shared_memory + {self.placed[buffer.name]});")
        elif buffer.space in ("shared", "cluster"):
            size = buffer.size // self.cluster if buffer.space == "cluster" else buffer.size
            self.line(f"__shared__ __align__({buffer.alignment}) {kind} {name}[{size}];")
        elif buffer.size == buffer.lanes:
            self.line(f"{kind} {name};")
        else:
            self.line(f"{kind} {name}[{buffer.size // buffer.lanes}];")

    # --- expressions ---

    def variable(self, node: Var) -> Code:
        code = super().variable(node)
        return Code(f"(long long){code.text}", UNARY) if self.widen and node.dtype == INDEX else code

    def expression(self, node: Expr) -> Code:
        if self.lane is not None and node.lanes > 1:
            return self.component(node, self.lane)
        if (
            isinstance(node, Apply)
            and node.dtype == INDEX
            and not self.widen
            and not self.wide_index
            and id(node) not in self.hoisted
            and _outgrows(node)
        ):
            self.widen = True
            code = super().expression(node)
            self.widen = False
            return code
        if self.widen and node.dtype == INDEX and (id(node) in self.hoisted or _is_checked(node)) and not self.needs_wide(node):
            self.widen = False
            code = super().expression(node)
            self.widen = True
            return Code(f"(long long){code.at(UNARY)}", UNARY)
        if isinstance(node, Load) and self.widen:
            self.widen = False
            code = super().expression(node)
            self.widen = True
            return code
        return super().expression(node)

    def zero(self, node: Expr) -> Code:
        return self.whole(const(0, node.dtype), node.lanes) if node.lanes > 1 else super().zero(node)

    def component(self, node: Expr, lane: int) -> Code:
        """One lane of a vector."""
        known = self.hoisted.get(id(node))
        if known is not None:
            return Code(f"{known.text}.{_COMPONENTS[lane]}")
        if isinstance(node, Var):
            return Code(f"{self.variable(node).text}.{_COMPONENTS[lane]}")
        if isinstance(node, Load):
            code = Code(self.place(node.buffer, node.index[0] + lane))
            return self.converted(self.buffer(node.buffer)[1].dtype, node.dtype, code, 1) if self.converts(node.buffer, node.dtype) else code
        assert isinstance(node, Apply)
        return self.apply(node)

    def prepare(self, *roots: Expr) -> None:
        super().prepare(*roots)
        # vectors whose lanes are used separately below are loaded as vectors first
        certain = certainly_evaluated(roots)
        for node in walk(*roots):
            if isinstance(node, Apply) and node.lanes > 1 and not self.chooses_vectors(node):
                for kid in children(node):
                    if isinstance(kid, Load) and kid.lanes > 1 and id(kid) in certain and id(kid) not in self.hoisted:
                        self.name_value(kid, self.load(kid))

    @staticmethod
    def chooses_vectors(node: Apply) -> bool:
        return node.operation == "select" and node.args[0].lanes == 1

    def vector_apply(self, node: Apply) -> Code:
        if self.chooses_vectors(node):
            condition, yes, no = node.args
            a, b = self.whole(yes, node.lanes), self.whole(no, node.lanes)
            return Code(f"{self.text(condition, OR)} ? {a.at(OR)} : {b.at(CONDITIONAL)}", CONDITIONAL)
        if node.operation == "broadcast":
            return self.whole(node.args[0], node.lanes)
        if node.operation == "cast" and NARROW_FLOATS & {node.dtype, node.args[0].dtype}:
            return self.conversion(node, node.lanes)
        lanes = []
        for lane in range(node.lanes):
            self.lane = lane
            lanes.append(self.apply(node).text)
        self.lane = None
        return self.gathered(lanes, node.dtype)

    def position_function(self, name: str) -> str:
        return f"{name}_{'i64' if self.wide_index else 'i32'}"

    def whole(self, node: Expr, lanes: int) -> Code:
        """The value as a vector; a scalar is broadcast."""
        if node.lanes > 1:
            return self.expression(node)
        return self.gathered([self.text(node)] * lanes, node.dtype)

    def gathered(self, lanes: Sequence[str], dtype: str) -> Code:
        if len(lanes) == 8 and dtype in NARROW_FLOATS:  # pairs of 16-bit numbers
            lanes = [f"({low}) | (unsigned)({high}) << 16" for low, high in zip(lanes[::2], lanes[1::2], strict=True)]
            return Code(f"make_uint4({', '.join(lanes)})")
        return Code(f"make_{self.type_name(dtype, len(lanes))}({', '.join(lanes)})")

    def call(self, operation: str, dtype: str, args: Sequence[Expr], lanes: int, result: str) -> Code:
        if operation == "reinterpret":
            return Code(f"{_REINTERPRET[dtype]}({self.text(args[0])})")
        if dtype == INDEX and not self.wide_index and not self.widen and not any(self.needs_wide(a) for a in args):
            dtype = "i32"
        if dtype == "bool":
            dtype = "u8"
        if operation == "rsqrt":
            name = "rsqrt" + ELEMENT_TYPES[dtype].suffix
        elif operation in LIBRARY and is_float(dtype):
            name = LIBRARY[operation] + ELEMENT_TYPES[dtype].suffix
        elif operation in ("min", "max") and dtype == "i32":
            name = operation
        else:
            name = self.need(f"tw_{operation}_{dtype}")
        return Code(f"{name}({', '.join(self.text(arg) for arg in args)})")

    # --- statements ---

    def loop_pragma(self, statement: For) -> None:
        if statement.kind == "unroll":
            self.line("#pragma unroll" if isinstance(statement.extent, Const) else "#pragma unroll 4")

    def kernel(self, kernel: Kernel) -> None:
        launch = kernel.launch
        self.cluster = kernel.cluster
        if launch is None:
            raise ValueError(f"kernel {kernel.name} has no launch: it is for a CPU")
        self.wide_index = index_dtype(kernel) == "i64"
        self.placed = shared_offsets(kernel) if dynamic_shared_bytes(kernel) or shares_places(kernel) else {}
        self.push()
        self.header(kernel)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        bounds = f"{threads}, {kernel.blocks_per_processor}" if kernel.blocks_per_processor else f"{threads}"
        arguments = []
        for buffer in kernel.parameters:
            name = self.declare_buffer(buffer)
            arguments.append(f"{'' if buffer.writable else 'const '}{CUDA_TYPES[buffer.dtype]} *__restrict__ {name}")
        body, scalars = kernel.body, kernel.scalars
        if kernel.trips:  # the body defines their number, which the call passes instead
            assert isinstance(body, Block)
            body, scalars = Block(tuple(part for part in body.statements if not isinstance(part, Let) or part.variable != TRIPS)), (*scalars, TRIPS)
        arguments += [f"{self.index_type} {self.declare(scalar)}" for scalar in scalars]
        self.named = {}
        for described in kernel.maps:
            name = self.fresh(described.name)
            arguments.append(f"const __grid_constant__ {self.need('tw_tensor_map')} {name}")
            self.named[described.name] = f"&{name}"
        cluster = f" __cluster_dims__({kernel.cluster}, 1, 1)" if kernel.cluster > 1 else ""
        self.line(f'extern "C" __global__ void{cluster} __launch_bounds__({bounds})')
        self.line(f"{identifier_of(kernel)}({', '.join(arguments)}) {{")
        self.depth += 1
        if self.placed:
            dynamic = dynamic_shared_bytes(kernel)
            size = "" if dynamic else str(shared_bytes(kernel))
            self.line(f"{'extern ' if dynamic else ''}__shared__ __align__({_shared_alignment(kernel)}) unsigned char shared_memory[{size}];")
        self.used = used = used_variables(body)
        for kind, source in (("block", "blockIdx"), ("thread", "threadIdx")):
            for axis in "xyz":
                if f"{kind}_{axis}" in used:
                    self.line(f"const {self.index_type} {self.declare(Var(f'{kind}_{axis}'))} = {source}.{axis};")
        self.depth -= 1
        self.body(body)
        self.line("}")
        self.line("")
        self.pop()

    def source(self) -> str:
        texts = ordered(self.helpers, _HELPERS.with_own(self.functions))
        parts = [*self.preambles, *(["\n".join(texts) + "\n"] if texts else [])]
        return "\n".join([*parts, "\n".join(self.lines).rstrip() + "\n"])


def _is_checked(node: Expr) -> bool:
    """Whether it is a checked index, which has the type of index arithmetic whatever its operand's type."""
    return isinstance(node, Apply) and node.operation == "checked"


@lru_cache(maxsize=4096)  # asked again of every part while a whole is printed
def _outgrows(node: Expr) -> bool:
    """Whether the known range of an index expression, or of a part of it, exceeds 32 bits."""
    low, high = range_of(node)
    if low != -inf and low < -(2**31) or high != inf and high >= 2**31:
        return True
    return any(_outgrows(kid) for kid in children(node) if kid.dtype == INDEX and isinstance(kid, Apply))


def print_cuda(kernels: Sequence[Kernel]) -> str:
    """One complete CUDA C++ file with the kernels in order."""
    printer = CudaPrinter()
    for kernel in kernels:
        printer.kernel(kernel)
    return printer.source()
