"""The part that all printers share: kernel IR as text, with few parentheses, readable names and shared sub-expressions named once.

A printer walks the statements and keeps the lines so far, the names in scope, and the helper functions that were called, which are printed ahead of
the kernels (see `codegen.helpers`). The subclasses `c.CPrinter` and `cuda.CudaPrinter` have the parts that differ: types, loads and stores, loops,
and which helper an operation calls.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.codegen.conversions import bits_of
from tilewright.codegen.helpers import Helper
from tilewright.codegen.sharing import is_risky
from tilewright.ir.dtypes import ELEMENT_TYPES, NARROW_FLOATS, computed_in, is_float, size_of
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, cast, children, const, constants, range_of, select, walk
from tilewright.ir.guards import Guard, guards
from tilewright.ir.intrinsic import Operand
from tilewright.ir.kernel import (
    FAULTS,
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    Comment,
    For,
    If,
    Invoke,
    Kernel,
    Let,
    Place,
    Statement,
    Store,
    With,
)

# Precedence of C operators; a larger number binds more tightly.
ATOM, UNARY, PRODUCT, SUM, SHIFT, RELATION, EQUALITY, BITAND, BITXOR, BITOR, AND, OR, CONDITIONAL = range(16, 3, -1)

_INFIX = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "lt": ("<", RELATION),
    "le": ("<=", RELATION),
    "gt": (">", RELATION),
    "ge": (">=", RELATION),
    "eq": ("==", EQUALITY),
    "ne": ("!=", EQUALITY),
    "and": ("&&", AND),
    "or": ("||", OR),
    "bitwise_and": ("&", BITAND),
    "bitwise_or": ("|", BITOR),
    "bitwise_xor": ("^", BITXOR),
}
_DIVISIONS = frozenset({"div", "floordiv", "mod", "truncdiv", "fmod"})
_MOVES = frozenset({"cast", "select", "broadcast", "zip_low", "zip_high", "join"})  # operations that are allowed on 16-bit floats
C_INT_BYTES = 4  # size of `int`, in which C computes narrower integers
_LARGE = 12  # a guarded tree of this many nodes costs more to print twice than to name its loads
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_ASSOCIATIVE = frozenset({"add", "mul", "and", "or", "bitwise_and", "bitwise_or", "bitwise_xor"})

_RESERVED = frozenset(
    """auto break case char const continue default do double else enum extern float for goto if inline int long register restrict return
    short signed sizeof static struct switch typedef union unsigned void volatile while arguments scalars main class template typename this
    new delete operator namespace using public private protected friend virtual try catch throw true false bool asm and or not xor
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t float2 float4 float8 uchar8 int2 int4 double2 min max abs exp log sin cos tan
    pow sqrt floor ceil round trunc erf y0 y1 yn j0 j1 jn gamma index signgam log2 log10 tanh sinh cosh asin acos atan div time near far
    threadIdx blockIdx blockDim gridDim warpSize NAN INFINITY I linux unix""".split()
)


@dataclass(frozen=True)
class Code:
    """Text of an expression, and how tightly its outermost operator binds. `mask`: bytes per lane of a vector of booleans, else 0."""

    text: str
    level: int = ATOM
    mask: int = 0

    def at(self, level: int) -> str:
        """The text, in parentheses if it binds less tightly than `level`."""
        return self.text if self.level >= level else f"({self.text})"


@dataclass
class Scope:
    """Names of one lexical level. `wide`: index variables of 64 bits where others have 32 (CUDA)."""

    variables: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    storage: dict[str, Buffer] = field(default_factory=dict)
    masks: dict[str, int] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)


def divides_safely(divisor: Expr) -> bool:
    """Whether an integer divisor is known to be neither 0 nor -1: a program that divides by 0, or the lowest integer by -1, traps."""
    while isinstance(divisor, Apply) and divisor.operation == "broadcast":
        divisor = divisor.args[0]
    if isinstance(divisor, Const):
        values = 1 << 8 * size_of(divisor.dtype)
        return int(divisor.value) % values not in ((0, values - 1) if ELEMENT_TYPES[divisor.dtype].lowest else (0,))
    low, high = range_of(divisor) if divisor.dtype == INDEX else (0, 0)
    return 0 < low and high < 1 << 63


def printed_operation(node: Apply) -> str:
    """The name of the operation, `total_...` for an integer division whose divisor may be 0 or -1: see `helpers.TOTAL_DIVISIONS`."""
    divides = node.operation in _DIVISIONS and not is_float(node.args[0].dtype)
    return f"total_{node.operation}" if divides and not divides_safely(node.args[1]) else node.operation


def identifier(name: str) -> str:
    """A C identifier that resembles `name`."""
    text = re.sub(r"\W+", "_", name).strip("_") or "v"
    if text[0].isdigit():
        text = "v" + text
    return text + "_" if text in _RESERVED or text.startswith("tw_") else text


def is_non_negative(expr: Expr) -> bool:
    return expr.dtype == INDEX and range_of(expr)[0] >= 0


def float_literal(value: float, dtype: str) -> str:
    """A finite constant with the fewest digits that read back as the same number."""
    element = ELEMENT_TYPES[dtype]
    if element.bytes == 8:
        return repr(float(value))
    single = np.dtype(element.numpy).type
    text, shortest = repr(float(single(value))), str(single(value))
    text = shortest if float(single(float(shortest))) == float(single(value)) else text
    if "." not in text and "e" not in text:
        text += ".0"
    return text + element.suffix


class Printer(ABC):
    """State of printing one source file. Subclasses are final and hold what differs between languages."""

    language: str  # key of an instruction's text
    spread = False  # whether a vector operation is written once per lane

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.scopes: list[Scope] = []
        self.helpers: dict[str, None] = {}
        self.functions: dict[str, Helper] = {}  # functions of instructions; the ones that are called count as helpers
        self.preambles: dict[str, None] = {}  # sources of the contexts that are used
        self.named: dict[str, str] = {}  # buffer of an enclosing context -> its name in instructions
        self.hoisted: dict[int, Code] = {}
        self.used: frozenset[str] | None = None  # variables that the kernel reads; None: print all

    # --- what a language decides ---

    @abstractmethod
    def type_name(self, dtype: str, lanes: int = 1, mask: int = 0) -> str:
        """The type of a value."""

    @abstractmethod
    def load(self, node: Load) -> Code: ...

    @abstractmethod
    def store(self, statement: Store) -> None: ...

    @abstractmethod
    def special_float(self, value: float, dtype: str) -> str:
        """Infinity or NaN."""

    @abstractmethod
    def allocate(self, buffer: Buffer) -> None: ...

    @abstractmethod
    def loop_pragma(self, statement: For) -> None: ...

    @abstractmethod
    def call(self, operation: str, dtype: str, args: Sequence[Expr], lanes: int, result: str) -> Code:
        """An operation that is a function call; `dtype` is that of the first operand."""

    @abstractmethod
    def vector_apply(self, node: Apply) -> Code:
        """An operation on vectors."""

    # --- lines and names ---

    def assign(self, target: str, statement: Store) -> None:
        """`target = value`, or `target += rest` if the value adds to the target."""
        value = statement.value
        if isinstance(value, Apply) and value.operation == "add" and id(value) not in self.hoisted and not self.is_promoted(value.dtype):
            first, rest = value.args
            same = isinstance(first, Load) and first.buffer == statement.buffer and first.index == (statement.offset,)
            if same and first.lanes == value.lanes and id(first) not in self.hoisted:
                self.line(f"{target} += {self.addend(rest, value.lanes).text};")
                return
        self.line(f"{target} = {self.text(value)};")

    def addend(self, node: Expr, lanes: int) -> Code:
        """The right side of `+=`."""
        return self.expression(node)

    @abstractmethod
    def converted(self, source: str, target: str, code: Code, lanes: int) -> Code:
        """The code of a conversion between a narrow float and the type that it is computed in."""

    def converts(self, buffer: str, dtype: str) -> bool:
        """Whether a value of that type is stored in the buffer as a narrower one."""
        stored = self.buffer(buffer)[1].dtype
        return stored in NARROW_FLOATS and dtype == computed_in(stored)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text if text else "")

    def push(self) -> None:
        self.scopes.append(Scope())

    def pop(self) -> None:
        self.scopes.pop()

    def fresh(self, name: str) -> str:
        base = identifier(name)
        text, number = base, 1
        while any(text in scope.taken for scope in self.scopes):
            number += 1
            text = f"{base}_{number}"
        self.scopes[-1].taken.add(text)
        return text

    def declare(self, variable: Var, mask: int = 0, wide: bool = False) -> str:
        text = self.fresh(variable.name)
        scope = self.scopes[-1]
        scope.variables[variable.name] = text
        if mask:
            scope.masks[text] = mask
        if wide:
            scope.wide.add(text)
        return text

    def declare_buffer(self, buffer: Buffer) -> str:
        text = self.fresh(buffer.name)
        self.scopes[-1].buffers[buffer.name] = text
        self.scopes[-1].storage[buffer.name] = buffer
        return text

    def variable(self, node: Var) -> Code:
        for scope in reversed(self.scopes):
            text = scope.variables.get(node.name)
            if text is not None:
                return Code(text, ATOM, scope.masks.get(text, 0))
        raise ValueError(f"kernel IR uses the variable {node.name} outside its scope")

    def is_wide(self, node: Var) -> bool:
        return any(scope.variables[node.name] in scope.wide for scope in reversed(self.scopes) if node.name in scope.variables)

    def buffer(self, name: str) -> tuple[str, Buffer]:
        for scope in reversed(self.scopes):
            if name in scope.buffers:
                return scope.buffers[name], scope.storage[name]
        raise ValueError(f"kernel IR uses the buffer {name} outside its scope")

    def need(self, helper: str) -> str:
        self.helpers[helper] = None
        return helper

    # --- expressions ---

    def expression(self, node: Expr) -> Code:
        known = self.hoisted.get(id(node))
        if known is not None:
            return known
        if isinstance(node, Const):
            return self.constant(node)
        if isinstance(node, Var):
            return self.variable(node)
        if isinstance(node, Load):
            return self.load(node)
        if node.args[0].dtype in NARROW_FLOATS and node.operation not in _MOVES:
            raise ValueError(f"{node.operation} is no operation on {node.args[0].dtype}: kernels compute with it as float32")
        return self.vector_apply(node) if node.lanes > 1 else self.apply(node)

    def text(self, node: Expr, level: int = 0) -> str:
        return self.expression(node).at(level)

    def constant(self, node: Const) -> Code:
        if node.dtype in NARROW_FLOATS:
            return Code(str(bits_of(float(node.value), node.dtype)))
        if is_float(node.dtype):
            value = float(node.value)
            if value != value or value in (float("inf"), float("-inf")):
                text = self.special_float(value, node.dtype)
            else:
                text = float_literal(value, node.dtype)
            return Code(text, UNARY if text.startswith("-") else ATOM)
        value = int(node.value)
        if node.dtype in ("u32", "u64"):
            suffix = "u" if node.dtype == "u32" else "ull"
            return Code(f"{value % (1 << 8 * size_of(node.dtype))}{suffix}", ATOM)
        if value == -(2**63):
            return Code("-9223372036854775807LL - 1", SUM)
        if value == -(2**31):
            return Code("-2147483647 - 1", SUM)
        text = f"{value}LL" if not -(2**31) <= value < 2**31 else str(value)
        return Code(text, UNARY if value < 0 else ATOM)

    def infix(self, symbol: str, level: int, operands: Sequence[Code], associative: bool) -> Code:
        def side(operand: Code, right: bool) -> str:
            least = level + 1 if right and not associative else level
            if operand.level != level and (level in (AND, OR) and operand.level < EQUALITY or BITOR <= level <= BITAND and operand.level < UNARY):
                least = ATOM  # readers (and gcc -Wall) mistrust C's precedence of these operators
            if level in (RELATION, EQUALITY) and operand.level <= RELATION:
                least = ATOM
            text = operand.at(least)
            return f"({text})" if right and text.startswith("-") else text

        left, right = operands
        return Code(f"{side(left, False)} {symbol} {side(right, True)}", level)

    def apply(self, node: Apply) -> Code:
        """An operation on scalars."""
        operation, args, dtype = printed_operation(node), node.args, node.args[0].dtype
        if operation == "select":
            condition, yes, no = (self.expression(arg) for arg in args)
            return Code(f"{condition.at(OR)} ? {yes.at(OR)} : {no.at(CONDITIONAL)}", CONDITIONAL)
        if operation == "broadcast":
            return self.expression(args[0])
        if operation == "cast":
            return self.cast(node)
        if operation == "checked":
            return self.position(node)
        if operation == "neg":
            return self.narrowed(Code("-" + self._operand_of_minus(args[0]), UNARY), node.dtype)
        if operation == "not":
            return Code("!" + self.text(args[0], UNARY), UNARY)
        if operation == "bitwise_not":
            symbol = "!" if dtype == "bool" else "~"
            return self.narrowed(Code(symbol + self.text(args[0], UNARY), UNARY), node.dtype)
        if operation == "isnan":
            if not is_float(dtype):
                return Code("0")
            operand = self.expression(args[0])
            if operand.level < ATOM or len(operand.text) > 40:
                return self.call("isnan", dtype, args, 1, "bool")
            return Code(f"{operand.text} != {operand.text}", EQUALITY)
        if operation in ("floor", "ceil", "round", "trunc") and not is_float(dtype):
            return self.expression(args[0])
        if operation in ("floordiv", "mod") and dtype == INDEX and is_non_negative(args[0]) and range_of(args[1])[0] > 0:
            return self.infix("/" if operation == "floordiv" else "%", PRODUCT, [self.expression(a) for a in args], False)
        if not is_float(dtype) and operation in ("truncdiv", "fmod"):
            symbol = "/" if operation == "truncdiv" else "%"
            return self.narrowed(self.infix(symbol, PRODUCT, [self.expression(a) for a in args], False), node.dtype)
        if dtype == "bool" and operation in ("add", "max"):
            operation = "or"
        if dtype == "bool" and operation in ("mul", "min"):
            operation = "and"
        if operation in _INFIX:
            symbol, level = _INFIX[operation]
            # Only exact operations may be regrouped: a + (b + c) in floating point keeps its parentheses.
            associative = operation in _ASSOCIATIVE and not (is_float(dtype) and operation in ("add", "mul"))
            code = self.infix(symbol, level, [self.expression(arg) for arg in args], associative)
            return self.narrowed(code, node.dtype) if operation in ("add", "sub", "mul") else code
        return self.call(operation, dtype, args, 1, node.dtype)

    def position(self, node: Apply) -> Code:
        """A checked index: a call of `tw_checked`, or of `tw_counted` if negative indices count from the end."""
        least, extent, site = constants(node.args[1:])
        function = self.need(self.position_function("tw_counted" if least else "tw_checked"))
        return Code(f"{function}({self.text(node.args[0])}, {extent}, {self.fault(site)})")

    def position_function(self, name: str) -> str:
        """The helper's name in this language."""
        return name

    def fault(self, site: int) -> str:
        """The address where a fault of the site is stored."""
        faults, _ = self.buffer(FAULTS)
        return f"{faults} + {site}" if site else faults

    @staticmethod
    def is_promoted(dtype: str) -> bool:
        """Whether C computes with the type as int."""
        return not is_float(dtype) and size_of(dtype) < C_INT_BYTES

    def conversion(self, node: Apply, lanes: int) -> Code:
        """A cast from or to a narrow float, through the type that it is computed in; `lanes` is 1 if vectors are written lane by lane."""
        source = node.args[0]
        wide = computed_in(source.dtype if source.dtype in NARROW_FLOATS else node.dtype)
        if wide not in (source.dtype, node.dtype):
            return self.expression(cast(cast(source, wide), node.dtype))
        return self.converted(source.dtype, node.dtype, self.expression(source), lanes)

    def _operand_of_minus(self, arg: Expr) -> str:
        text = self.text(arg, UNARY)
        return f"({text})" if text.startswith("-") else text

    def narrowed(self, code: Code, dtype: str) -> Code:
        """Wraps the result of a promoted operation to its own type."""
        if self.is_promoted(dtype) and dtype != "bool":
            return Code(f"({self.type_name(dtype)}){code.at(UNARY)}", UNARY)
        return code

    def cast(self, node: Apply) -> Code:
        source = node.args[0]
        if source.dtype in NARROW_FLOATS or node.dtype in NARROW_FLOATS:
            return self.conversion(node, 1)
        if node.dtype == "bool":
            return Code(f"{self.text(source, RELATION)} != 0", EQUALITY)
        return Code(f"({self.type_name(node.dtype)}){self._operand_of_minus(source)}", UNARY)

    # --- shared sub-expressions ---

    def prepare(self, *roots: Expr) -> None:
        """Names sub-expressions that occur more than once, as `const` variables ahead of the statement. A load on only one side of a `select` (or on
        the right of an `and`) is never moved out of it."""
        self.hoisted = {}
        uses: dict[int, int] = {id(root): 1 for root in roots}
        weight: dict[int, int] = {}
        order = list(walk(*roots))
        for node in order:
            weight[id(node)] = min(1 + sum(weight[id(kid)] for kid in children(node)), 10**6)
            for kid in children(node):
                uses[id(kid)] = uses.get(id(kid), 0) + (node.lanes if self.spread and isinstance(node, Apply) and kid.lanes == 1 else 1)
        repeated = [n for n in order if uses[id(n)] > 1 and self._worth_naming(n, weight[id(n)])]
        if not repeated:
            return
        paths = guards(roots)
        safe: dict[int, bool] = {}
        for node in order:
            safe[id(node)] = not is_risky(node) and all(safe[id(kid)] for kid in children(node))
        for node in repeated:
            if () in paths[id(node)] or safe[id(node)]:
                self.name_value(node, self.expression(node))
            elif weight[id(node)] >= _LARGE and self._name_guarded_loads(node, paths):
                self.name_value(node, self.expression(node))

    def _name_guarded_loads(self, root: Expr, paths: Mapping[int, tuple[Guard, ...]]) -> bool:
        """Names the loads below a node, each as `condition ? load : 0`, so that the node may be computed whatever the condition; False if that is
        impossible."""
        if id(root) in self.hoisted:
            return False
        needed = [node for node in _below(root, self.hoisted) if is_risky(node)]
        if not all(isinstance(node, Load) and (len(paths[id(node)]) == 1) for node in needed):
            return False
        for node in needed:
            (guard,) = paths[id(node)]
            code = self.expression(node)
            if guard:
                conditions = [self.expression(c) if holds else Code("!" + self.text(c, UNARY), UNARY) for c, holds in guard]
                whole = conditions[0]
                for condition in conditions[1:]:
                    whole = self.infix("&&", AND, [whole, condition], True)
                zero = self.zero(node)
                code = Code(f"{whole.at(OR)} ? {self.side(code, node).at(OR)} : {zero.at(CONDITIONAL)}", CONDITIONAL, code.mask)
            self.name_value(node, code)
        return root is not needed[-1] if needed else True

    def side(self, code: Code, node: Expr) -> Code:
        """A side of a conditional expression."""
        return code

    def zero(self, node: Expr) -> Code:
        """Zeros of the node's type."""
        return self.expression(const(0, node.dtype))

    def name_value(self, node: Expr, code: Code) -> None:
        """Declares a variable that holds the node's value until the end of the scope."""
        name = self.fresh("t")
        self.line(f"const {self.let_type(node, code.mask)} {name} = {code.text};")
        self.hoisted[id(node)] = Code(name, ATOM, code.mask)

    def _worth_naming(self, node: Expr, weight: int) -> bool:
        if isinstance(node, (Const, Var)):
            return False
        if isinstance(node, Load):
            return self.buffer(node.buffer)[1].space != "register"
        return weight > (8 if node.dtype == INDEX else 2)

    # --- statements ---

    def statement(self, root: Statement) -> None:
        self.hoisted = {}
        if isinstance(root, Block):
            self.block(root)
        elif isinstance(root, Let):
            self.let(root)
        elif isinstance(root, Store):
            if self.converts(root.buffer, root.value.dtype):
                root = Store(root.buffer, root.offset, Apply("cast", (root.value,), self.buffer(root.buffer)[1].dtype, root.value.lanes))
            self.prepare(root.offset, root.value)
            self.store(root)
        elif isinstance(root, AtomicAdd):
            self.atomic_add(root)
        elif isinstance(root, Allocate):
            self.allocate(root.buffer)
        elif isinstance(root, For):
            self.loop(root)
        elif isinstance(root, If):
            self.branch(root)
        elif isinstance(root, Invoke):
            self.invoke(root)
        elif isinstance(root, With):
            self.within(root)
        elif isinstance(root, Comment):
            for text in root.text.splitlines():
                self.line(f"// {text}".rstrip("\\"))
        else:
            raise TypeError(f"not a kernel statement: {type(root).__name__}")

    def atomic_add(self, root: AtomicAdd) -> None:
        raise ValueError("this language has no atomic additions")

    def invoke(self, root: Invoke) -> None:
        """Prints an instruction's text."""
        text = root.intrinsic.text.get(self.language)
        if text is None:
            raise ValueError(f"{self.language} has no text of the instruction {root.intrinsic.name}")
        places = self.guarded_places(root)
        self.prepare(*(place.offset for _, place in places))
        parts = {name: self.text(value, OR) for name, value in root.values.items()}
        if text.function:
            self.functions[self.need(text.function)] = Helper(text.source)
        parts |= {operand.name: self.named.get(place.buffer) or self.address(place) for operand, place in places}
        self.line(text.line.format(**parts))

    def guarded_places(self, root: Invoke) -> list[tuple[Operand, Place]]:
        """The places of an instruction's operands, of those that it only reads at offset 0 if a guard prevents that."""
        return [
            (operand, Place(place.buffer, select(root.guard(operand), place.offset, 0)) if operand.access == "read" else place)
            for operand, place in root.places
        ]

    def address(self, place: Place) -> str:
        """A place in a buffer, as it appears in the text of an instruction."""
        return f"{self.buffer(place.buffer)[0]} + {self.text(place.offset, SUM)}"

    def within(self, root: With) -> None:
        """Prints statements between the lines that set up their context and those that release it."""
        text = root.context.text.get(self.language)
        if text is None:
            raise ValueError(f"{self.language} has no text of the context {root.context.name}")
        if text.source:
            self.preambles[text.source] = None
        outer = self.named
        self.named = outer | {buffer.name: name for buffer, name in zip(root.buffers, text.names, strict=True)}
        self.line("{")
        self.body(root.body, text.enter, text.leave)
        self.line("}")
        self.named = outer

    def block(self, root: Block) -> None:
        nested = any(isinstance(s, (Let, Allocate)) for s in root.statements)
        if nested:
            self.line("{")
            self.depth += 1
            self.push()
        for child in root.statements:
            self.statement(child)
        if nested:
            self.pop()
            self.depth -= 1
            self.line("}")

    def body(self, root: Statement, enter: Sequence[str] = (), leave: Sequence[str] = ()) -> None:
        """Prints the inside of braces, with lines before and after it."""
        self.depth += 1
        self.push()
        for text in enter:
            self.line(text)
        for child in root.statements if isinstance(root, Block) else (root,):
            self.statement(child)
        for text in leave:
            self.line(text)
        self.pop()
        self.depth -= 1

    def let(self, statement: Let) -> None:
        if self.used is not None and statement.variable.name not in self.used:
            return
        self.prepare(statement.value)
        code = self.expression(statement.value)
        value = statement.value
        name = self.declare(statement.variable, code.mask, self.needs_wide(value))
        self.line(f"const {self.let_type(value, code.mask)} {name} = {code.text};")

    def let_type(self, value: Expr, mask: int) -> str:
        return self.type_name(value.dtype, value.lanes, mask)

    def needs_wide(self, value: Expr) -> bool:
        return False

    @property
    @abstractmethod
    def index_type(self) -> str:
        """The type of loop variables."""

    def loop(self, statement: For) -> None:
        self.prepare(statement.extent)
        extent = self.text(statement.extent, RELATION + 1)
        self.loop_pragma(statement)
        self.push()
        name = self.declare(statement.variable)
        self.line(f"for ({self.index_type} {name} = 0; {name} < {extent}; ++{name}) {{")
        self.body(statement.body)
        self.line("}")
        self.pop()

    def branch(self, statement: If) -> None:
        self.prepare(statement.condition)
        self.line(f"if ({self.text(statement.condition)}) {{")
        self.body(statement.then)
        if statement.otherwise is not None:
            self.line("} else {")
            self.body(statement.otherwise)
        self.line("}")

    def header(self, kernel: Kernel) -> None:
        for text in kernel.header.splitlines():
            self.line(f"// {text}".rstrip().rstrip("\\"))


def _below(root: Expr, named: Mapping[int, Code]) -> Iterator[Expr]:
    """The nodes that are visited when the root is printed, children first; nodes that have a name are not entered."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif id(node) not in seen and id(node) not in named:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((kid, False) for kid in children(node))
