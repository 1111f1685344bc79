"""Kernel IR as C: what gcc and clang compile for CPUs.

Every kernel is ``void NAME(void *const *arguments, const int64_t *scalars)``. `arguments[i]` is the i-th parameter, aligned to its element and
overlapping no other; `scalars[i]` is the i-th scalar parameter, and `trips`, if the kernel has it, follows them. Vectors are GCC vector extensions
(`f32x16`), loaded and stored unaligned through the `_u` types. Booleans are stored as bytes 0 and 1; a vector of booleans is a vector of integers, 0
or -1, as wide as the operands of the comparison.

Cases that C leaves undefined: integer arithmetic wraps (compile with ``-fwrapv``); integer division by zero, and casts of floating-point numbers
to integers that cannot hold them, stay undefined (x86 gives the same result as PyTorch). If the condition of a `select` is a vector, both sides are
evaluated, including guarded loads; a scalar condition guards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewright.codegen.conversions import c_conversion, c_joined, conversion_name
from tilewright.codegen.helpers import C_TYPES, LIBRARY, SINGLE_PRECISION, VECTOR_FUNCTIONS, Helper, HelperTable, ordered
from tilewright.codegen.printer import (
    _INFIX,
    ATOM,
    BITAND,
    BITOR,
    BITXOR,
    COMPARISONS,
    CONDITIONAL,
    EQUALITY,
    OR,
    SUM,
    UNARY,
    Code,
    Printer,
    printed_operation,
)
from tilewright.codegen.sharing import used_variables
from tilewright.ir.dtypes import ELEMENT_TYPES, NARROW_FLOATS, is_float, size_of
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, const, floordiv, mod
from tilewright.ir.kernel import (
    SERIAL_WORK,
    TRIPS,
    Allocate,
    Block,
    Buffer,
    Comment,
    For,
    If,
    Kernel,
    Place,
    Statement,
    Store,
    With,
    statements,
    written_by,
)

_REDUCTIONS = {"sum": "+", "prod": "*", "any": "||", "all": "&&"}


def _checking(name: str, inside: str) -> Helper:
    """The helper that turns an index that is data into a position of a dimension; an index out of range is stored as a fault and gives 0."""
    return Helper(
        f"""static inline int64_t {name}(int64_t index, int64_t extent, int64_t *fault) {{
    const int64_t position = {inside};
    if (__builtin_expect((uint64_t)position < (uint64_t)extent, 1))
        return position;
    __atomic_store_n(fault, index, __ATOMIC_RELAXED);
    return 0;
}}"""
    )


_CHECKS = {"tw_checked": _checking("tw_checked", "index"), "tw_counted": _checking("tw_counted", "index < 0 ? index + extent : index")}
_MATH_CONSTANTS = re.compile(r"\b(?:NAN|INFINITY)\b")
_CALLED = re.compile(r"(?<!void )\b(?!tw_|__|_mm)(\w+)\(")
_NOT_MATH = frozenset(
    "sizeof vector_size aligned _Static_assert _Alignas schedule if collapse num_threads reduction memcpy memset calloc aligned_alloc free".split()
)
"""What a file of ours calls, or seems to call, apart from our own functions and those of <math.h>."""
_HELPERS = HelperTable({**SINGLE_PRECISION, **_CHECKS}, C_TYPES, "static inline")


def c_function(operation: str, dtype: str) -> str:
    """The C function for an operation on scalars of this type: one of `tw_...` in the generated file, or the C library's."""
    name = f"tw_{operation}_{dtype}"
    if name in SINGLE_PRECISION:
        return name
    if operation in LIBRARY and is_float(dtype):
        return LIBRARY[operation] + ELEMENT_TYPES[dtype].suffix
    return name


def c_type(dtype: str) -> str:
    """The C type of a stored element."""
    return C_TYPES[dtype]


