"""Runs any kernel, GPU kernels included, on a CPU, and reports what it does wrong.

The kernel becomes C with a check on every access, which is compiled (unoptimised: it shall compile fast) and called. What is reported:

- accesses out of bounds of global, shared and register buffers;
- reads of what an asynchronous copy writes before it was waited for, and races with its arrival;
- reads of shared and register elements, and of elements of output buffers, that were not written before;
- races: two threads of a block touch the same element of shared or global memory between two barriers, or two blocks the same element of
  global memory, and one of them writes (atomic additions may meet one another, and nothing else); in CPU kernels two iterations of a parallel loop;
- vectors that are not aligned to their size (GPU);
- barriers that some threads of a block do not reach, or reach another number of times; stores to parameters that are not writable.

Indices out of range that a kernel checks for are not its faults: they are stored to its parameter FAULTS, as on the machine.

Blocks run one after another, those of a cluster in lockstep (any barrier of one then counts as one of all of them).
A block's body is split at its barriers: each piece runs for one thread after another, and what a thread keeps
across a barrier (variables, register buffers) lives in arrays over the threads. Loops with barriers inside run in lockstep.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from tilewright import settings
from tilewright.codegen.c import CPrinter, c_type, perfect_depth
from tilewright.codegen.printer import EQUALITY, SUM, UNARY, Code
from tilewright.codegen.tiles import ROUNDED, SCALAR_CONVERSIONS, WIDENED, configuration, memory_of
from tilewright.errors import CacheError, CompilerMissing, KernelFailed
from tilewright.ir.dtypes import ELEMENT_TYPES, size_of
from tilewright.ir.expr import Expr, Load, Var
from tilewright.ir.kernel import (
    FAULTS,
    Allocate,
    AtomicAdd,
    Barrier,
    Block,
    Buffer,
    ClusterBarrier,
    Copy,
    For,
    If,
    Kernel,
    Let,
    Prefetch,
    Statement,
    Store,
    Tile,
    TileLoad,
    TileMultiply,
    TileStore,
    TileZero,
    WithTiles,
    statements,
)
from tilewright.system.libraries import mapped
from tilewright.system.private_files import make_folder, read_private
from tilewright.system.programs import ProgramHung, run_program

_FLAGS = ("-O1", "-w", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC")
_FAULTS = 64  # as TW_FAULTS in interpreter_runtime.h
_SHADOW_BYTES = 40  # sizeof(tw_shadow)
_KINDS = ("out of bounds", "uninitialised", "race", "race between blocks", "misaligned", "barrier divergence", "read-only")


@dataclass(frozen=True)
class Report:
    """`faults`: messages, the first of each kind and buffer, in order of occurrence; empty where the kernel is clean. `unwritten`: how
    many elements of each writable parameter the kernel never wrote (those with any)."""

    faults: tuple[str, ...] = ()
    unwritten: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_clean(self) -> bool:
        return not self.faults


def synchronises(root: Statement) -> bool:
    """Whether a barrier is inside."""
    return any(isinstance(s, (Barrier, ClusterBarrier)) for s in statements(root))


class CheckedPrinter(CPrinter):
    """Prints one kernel as C with checks: `void run(void *const *arguments, const int64_t *scalars, uint8_t *const *set, tw_fault *,
    int64_t *count)`."""

    def prefetch(self, root: Prefetch) -> None:
        """Touches nothing."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.name = kernel.name
        self.is_gpu = kernel.is_gpu
        self.cluster = kernel.cluster
        self.block_threads = prod(kernel.launch.block) if kernel.launch else 1
        self.threads = self.block_threads * self.cluster
        self.buffers: list[Buffer] = []
        self.arena = 0
        self.setup: list[str] = []
        self.kept: list[list[str]] = []  # for each open region: what a thread's piece declares at its beginning
        self.parallel = False
        self.stored = {s.buffer for s in statements(kernel.body) if isinstance(s, (Store, Copy, AtomicAdd, TileStore))}
        self.shapes: dict[str, Tile] = {}

    # --- storage ---

    def reserve(self, size: int) -> int:
        """Offset of so many bytes in the kernel's arena, aligned for every vector."""
        offset = self.arena
        self.arena += -(-max(size, 1) // 64) * 64
        return offset

    def number(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def declare_parameter(self, buffer: Buffer, position: int) -> None:
        name = self.declare_buffer(buffer)
        written = buffer.name in self.stored
        shadow = f"tw_shadows({buffer.size})" if written else "NULL"
        aligned = 1 if self.is_gpu else 0
        self.setup.append(
            f"tw_buffer {name}__store = {{arguments[{position}], {buffer.size}, {size_of(buffer.dtype)}, {self.number(buffer)}, "
            f"set[{position}], {shadow}, {int(self.is_gpu)}, {aligned}, {int(buffer.writable)}}}, *const {name} = &{name}__store;"
        )
        if written:
            self.cleanup.append(f"free({name}->shadow);")

    def allocate(self, buffer: Buffer) -> None:
        size = buffer.size * size_of(buffer.dtype)
        name = self.declare_buffer(buffer)
        shared = buffer.space == "shared"
        aligned = buffer.lanes if buffer.lanes > 1 else int(shared or buffer.space == "cluster")
        facts = f"{buffer.size}, {size_of(buffer.dtype)}, {self.number(buffer)}"
        if shared and self.cluster > 1:
            stride = -(-size // 64) * 64
            data, flags = self.reserve(stride * self.cluster), self.reserve(buffer.size * self.cluster)
            every = f"for (int rank = 0; rank < {self.cluster}; ++rank)"
            marks = f"(uint8_t *)arena + {flags} + rank * {buffer.size}, tw_shadows({buffer.size})"
            one = f"{{arena + {data} + rank * {stride}, {facts}, {marks}, 0, {aligned}, 1}}"
            self.setup.append(f"tw_buffer {name}__all[{self.cluster}]; {every} {name}__all[rank] = (tw_buffer){one};")
            self.thread_indices.append(f"tw_buffer *const {name} = &{name}__all[rank];")
            self.cleanup.append(f"{every} free({name}__all[rank].shadow);")
            self.block_start.append(f"{every} tw_forget(&{name}__all[rank]);")
            self.scopes[0].taken.add(name)
            return
        if shared or buffer.space == "cluster":
            data, flags = self.reserve(size), self.reserve(buffer.size)
            self.setup.append(
                f"tw_buffer {name}__store = {{arena + {data}, {facts}, (uint8_t *)arena + {flags}, tw_shadows({buffer.size}), 0, {aligned}, 1}}, "
                f"*const {name} = &{name}__store;"
            )
            self.cleanup.append(f"free({name}->shadow);")
            self.block_start.append(f"tw_forget({name});")
            self.scopes[0].taken.add(name)
            if not self.in_piece:
                self.line(f"tw_forget({name});")
            return
        if self.in_piece or not self.is_gpu:
            shadow = "NULL"
            if not self.is_gpu and not self.parallel:  # a parallel loop inside the buffer's scope shares it between iterations
                shadow = f"tw_cleared(arena + {self.reserve(buffer.size * _SHADOW_BYTES)}, {buffer.size})"
            self.line(f"_Alignas(64) char {name}__data[{size}]; uint8_t {name}__set[{buffer.size}];")
            self.line(f"tw_buffer {name}__store = {{{name}__data, {facts}, {name}__set, {shadow}, 0, {aligned}, 1}}, *const {name} = &{name}__store;")
            self.line(f"tw_forget({name});")
            return
        stride, flag_stride = -(-size // 64) * 64, buffer.size
        data, flags = self.reserve(stride * self.threads), self.reserve(flag_stride * self.threads)
        self.kept[-1].append(
            f"tw_buffer {name}__store = {{arena + {data} + thread * {stride}, {facts}, (uint8_t *)arena + {flags} + thread * {flag_stride}, "
            f"NULL, 0, {aligned}, 1}}, *const {name} = &{name}__store;"
        )
        self.line(f"memset(arena + {flags}, 0, {flag_stride * self.threads});")

    # --- accesses ---

    def load(self, node: Load) -> Code:
        text, buffer = self.buffer(node.buffer)
        kind = c_type(buffer.dtype) if node.lanes == 1 else f"{self.type_name('u8' if node.dtype == 'bool' else node.dtype, node.lanes)}_u"
        if self.converts(node.buffer, node.dtype) and node.lanes > 1:
            kind = f"{self.type_name('bf16', node.lanes)}_u"
        code = Code(f"*(const {kind} *)tw_read(s, {text}, {self.text(node.index[0])}, {node.lanes})", UNARY)
        if self.converts(node.buffer, node.dtype):
            return self.converted(WIDENED, code, node.lanes)
        if node.dtype == "bool" and node.lanes > 1:
            return Code(f"({self.type_name('i8', node.lanes)})({code.text}) != 0", EQUALITY, 1)
        return code

    def store(self, statement: Store) -> None:
        text, buffer = self.buffer(statement.buffer)
        value = statement.value
        code = self.expression(value)
        if value.dtype == "bool" and value.lanes > 1:
            code = Code(f"({self.type_name('u8', value.lanes)})({self.resized(code, 1, value.lanes).at(UNARY)} & 1)", UNARY)
        stored = "u8" if value.dtype == "bool" else value.dtype
        if self.converts(statement.buffer, value.dtype):
            code, stored = self.converted(ROUNDED, code, value.lanes), "bf16"
        kind = c_type(buffer.dtype) if value.lanes == 1 else self.type_name(stored, value.lanes)
        pointer = kind if value.lanes == 1 else f"{kind}_u"
        name = self.fresh("value")
        self.line(f"const {kind} {name} = {code.text}; *({pointer} *)tw_write(s, {text}, {self.text(statement.offset)}, {value.lanes}) = {name};")

    def fault(self, site: int) -> str:
        """What a kernel reports by is no memory that it works with: any thread may store there."""
        faults, buffer = self.buffer(FAULTS)
        assert site < buffer.size
        return f"(int64_t *){faults}->data + {site}"

    def atomic_add(self, root: AtomicAdd) -> None:
        self.prepare(root.offset, root.value)
        text, buffer = self.buffer(root.buffer)
        value, lanes = root.value, root.value.lanes
        kind = c_type(buffer.dtype) if lanes == 1 else self.type_name(value.dtype, lanes)
        pointer = kind if lanes == 1 else f"{kind}_u"
        code = self.expression(value)
        name = self.fresh("value")
        self.line(f"const {kind} {name} = {code.text}; *({pointer} *)tw_atomic(s, {text}, {self.text(root.offset)}, {lanes}) += {name};")

    def copy(self, root: Copy) -> None:
        self.prepare(root.offset, root.value)
        text, buffer = self.buffer(root.buffer)
        code, lanes = self.expression(root.value), root.value.lanes
        kind = c_type(buffer.dtype) if lanes == 1 else self.type_name(root.value.dtype, lanes)
        pointer = kind if lanes == 1 else f"{kind}_u"
        name = self.fresh("value")
        self.line(f"const {kind} {name} = {code.text}; *({pointer} *)tw_copy(s, {text}, {self.text(root.offset)}, {lanes}) = {name};")

    def commit_copies(self) -> None:
        self.line("++s->groups[s->thread];")

    def await_copies(self, pending: int) -> None:
        self.line(f"tw_await(s, {pending});")

    # --- tiles ---

    def with_tiles(self, root: WithTiles) -> None:
        """Arrays in place of the registers."""
        configuration(root.tiles)
        self.line("{")
        self.push()
        for number, tile in enumerate(root.tiles):
            self.line(f"float tile{number}[{tile.rows}][{tile.columns}];")
        self.tiles = {tile.name: number for number, tile in enumerate(root.tiles)}
        self.shapes = {tile.name: tile for tile in root.tiles}
        self.body(root.body)
        self.pop()
        self.line("}")

    def tile_operation(self, root: TileZero | TileLoad | TileMultiply | TileStore) -> None:
        if isinstance(root, TileZero):
            number = self.tiles[root.tile]
            self.line(f"memset(tile{number}, 0, sizeof tile{number});")
        elif isinstance(root, TileMultiply):
            sums, a, b = (self.shapes[name] for name in (root.sums, root.a, root.b))
            if (a.rows, a.columns, b.columns) != (sums.rows, b.rows, sums.columns):
                raise ValueError(f"tiles of {a} and {b} do not multiply to {sums}")
            self.wrappers[WIDENED] = SCALAR_CONVERSIONS[WIDENED]
            target, left, right = (f"tile{self.tiles[name]}" for name in (root.sums, root.a, root.b))
            factors = f"{WIDENED}(((uint16_t *){left}[i])[k]) * {WIDENED}(((uint16_t *){right}[k / 2])[2 * j + k % 2])"
            self.line(f"for (int i = 0; i < {sums.rows}; ++i) for (int j = 0; j < {sums.columns}; ++j) for (int k = 0; k < {2 * a.columns}; ++k)")
            self.line(f"    {target}[i][j] += {factors};")
        else:
            name, offset = memory_of(root)
            text, buffer = self.buffer(name)
            tile, number = self.shapes[root.tile], self.tiles[root.tile]
            lanes = 4 * tile.columns // size_of(buffer.dtype)
            row = f"s, {text}, {self.text(offset, SUM)} + i * {root.stride}, {lanes}"
            copied = f"tile{number}[i], tw_read({row})" if isinstance(root, TileLoad) else f"tw_write({row}), tile{number}[i]"
            self.line(f"for (int i = 0; i < {tile.rows}; ++i) memcpy({copied}, {4 * tile.columns});")

    # --- pieces ---

    in_piece = False

    def region(self, members: Sequence[Statement]) -> None:
        """Statements in which there are barriers: pieces without run for each thread in turn."""
        self.push()
        self.kept.append([])
        self.line("{")
        self.depth += 1
        pending: list[Statement] = []
        for member in members:
            if isinstance(member, Block) and synchronises(member):
                self.piece(pending)
                self.region(member.statements)
            elif synchronises(member):
                self.piece(pending)
                self.synchronised(member)
            elif isinstance(member, Allocate):
                self.piece(pending)
                self.allocate(member.buffer)
            else:
                pending.append(member)
        self.piece(pending)
        self.depth -= 1
        self.line("}")
        self.kept.pop()
        self.pop()

    def piece(self, pending: list[Statement]) -> None:
        """The statements for each thread; empties the list."""
        if not pending:
            return
        self.open_threads()
        for member in pending:
            if isinstance(member, Let):
                self.let(member)
                self.keep(member)
            else:
                self.push()
                self.line("{")
                self.statement(member)
                self.line("}")
                self.pop()
        self.close_threads()
        for member in pending:
            if isinstance(member, Let):
                self.kept[-1].append(self.restored.pop(0))
        pending.clear()

    def keep(self, statement: Let) -> None:
        """Saves a thread's variable for its later pieces."""
        name = self.variable(statement.variable)
        value = statement.value
        kind = self.type_name(value.dtype, value.lanes, name.mask)
        stride = -(-value.lanes * max(size_of(value.dtype), name.mask, 4) // 16) * 16 if value.lanes == 1 else 64 * -(-value.lanes * 8 // 64)
        place = f"(({kind} *)(arena + {self.reserve(stride * self.threads)} + thread * {stride}))[0]"
        self.line(f"{place} = {name.text};")
        self.restored.append(f"const {kind} {name.text} = {place};")

    def open_threads(self) -> None:
        self.line(f"for (int64_t thread = 0; thread < {self.threads}; ++thread) {{")
        self.depth += 1
        self.line("s->thread = thread;")
        for text in self.thread_indices:
            self.line(text)
        for level in self.kept:
            for text in level:
                self.line(text)
        self.in_piece = True

    def close_threads(self) -> None:
        self.in_piece = False
        self.depth -= 1
        self.line("}")

    def uniform(self, value: Expr, what: str) -> str:
        """A variable with the value that all threads agree on; disagreement ends the kernel."""
        name = self.fresh(what)
        self.line(f"int64_t {name} = 0;")
        self.open_threads()
        self.push()
        self.prepare(value)
        self.line(f"const int64_t mine = {self.text(value)};")
        self.line(f"if (thread == 0) {name} = mine;")
        self.line(f"else if ({name} != mine) {{ tw_report(s, TW_DIVERGENCE, -1, mine, 1, {name}, 0); goto done; }}")
        self.pop()
        self.close_threads()
        return name

    def synchronised(self, member: Statement) -> None:
        self.hoisted = {}
        if isinstance(member, (Barrier, ClusterBarrier)):
            self.line("++s->epoch;")
        elif isinstance(member, For):
            extent = self.uniform(member.extent, "extent")
            self.push()
            name = self.declare(member.variable)
            self.line(f"for (int64_t {name} = 0; {name} < {extent}; ++{name})")
            self.region(member.body.statements if isinstance(member.body, Block) else (member.body,))
            self.pop()
        elif isinstance(member, If):
            self.line("{")
            condition = self.uniform(member.condition, "taken")
            self.line(f"if ({condition})")
            self.region(member.then.statements if isinstance(member.then, Block) else (member.then,))
            if member.otherwise is not None:
                other = member.otherwise
                self.line("else")
                self.region(other.statements if isinstance(other, Block) else (other,))
            self.line("}")

    # --- loops ---

    def loop_pragma(self, statement: For) -> None:
        return

    def loop(self, statement: For) -> None:
        if statement.kind != "parallel" or self.is_gpu or self.parallel:
            super().loop(statement)
            return
        # iterations of the outermost parallel loops are the threads of a CPU kernel
        self.parallel = True
        self.line("++s->epoch; s->thread = -1;")
        self.iteration = perfect_depth(statement)
        self._iterations(statement)
        self.line("++s->epoch; s->thread = 0;")
        self.parallel = False

    def _iterations(self, statement: For) -> None:
        self.prepare(statement.extent)
        extent = self.text(statement.extent, 12)
        self.push()
        name = self.declare(statement.variable)
        self.line(f"for (int64_t {name} = 0; {name} < {extent}; ++{name}) {{")
        self.depth += 1
        self.iteration -= 1
        body: Statement = statement.body
        if self.iteration:
            while isinstance(body, Block):
                body = next(m for m in body.statements if isinstance(m, (Block, For)))
            assert isinstance(body, For)
            self._iterations(body)
        else:
            self.line("++s->thread;")
            self.body(body)
        self.depth -= 1
        self.line("}")
        self.pop()

    # --- the whole ---

    def checked(self, kernel: Kernel) -> str:
        """The C source."""
        self.cleanup: list[str] = []
        self.block_start: list[str] = []
        self.restored: list[str] = []
        self.thread_indices: list[str] = []
        self.push()
        # names of the surrounding C
        self.scopes[0].taken.update(("s", "set", "arena", "thread", "block", "mine", "faults", "count", "done", "state", "rank", "cluster_first"))
        for position, buffer in enumerate(kernel.parameters):
            self.declare_parameter(buffer, position)
        for position, scalar in enumerate(kernel.scalars):
            self.setup.append(f"const int64_t {self.declare(scalar)} = scalars[{position}];")
        launch = kernel.launch
        self.depth = 1
        if launch is not None:
            for axis, extent in reversed(list(zip("xyz", launch.grid, strict=True))):
                name = self.declare(Var(f"block_{axis}"))
                if axis == "x" and self.cluster > 1:
                    self.line(f"for (int64_t cluster_first = 0; cluster_first < {extent}; cluster_first += {self.cluster})")
                    self.thread_indices.append(f"const int64_t rank = thread / {self.block_threads}, {name} = cluster_first + rank;")
                else:
                    self.line(f"for (int64_t {name} = 0; {name} < {extent}; ++{name})")
            below = 1
            for axis, extent in zip("xyz", launch.block, strict=True):
                name = self.declare(Var(f"thread_{axis}"))
                self.thread_indices.append(f"const int64_t {name} = thread / {below} % {extent};")
                below *= extent
            self.line("{")
            self.line(f"++s->block; ++s->epoch; tw_no_copies(s, {self.threads});")
            start = len(self.lines)
            self.region(kernel.body.statements if isinstance(kernel.body, Block) else (kernel.body,))
            self.lines[start:start] = self.block_start
            self.line("}")
        else:
            self.line("s->block = 0;")
            self.line("{")
            self.body(kernel.body)
            self.line("}")
        head = [
            "void run(void *const *arguments, const int64_t *scalars, uint8_t *const *set, tw_fault *faults, int64_t *count) {",
            "    tw_state *const s = calloc(1, sizeof *s);",
            "    s->faults = faults, s->block = -1;",
            f"    char *const arena = aligned_alloc(64, {max(self.arena, 64)});",
            *("    " + text for text in self.setup),
        ]
        end = ("    *count = s->count;", "    free(arena);", "    free(s->copies);", "    free(s);", "}")
        tail = ["done:", *("    " + text for text in self.cleanup), *end]
        self.lines = [*head, *self.lines, *tail]
        return _runtime_text() + self.source()


@lru_cache(maxsize=1)
def _runtime_text() -> str:
    return (files(__package__) / "interpreter_runtime.h").read_text()


@lru_cache(maxsize=1)
def _compiler() -> str:
    wanted = settings.c_compiler()
    for name in (wanted,) if wanted else ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompilerMissing("the interpreter needs a C compiler and found none", "install gcc, or set TILEWRIGHT_CC")


@lru_cache(maxsize=1024)
def _library(source: str) -> ctypes.CDLL:
    """The compiled source, from the cache folder where it is there and sound; from a temporary one where the cache cannot be written."""
    compiler = _compiler()
    key = hashlib.sha256("\0".join((compiler, *_FLAGS, source)).encode()).hexdigest()[:32]
    folder = settings.cache_directory() / "interpreter"
    path = folder / f"{key}.hashed"
    content = _read(path)
    if content is not None:
        return mapped(content, "interpreter")
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            content = _built(compiler, source, Path(work)).read_bytes()
            (Path(work) / "hashed").write_bytes(hashlib.sha256(content).digest() + content)
            (Path(work) / "hashed").chmod(0o600)
            os.replace(Path(work) / "hashed", path)
        return mapped(content, "interpreter")
    except OSError:  # full or read-only
        pass
    try:
        with tempfile.TemporaryDirectory() as work:
            return mapped(_built(compiler, source, Path(work)).read_bytes(), "interpreter")
    except OSError as error:
        raise CacheError(
            f"neither {folder} nor the temporary folder can be written: {' '.join(str(error).split())}",
            "free some space, or set TILEWRIGHT_CACHE or TMPDIR to a folder that can be written",
        ) from error


def _read(path: Path) -> bytes | None:
    """The shared object in a file that begins with its hash; None where there is none, it is damaged, or another user may have written it."""
    try:
        content = read_private(path, path.parent)
    except OSError:
        return None
    return content[32:] if hashlib.sha256(content[32:]).digest() == content[:32] else None


def _built(compiler: str, source: str, folder: Path) -> Path:
    """The compiled source in a folder. Raises OSError where the disk is at fault, KernelFailed where the source is."""
    (folder / "kernel.c").write_text(source)
    command = [compiler, *_FLAGS, "-o", "kernel.so", "kernel.c", "-lm"]
    try:
        done = run_program(command, settings.compile_seconds(), folder)
    except ProgramHung as error:
        raise KernelFailed(f"the interpreter's code is not compiled: {error}", "check the C compiler, or raise TILEWRIGHT_COMPILE_SECONDS") from error
    if done.status:
        if any(os.strerror(code) in done.errors for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)):
            raise OSError(f"the compiler could not write: {done.errors[-200:]}")
        raise KernelFailed(f"the interpreter's code does not compile: {done.errors[:2000]}", "report this as a defect")
    return folder / "kernel.so"


@lru_cache(maxsize=256)
def _translated(kernel: Kernel) -> tuple[str, tuple[Buffer, ...]]:
    printer = CheckedPrinter(kernel)
    return printer.checked(kernel), tuple(printer.buffers)


def _array_type(dtype: str) -> str:
    """The NumPy type of a parameter's array: of bfloat16 its bits."""
    return "uint16" if dtype == "bf16" else ELEMENT_TYPES[dtype].numpy


def run(kernel: Kernel, arguments: Sequence[np.ndarray], scalars: Sequence[int] = (), initialised: Sequence[str] = ()) -> Report:
    """Runs the kernel on NumPy arrays, one for each parameter (flat order, dtype and size as the parameter; writable ones are written).

    `initialised` names writable parameters whose contents count as written before the call. Raises ValueError for arguments that do not
    fit, CompilerMissing where there is no C compiler.
    """
    if len(arguments) != len(kernel.parameters) or len(scalars) != len(kernel.scalars):
        raise ValueError(
            f"{kernel.name} takes {len(kernel.parameters)} arrays and {len(kernel.scalars)} scalars, got {len(arguments)} and {len(scalars)}"
        )
    flags: list[np.ndarray | None] = []
    for buffer, array in zip(kernel.parameters, arguments, strict=True):
        if array.dtype != np.dtype(_array_type(buffer.dtype)) or array.size < buffer.size or not array.flags.c_contiguous:
            raise ValueError(f"{kernel.name}: {buffer.name} needs {buffer.size} contiguous {buffer.dtype}, got {array.size} {array.dtype}")
        flags.append(np.zeros(max(buffer.size, 1), np.uint8) if buffer.writable and buffer.name != FAULTS else None)
    known = [None if b.name in initialised else f for b, f in zip(kernel.parameters, flags, strict=True)]
    source, buffers = _translated(kernel)
    faults, count = np.zeros((_FAULTS, 8), np.int64), np.zeros(1, np.int64)
    library = _library(source)
    slots = max(len(arguments), 1)
    library.run(
        (ctypes.c_void_p * slots)(*(a.ctypes.data for a in arguments)),
        (ctypes.c_int64 * max(len(scalars), 1))(*scalars),
        (ctypes.c_void_p * slots)(*(None if f is None else f.ctypes.data for f in known)),
        ctypes.c_void_p(faults.ctypes.data),
        ctypes.c_void_p(count.ctypes.data),
    )
    messages = tuple(_message(kernel, buffers, row.tolist()) for row in faults[: count[0]])
    unwritten = {
        b.name: int(b.size - f[: b.size].sum()) for b, f in zip(kernel.parameters, known, strict=True) if f is not None and not f[: b.size].all()
    }
    return Report(messages, MappingProxyType(unwritten))


def _message(kernel: Kernel, buffers: Sequence[Buffer], fault: Sequence[int]) -> str:
    kind, number, offset, lanes, block, thread, other, writes = fault
    who = _who(kernel, block, thread)
    if _KINDS[kind] == "barrier divergence":
        return f"{kernel.name}: barrier divergence: {who} decides for {offset}, thread 0 for {other}, on the way to a barrier"
    buffer = buffers[number]
    deed = "writes" if writes else "reads"
    where = f"{buffer.space} buffer {buffer.name} ({buffer.size} elements) at offset {offset}" + (f", {lanes} lanes" if lanes > 1 else "")
    text = f"{kernel.name}: {_KINDS[kind]}: {who} {deed} {where}"
    if _KINDS[kind] == "race":
        doer = "several threads touch" if other < -1 else f"{_person(kernel)} {other} touches"
        return f"{text}, which {doer} without a barrier between"
    if _KINDS[kind] == "race between blocks":
        doer = "several blocks touch" if other < -1 else f"block {other} touches"
        return f"{text}, which {doer} in the same launch"
    return text


def _person(kernel: Kernel) -> str:
    return "thread" if kernel.is_gpu else "iteration"


def _who(kernel: Kernel, block: int, thread: int) -> str:
    if kernel.launch is None:
        return f"iteration {thread}"
    x, y, _ = kernel.launch.grid
    i, j, _ = kernel.launch.block
    return f"block {(block % x, block // x % y, block // x // y)} thread {(thread % i, thread // i % j, thread // i // j)}"