class CPrinter(Printer):
    """Prints kernels one after another; `source()` returns the file."""

    language = "C"
    qualifier = "static inline"

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[tuple[str, int], None] = {}
        self.wrappers: dict[str, str] = {}
        self.reductions: dict[str, str] = {}
        self.collapsed = 0
        self.in_team = False

    # --- types ---

    @property
    def index_type(self) -> str:
        return "int64_t"

    def type_name(self, dtype: str, lanes: int = 1, mask: int = 0) -> str:
        if lanes == 1:
            return "int" if dtype == "bool" else C_TYPES[dtype]
        element = f"i{8 * (mask or 1)}" if dtype == "bool" else dtype
        self.vectors[element, lanes] = None
        return f"{element}x{lanes}"

    def special_float(self, value: float, dtype: str) -> str:
        text = "NAN" if value != value else "INFINITY" if value > 0 else "-INFINITY"
        return text if ELEMENT_TYPES[dtype].suffix else f"({C_TYPES[dtype]}){text}"

    # --- memory ---

    def place(self, name: str, offset: Expr, lanes: int, writes: bool) -> Code:
        """The element or vector at an offset, as an lvalue."""
        text, buffer = self.buffer(name)
        if buffer.lanes > 1 and lanes == buffer.lanes:
            if buffer.size == buffer.lanes:
                return Code(text)
            return Code(f"{text}[{self.text(floordiv(offset, lanes))}]")
        if buffer.lanes > 1 and lanes == 1:
            vector = text if buffer.size == buffer.lanes else f"{text}[{self.text(floordiv(offset, buffer.lanes))}]"
            return Code(f"{vector}[{self.text(mod(offset, buffer.lanes))}]")
        if lanes == 1:
            return Code(text if self.is_plain(buffer) else f"{text}[{self.text(offset)}]")
        base = f"({C_TYPES[buffer.dtype]} *){text}" if buffer.lanes > 1 else text
        element = "u8" if buffer.dtype == "bool" else buffer.dtype
        address = base if offset == Const(0, INDEX) else f"({base} + {self.text(offset, SUM)})"
        return Code(f"*({'' if writes else 'const '}{self.type_name(element, lanes)}_u *){address}", UNARY)

    def is_plain(self, buffer: Buffer) -> bool:
        """Whether the buffer is a variable, not an array."""
        return buffer.space == "register" and buffer.size == buffer.lanes

    def load(self, node: Load) -> Code:
        code = self.place(node.buffer, node.index[0], node.lanes, False)
        if self.converts(node.buffer, node.dtype):
            return self.converted(self.buffer(node.buffer)[1].dtype, node.dtype, code, node.lanes)
        if node.dtype == "bool" and node.lanes > 1:
            mask = self.type_name("i8", node.lanes)
            return Code(f"({mask}){code.at(UNARY)} != 0", EQUALITY, 1)
        return code

    def store(self, statement: Store) -> None:
        value = statement.value
        place = self.place(statement.buffer, statement.offset, value.lanes, True).text
        if value.dtype == "bool" and value.lanes > 1:
            code = self.expression(value)
            bytes_ = self.resized(code, 1, value.lanes)
            self.line(f"{place} = ({self.type_name('u8', value.lanes)})({bytes_.at(UNARY)} & 1);")
        else:
            self.assign(place, statement)

    def converted(self, source: str, target: str, code: Code, lanes: int) -> Code:
        if lanes > 1:
            for element in (*sorted((source, target), key=size_of, reverse=True), "i32"):
                self.type_name(element, lanes)
        name = conversion_name(source, target, lanes)
        self.wrappers[name] = c_conversion(source, target, lanes)
        return Code(f"{name}({code.text})")

    def zero(self, node: Expr) -> Code:
        if node.lanes == 1:
            return super().zero(node)
        return self.vector(const(0, node.dtype), node.lanes, 1 if node.dtype == "bool" else 0)

    def side(self, code: Code, node: Expr) -> Code:
        if node.lanes == 1 or code.level == ATOM:
            return code
        # gcc requires one type on both sides of ?:, and an unaligned load has another
        return Code(f"({self.type_name(node.dtype, node.lanes, code.mask)}){code.at(UNARY)}", UNARY, code.mask)

    def addend(self, node: Expr, lanes: int) -> Code:
        return self.operand(node, lanes) if lanes > 1 else self.expression(node)

    def allocate(self, buffer: Buffer) -> None:
        element = "u8" if buffer.dtype == "bool" else buffer.dtype
        kind = self.type_name(element, buffer.lanes)
        name = self.declare_buffer(buffer)
        self.line(f"{kind} {name};" if self.is_plain(buffer) else f"{kind} {name}[{buffer.size // buffer.lanes}];")

    # --- operations ---

    def call(self, operation: str, dtype: str, args: Sequence[Expr], lanes: int, result: str) -> Code:
        if dtype == "bool":
            dtype = "u8"
        if operation in ("min", "max") and is_float(dtype):
            bound = next((a for a in args if isinstance(a, Const) and a.value == a.value), None)
            if bound is not None:
                operation = "atleast" if operation == "max" else "atmost"
                args = [next(a for a in args if a is not bound), bound]
        name = c_function(operation, dtype)
        if lanes > 1:
            name = self.wrapped(name, operation, dtype, lanes, len(args))
            return Code(f"{name}({', '.join(self.vector(arg, lanes).text for arg in args)})")
        if name.startswith("tw_"):
            self.need(name)
        return Code(f"{name}({', '.join(self.text(arg) for arg in args)})")

    def wrapped(self, scalar: str, operation: str, dtype: str, lanes: int, arity: int) -> str:
        """A vector function that applies the scalar one to each lane (gcc makes vector instructions of it)."""
        name = f"tw_{operation}_{dtype}x{lanes}"
        if name not in self.wrappers:
            kind = self.type_name(dtype, lanes)
            names = "ab"[:arity]
            if operation in ("min", "max") and is_float(dtype):  # a loop for each of two instructions: gcc makes logic of masks from one
                relation = ">" if operation == "max" else "<"
                each = [f"result[i] = b[i] {relation} a[i] ? b[i] : a[i];  // a where either is NaN", "result[i] = b[i] == b[i] ? result[i] : b[i];"]
            else:
                each = [f"result[i] = {scalar}({', '.join(f'{n}[i]' for n in names)});"]
                if scalar.startswith("tw_"):
                    self.need(scalar)
            steps = "".join(f"    for (int i = 0; i < {lanes}; ++i)\n        {step}\n" for step in each)
            if (scalar, lanes) in VECTOR_FUNCTIONS:
                feature, native = VECTOR_FUNCTIONS[scalar, lanes]
                steps = f"#ifdef {feature}\n{native}#else\n{steps}#endif\n"
            self.wrappers[name] = (
                f"static inline {kind} {name}({', '.join(f'{kind} {n}' for n in names)}) {{\n    {kind} result;\n{steps}    return result;\n}}"
            )
        return name

    def vector(self, node: Expr, lanes: int, mask: int = 0) -> Code:
        """The value as a vector; a scalar is broadcast."""
        if node.lanes > 1:
            return self.expression(node)
        code = self.expression(node)
        kind = self.type_name(node.dtype, lanes, mask)
        if node.dtype == "bool":
            return Code(f"({kind}){{0}} - ({self.integer(mask or 1)}){code.at(UNARY)}", SUM, mask or 1)
        name = f"tw_broadcast_{kind}"
        if name not in self.wrappers:
            t = C_TYPES[node.dtype]
            self.wrappers[name] = f"static inline {kind} {name}({t} a) {{ return ({kind}){{{', '.join('a' * lanes)}}}; }}"
        return Code(f"{name}({code.text})")

    def shuffled(self, node: Apply) -> Code:
        """The lanes of two vectors in another order, or one after the other."""
        lanes = node.args[0].lanes
        given, kind = (self.type_name(node.dtype, n) for n in (lanes, node.lanes))
        name = f"tw_{node.operation}_{kind}"
        if name not in self.wrappers:
            start = lanes // 2 if node.operation == "zip_high" else 0
            zipped = (f"{i}, {lanes + i}" for i in range(start, start + lanes // 2))
            order = ", ".join(map(str, range(2 * lanes)) if node.operation == "join" else zipped)
            self.wrappers[name] = f"static inline {kind} {name}({given} a, {given} b) {{ return __builtin_shufflevector(a, b, {order}); }}"
        return Code(f"{name}({', '.join(self.vector(arg, lanes).text for arg in node.args)})")

    def integer(self, size: int) -> str:
        return C_TYPES[f"i{8 * size}"]

    def resized(self, code: Code, mask: int, lanes: int) -> Code:
        """A vector of booleans with lanes of another width."""
        if code.mask == mask:
            return code
        return Code(f"__builtin_convertvector({code.text}, {self.type_name('bool', lanes, mask)})", ATOM, mask)

    def vector_apply(self, node: Apply) -> Code:
        operation, args, lanes, dtype = printed_operation(node), node.args, node.lanes, node.args[0].dtype
        if operation == "broadcast":
            return self.vector(args[0], lanes)
        if operation in ("zip_low", "zip_high", "join"):
            return self.shuffled(node)
        if operation == "select":
            return self.vector_select(node)
        if operation == "cast":
            return self.vector_cast(node)
        if dtype == "bool":
            operation = {"add": "or", "max": "or", "mul": "and", "min": "and", "bitwise_not": "not"}.get(operation, operation)
            operation = {"eq": "bitwise_xor", "ne": "bitwise_xor"}.get(operation, operation)
        if operation in ("and", "or", "not", "bitwise_and", "bitwise_or", "bitwise_xor") and node.dtype == "bool":
            return self.vector_logic(operation, node)
        if operation == "reinterpret":
            return Code(f"({self.type_name(node.dtype, lanes)}){self.text(args[0], UNARY)}", UNARY)
        if operation == "neg":
            return Code("-" + self._operand_of_minus(args[0]), UNARY)
        if operation == "bitwise_not":
            return Code("~" + self.text(args[0], UNARY), UNARY)
        if operation == "isnan" or operation == "isinf" and not is_float(dtype):
            a = self.expression(args[0]).at(ATOM)
            return Code(f"{a} != {a}", EQUALITY, size_of(dtype))
        if operation == "isinf":
            absolute = self.call("abs", dtype, args, lanes, dtype)
            return Code(f"{absolute.text} == {self.vector(Const(float('inf'), dtype), lanes).text}", EQUALITY, size_of(dtype))
        if operation in ("floor", "ceil", "round", "trunc") and not is_float(dtype):
            return self.expression(args[0])
        if operation in _INFIX:
            symbol, level = _INFIX[operation]
            operands = [self.operand(arg, lanes) for arg in args]
            code = self.infix(symbol, level, operands, False)
            return Code(code.text, code.level, size_of(dtype)) if operation in COMPARISONS else code
        if operation in ("truncdiv", "fmod") and not is_float(dtype):
            return self.infix("/" if operation == "truncdiv" else "%", 14, [self.operand(arg, lanes) for arg in args], False)
        return self.call(operation, dtype, args, lanes, node.dtype)

    def operand(self, node: Expr, lanes: int) -> Code:
        """An operand of an infix operator, where the language itself broadcasts a scalar of the vector's type."""
        if node.lanes == 1 and (is_float(node.dtype) or node.dtype == "i32"):
            return self.expression(node)
        return self.vector(node, lanes)

    def truth(self, node: Expr, lanes: int) -> Code:
        """An operand of a logical operation: a vector of booleans, or a scalar of any type."""
        if node.dtype == "bool":
            return self.expression(node)
        code = self.vector(node, lanes)
        return Code(f"{code.at(EQUALITY + 1)} != 0", EQUALITY, size_of(node.dtype))

    def vector_logic(self, operation: str, node: Apply) -> Code:
        lanes = node.lanes
        codes = [self.truth(arg, lanes) for arg in node.args]
        mask = max(code.mask for code in codes)
        widened = [
            self.resized(code, mask, lanes) if code.mask else self.vector(arg, lanes, mask) for arg, code in zip(node.args, codes, strict=True)
        ]
        if operation == "not":
            return Code("~" + widened[0].at(UNARY), UNARY, mask)
        if node.operation == "eq":  # equality of booleans
            return Code(f"~({widened[0].at(ATOM)} ^ {widened[1].at(ATOM)})", UNARY, mask)
        symbol, level = {"and": ("&", BITAND), "or": ("|", BITOR), "xor": ("^", BITXOR)}[operation.removeprefix("bitwise_")]
        return Code(f"{widened[0].at(UNARY)} {symbol} {widened[1].at(UNARY)}", level, mask)

    def vector_select(self, node: Apply) -> Code:
        condition, yes, no = node.args
        lanes = node.lanes
        if node.dtype == "bool":
            sides = [self.truth(arg, lanes) for arg in (yes, no)]
            mask = max(code.mask for code in sides) or 1
            a, b = (self.resized(c, mask, lanes) if c.mask else self.vector(arg, lanes, mask) for arg, c in zip((yes, no), sides, strict=True))
        else:
            mask = size_of(node.dtype)
            a, b = self.vector(yes, lanes), self.vector(no, lanes)
        if condition.lanes == 1:
            if node.dtype != "bool":
                a, b = self.side(a, node), self.side(b, node)
            return Code(
                f"{self.text(condition, OR)} ? {a.at(OR)} : {b.at(CONDITIONAL)}",
                CONDITIONAL,
                mask if node.dtype == "bool" else 0,
            )
        chosen = self.resized(self.truth(condition, lanes), mask, lanes)
        kind = self.type_name(node.dtype, lanes, mask)
        name = f"tw_select_{kind}"
        if name not in self.wrappers:
            bits = self.type_name("bool", lanes, mask)
            self.wrappers[name] = (
                f"static inline {kind} {name}({bits} m, {kind} a, {kind} b) {{ return ({kind})((m & ({bits})a) | (~m & ({bits})b)); }}"
            )
        return Code(f"{name}({chosen.text}, {a.text}, {b.text})", ATOM, mask if node.dtype == "bool" else 0)

    def vector_cast(self, node: Apply) -> Code:
        source, lanes = node.args[0], node.lanes
        if node.dtype == "bool":
            return self.truth(source, lanes)
        kind = self.type_name(node.dtype, lanes)
        if source.lanes == 1:
            return self.vector(Apply("cast", (source,), node.dtype), lanes)
        if isinstance(source, Apply) and source.operation == "join":
            return self.halves(source, node.dtype)
        if source.dtype in NARROW_FLOATS or node.dtype in NARROW_FLOATS:
            return self.conversion(node, lanes)
        code = self.expression(source)
        if source.dtype == "bool":
            code = Code(f"{code.at(UNARY)} & 1")
        return Code(f"__builtin_convertvector({code.text}, {kind})")

    def halves(self, join: Apply, dtype: str) -> Code:
        """Two vectors converted, and then joined, or both by one function."""
        lanes = join.args[0].lanes
        narrow = tuple(Apply("cast", (half,), dtype, lanes) for half in join.args)
        joined = self.shuffled(Apply("join", narrow, dtype, join.lanes))
        text = c_joined(join.dtype, dtype, lanes)
        if text is None:
            return joined
        name = conversion_name(join.dtype, dtype, join.lanes)
        self.wrappers[name] = text
        return Code(f"{name}({', '.join(self.text(half) for half in join.args)})")

    # --- instructions ---

    def address(self, place: Place) -> str:
        text, buffer = self.buffer(place.buffer)
        if self.is_plain(buffer):
            return f"&{text}"
        if place.offset == Const(0, INDEX):
            return text
        vectors = buffer.space == "register" and buffer.lanes > 1
        return super().address(Place(place.buffer, floordiv(place.offset, buffer.lanes)) if vectors else place)

    # --- loops ---

    def loop(self, statement: For) -> None:
        if statement.kind != "team":
            super().loop(statement)
            return
        if stored := stores_of_all(statement.body):
            raise ValueError(f"every thread of a team would store to {', '.join(stored)}: stores belong in its parallel loops")
        self.in_team = True
        super().loop(statement)
        self.in_team = False

    def loop_pragma(self, statement: For) -> None:
        if self.collapsed:  # the pragma of an outer loop covers this one
            self.collapsed -= 1
        elif statement.kind == "parallel":
            depth = perfect_depth(statement)
            self.collapsed = depth - 1
            team = "" if self.in_team else "parallel "
            collapse = f" collapse({depth})" if depth > 1 else ""
            enough = f" if({TRIPS.name} * {statement.work} > {SERIAL_WORK})" if statement.work and team else ""
            self.line(f"#pragma omp {team}for schedule(static){collapse}{enough}")
        elif statement.kind == "team":
            self.line("#pragma omp parallel")
        elif statement.kind == "simd":
            clauses = [self.reduction(buffer, combiner) for buffer, combiner in statement.reductions]
            self.line(" ".join(["#pragma omp simd", *clauses]))
        elif statement.kind == "unroll":
            count = min(int(statement.extent.value), 65534) if isinstance(statement.extent, Const) else 8
            if count > 1:
                self.line(f"#pragma GCC unroll {count}")

    def reduction(self, name: str, combiner: str) -> str:
        text, buffer = self.buffer(name)
        if combiner in _REDUCTIONS:
            return f"reduction({_REDUCTIONS[combiner]}:{text})"
        if not is_float(buffer.dtype):
            return f"reduction({combiner}:{text})"
        # OpenMP's own max and min lose NaN
        operator = self.need(f"tw_{combiner}_{buffer.dtype}")
        start = "-INFINITY" if combiner == "max" else "INFINITY"
        self.reductions[operator] = (
            f"#pragma omp declare reduction({operator} : {C_TYPES[buffer.dtype]} : omp_out = {operator}(omp_out, omp_in)) "
            f"initializer(omp_priv = {start})"
        )
        return f"reduction({operator}:{text})"

    # --- kernels ---

    def kernel(self, kernel: Kernel) -> None:
        self.push()
        self.used = used_variables(kernel.body)
        self.header(kernel)
        self.line(f"void {identifier_of(kernel)}(void *const *arguments, const int64_t *scalars) {{")
        self.depth += 1
        for number, buffer in enumerate(kernel.parameters):
            name = self.declare_buffer(buffer)
            constant = "" if buffer.writable else "const "
            self.line(f"{constant}{C_TYPES[buffer.dtype]} *restrict const {name} = arguments[{number}];")
        body, scalars = kernel.body, kernel.scalars
        if kernel.trips and isinstance(body, Block):  # begins with their number, which the call passes instead
            body, scalars = Block(body.statements[1:]), (*scalars, TRIPS)
        for number, scalar in enumerate(scalars):
            self.line(f"const int64_t {self.declare(scalar)} = scalars[{number}];")
        if not scalars:
            self.line("(void)scalars;")
        self.depth -= 1
        self.body(body)
        self.line("}")
        self.line("")
        self.pop()

    def source(self) -> str:
        parts: list[str] = []
        typedefs = []
        for element, lanes in self.vectors:
            size = size_of(element) * lanes
            name = f"{element}x{lanes}"
            typedefs.append(f"typedef {C_TYPES[element]} {name} __attribute__((vector_size({size})));")
            typedefs.append(f"typedef {C_TYPES[element]} {name}_u __attribute__((vector_size({size}), aligned({size_of(element)}), may_alias));")
        if typedefs:
            parts.append("\n".join(typedefs) + "\n")
        parts += self.preambles
        texts = [*ordered(self.helpers, _HELPERS.with_own(self.functions)), *self.reductions.values(), *self.wrappers.values()]
        if texts:
            parts.append("\n".join(texts) + "\n")
        text = "\n".join([*parts, "\n".join(self.lines).rstrip() + "\n"])
        return f"{includes_for(text)}\n{text}"


def includes_for(text: str) -> str:
    """The headers that a source file needs. A compiler takes as long to read <math.h> as to compile a small kernel, so that it is there only if the
    file has one of its constants or calls a function that may be one of its own."""
    needs = _MATH_CONSTANTS.search(text) or not _NOT_MATH.issuperset(_CALLED.findall(text))
    return ("#include <math.h>\n" if needs else "") + "#include <stdint.h>\n"


def identifier_of(kernel: Kernel) -> str:
    """The C name of a kernel. The name must already be an identifier, as launchers look it up."""
    if not kernel.name.isidentifier() or not kernel.name.isascii():
        raise ValueError(f"{kernel.name!r} is not an identifier")
    return kernel.name


def perfect_depth(statement: For) -> int:
    """Depth of the perfect nest of parallel loops that begins here (inner extents do not depend on outer variables)."""
    depth = 1
    body: Statement = statement.body
    while True:
        if isinstance(body, Block):
            inner = [s for s in body.statements if not isinstance(s, Comment)]
            if len(inner) != 1:
                return depth
            body = inner[0]
        elif isinstance(body, For) and body.kind == "parallel" and isinstance(body.extent, (Const, Var)):
            depth += 1
            body = body.body
        else:
            return depth


def stores_of_all(body: Statement) -> list[str]:
    """Buffers outside a team's body to which its statements outside parallel loops store."""
    if isinstance(body, For) and body.kind == "parallel":
        return []
    own = {s.buffer.name for s in statements(body) if isinstance(s, Allocate)}
    inside: tuple[Statement, ...] = ()
    if isinstance(body, Block):
        inside = body.statements
    elif isinstance(body, (For, With)):
        inside = (body.body,)
    elif isinstance(body, If):
        inside = (body.then, *((body.otherwise,) if body.otherwise is not None else ()))
    found = [*written_by(body), *(name for part in inside for name in stores_of_all(part))]
    return [name for name in dict.fromkeys(found) if name not in own]


def print_c(kernels: Sequence[Kernel]) -> str:
    """One complete C file with the kernels in order; each is a function `void NAME(void *const *arguments, const int64_t *scalars)`."""
    printer = CPrinter()
    for kernel in kernels:
        printer.kernel(kernel)
    return printer.source()
