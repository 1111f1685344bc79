"""Kernel IR as C with a check on every access: the code that the interpreter compiles and runs.

Blocks run one after another; those of a cluster, and all of a grid with barriers of its own, run in lockstep (a barrier of one of them then counts
for all; accesses of one element by two blocks race unless a barrier of their cluster or grid is between them). A block's body is split at its
barriers: each piece runs for one thread after another, and the state that a thread keeps across a barrier (variables, register buffers) is stored in
arrays over the threads. Loops with barriers inside run in lockstep. So do the lanes of a warp around its instructions, one warp after another: an
instruction collects the operands of all lanes, and its meaning (`ir.intrinsic`) runs in Python, unless it has a text for the interpreter.

In a kernel with barriers in memory, or of warps or warpgroups, not all threads of a block meet at once: each warp, or warpgroup if the kernel has
instructions of warpgroups, is a strand that runs the whole body on its own stack and gives way to others where it waits. Threads of a strand still
run one after another where nothing is done together, so that one of them must not wait there for another. What orders accesses is then known by
clocks (interpreter_runtime.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from math import prod

from tilewright.codegen.c import CPrinter, c_type, perfect_depth
from tilewright.codegen.cuda import shared_offsets, shares_places
from tilewright.codegen.helpers import Helper
from tilewright.codegen.printer import EQUALITY, UNARY, Code
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, index_const
from tilewright.ir.intrinsic import INTERPRETER, LANES, Intrinsic, Operand, moved
from tilewright.ir.kernel import (
    FAULTS,
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Invoke,
    Kernel,
    Launch,
    Let,
    Place,
    Statement,
    Store,
    With,
    statements,
    written_by,
)
from tilewright.ir.tensor_map import TensorMap

_SHADOW_BYTES = 56  # sizeof(tw_shadow)
_CLOCKED = frozenset({"initialise", "signal", "wait", "publish"})
BLOCK, BLOCKS = "block", "blocks"
"""Values of an instruction: the number of the block of the cluster whose barrier it is, and the number of blocks to which the copy engine writes."""
COPY_ALIGNMENT = 128
"""Of what the copy engine writes in shared memory, in bytes."""


class CheckedPrinter(CPrinter):
    """Prints one kernel as C with checks, with the signature
    `void run(void *const *arguments, const int64_t *scalars, uint8_t *const *set, tw_fault *, int64_t *count, tw_meaning)`."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.name = kernel.name
        self.is_gpu = kernel.is_gpu
        # blocks in lockstep
        self.cluster = blocks_together(kernel)
        self.cooperative = kernel.cooperative
        self.block_threads = prod(kernel.launch.block) if kernel.launch else 1
        self.threads = places_of(kernel)
        self.block_places = self.threads // self.cluster
        self.buffers: list[Buffer] = []
        self.arena = 0
        self.setup: list[str] = []
        self.kept: list[list[str]] = []  # for each open region: declarations at the beginning of every thread's piece
        self.parallel = False
        self.places = shared_offsets(kernel)
        self.allocated: list[tuple[str, Buffer]] = []  # shared buffers, by their names in C
        self.stored = {name for s in statements(kernel.body) for name in written_by(s)}
        self.intrinsics: list[Intrinsic] = []  # the instructions that are called, by number
        self.together = self.threads  # number of threads in lockstep, from `first` on
        self.first = "0"
        self.common: list[str] = []  # names of shared buffers in C, one for all blocks that run together
        self.apart: list[str] = []  # of those of which each block has its own
        self.maps = {described.name: described for described in kernel.maps}
        self.barriers = barriers_of(kernel)
        self.strand = strand_of(kernel)
        if self.strand:
            self.together, self.first = self.strand, "first"

    # --- storage ---

    def reserve(self, size: int) -> int:
        """Offset of `size` bytes in the kernel's arena, aligned for every vector."""
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
            self.cleanup.append(f"tw_free_shadows({name});")

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
            self.apart.append(name)
            self.cleanup.append(f"{every} tw_free_shadows(&{name}__all[rank]);")
            self.block_start.append(f"{every} tw_forget(&{name}__all[rank]);")
            self.scopes[0].taken.add(name)
            return
        if shared or buffer.space == "cluster":
            data, flags = self.reserve(size), self.reserve(buffer.size)
            self.setup.append(
                f"tw_buffer {name}__store = {{arena + {data}, {facts}, (uint8_t *)arena + {flags}, tw_shadows({buffer.size}), "
                f"{'TW_CLUSTER' if buffer.space == 'cluster' else 0}, {aligned}, 1}}, *const {name} = &{name}__store;"
            )
            self.cleanup.append(f"tw_free_shadows({name});")
            self.block_start.append(f"tw_forget({name});")
            self.common.append(name)
            self.scopes[0].taken.add(name)
            if not self.in_piece and not self.strand and self.together == self.threads:
                for other in self.sharing(name, buffer):
                    self.line(f"tw_left(s, {other});")
                self.line(f"tw_forget({name});")
            return
        if self.in_piece or not self.is_gpu:
            shadow = "NULL"
            if not self.is_gpu and not self.parallel:  # declared outside any parallel loop, whose iterations would share it
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
        self.line(f"memset(arena + {flags} + {self.first} * {flag_stride}, 0, {flag_stride * self.together});")

    def sharing(self, name: str, buffer: Buffer) -> list[str]:
        """The shared buffers allocated so far, this one included, that have a place in common with it."""

        def ends(entry: Buffer) -> tuple[int, int]:
            size = entry.size * size_of(entry.dtype)
            return self.places[entry.name], self.places[entry.name] + (size // self.cluster if entry.space == "cluster" else size)

        self.allocated.append((name, buffer))
        first, end = ends(buffer)
        return [text for text, other in self.allocated if ends(other)[0] < end and first < ends(other)[1]]

    # --- accesses ---

    def load(self, node: Load) -> Code:
        text, buffer = self.buffer(node.buffer)
        kind = c_type(buffer.dtype) if node.lanes == 1 else f"{self.type_name('u8' if node.dtype == 'bool' else node.dtype, node.lanes)}_u"
        if self.converts(node.buffer, node.dtype) and node.lanes > 1:
            kind = f"{self.type_name(buffer.dtype, node.lanes)}_u"
        code = Code(f"*(const {kind} *)tw_read(s, {text}, {self.text(node.index[0])}, {node.lanes})", UNARY)
        if self.converts(node.buffer, node.dtype):
            return self.converted(buffer.dtype, node.dtype, code, node.lanes)
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
        kind = c_type(buffer.dtype) if value.lanes == 1 else self.type_name(stored, value.lanes)
        pointer = kind if value.lanes == 1 else f"{kind}_u"
        name = self.fresh("value")
        self.line(f"const {kind} {name} = {code.text}; *({pointer} *)tw_write(s, {text}, {self.text(statement.offset)}, {value.lanes}) = {name};")

    def fault(self, site: int) -> str:
        """The address of a fault. FAULTS is no working memory of the kernel: any thread may store there, so the access is not checked."""
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

    # --- instructions ---

    def within(self, root: With) -> None:
        self.block(_without_context(root))

    def width(self, scope: str) -> int:
        """Number of threads that perform an operation of that scope together; at most all threads."""
        if scope == "thread":
            return 1
        if not self.is_gpu:
            raise ValueError(f"{self.name} is a kernel for a CPU, which has no {scope}s")
        if scope in ("block", "cluster", "grid"):
            return self.strand or self.threads
        if self.block_threads % LANES["warp"] or self.block_threads < LANES[scope]:
            raise ValueError(f"{self.name} has blocks of {self.block_threads} threads, which are no whole {scope}s")
        return LANES[scope]

    def until(self) -> str:
        """The end of the threads in lockstep, which are fewer in the last strand if they are no multiple of it."""
        end = f"{self.first} + {self.together}"
        if not self.strand or self.block_threads == self.block_places:
            return end
        begin = f"first / {self.block_places} * {self.block_places} + " if self.cluster > 1 else ""
        return f"tw_least({end}, {begin}{self.block_threads})"

    def needs(self, root: Statement) -> int:
        """How many threads run the statement in lockstep: 1 if it contains no joint operation."""
        return max((self.width(s.intrinsic.scope) for s in statements(root) if isinstance(s, Invoke)), default=1)

    def invoke(self, root: Invoke) -> None:
        """Runs an instruction for one thread or for the threads in lockstep: gathers their operands lane by lane, then hands out the results."""
        intrinsic = root.intrinsic
        lanes = self.width(intrinsic.scope)
        if intrinsic.scope in LANES and self.block_threads % lanes:
            end = f"{self.first} % {self.block_places} + {lanes}"
            self.line(f"if ({end} > {self.block_threads}) {{ tw_report(s, TW_DIVERGENCE, -1, 0, {lanes}, 0, 0); goto done; }}")
        if intrinsic.order == "arrive":
            self.line("s->arrived = 1;")
            return
        if intrinsic.order == "barrier" and self.strand:
            joined, cluster = intrinsic.scope in LANES, int(intrinsic.scope == "cluster")
            self.line(f"tw_join(s, {self.first}, {lanes});" if joined else f"tw_meet_strands(s, {cluster});")
            return
        if intrinsic.order == "barrier":
            self.line("++s->epoch; s->arrived = 0;")
            if intrinsic.scope == "cluster":
                self.line("++s->meetings;")
            if intrinsic.scope == "grid":
                ((_, counter),) = root.places
                (arrivals,) = root.values.values()
                self.prepare(counter.offset, arrivals)
                where = f"{self.buffer(counter.buffer)[0]}, {self.text(counter.offset)}"
                self.line(f"tw_meet(s, {where}, {self.cluster}, {self.text(arrivals)});")
            return
        values = root.values
        if intrinsic.order in ("initialise", "signal", "wait"):
            self.barrier(root, lanes)
            return
        if intrinsic.order == "publish":
            self.line("tw_publish(s);")
            return
        if intrinsic.order in ("commit", "await") and intrinsic.scope == "warpgroup":
            self.line(f"s->thread = {self.first};")
            pending = "".join(f", {self.text(value)}" for value in values.values())
            self.line(f"{'tw_await_products' if pending else 'tw_commit_products'}(s{pending});")
            return
        if intrinsic.order in ("commit", "await") and intrinsic.engine == "stores":
            self.prepare(*values.values())
            pending = "".join(f", {self.text(value)}" for value in values.values())
            self.line(f"{'tw_await_stores' if pending else 'tw_commit_stores'}(s{pending});")
            return
        if intrinsic.order == "commit":
            self.line("++s->groups[s->thread];")
            return
        if intrinsic.order == "await":
            self.line(f"tw_await(s, {self.text(next(iter(values.values())))});")
            return
        if intrinsic.meaning is None:  # a hint has no effect here
            return
        if intrinsic.engine == "copies":
            self.box(root)
            return
        if intrinsic.engine == "stores":
            self.stored_box(root)
            return
        places = self.guarded_places(root)
        given = [(operand, place) for operand, place in places if operand.reads]
        taken = [(operand, place) for operand, place in places if operand.writes]
        arrays = {operand.name: self.fresh(operand.name) for operand in intrinsic.operands}
        for operand in intrinsic.operands:
            self.line(f"{c_type(operand.dtype)} {arrays[operand.name]}[{operand.lanes or lanes}][{operand.size}] = {{{{0}}}};")
        together = [(operand, place) for operand, place in given if intrinsic.engine and operand.storage == "shared"]
        for operand, place in together:
            self.gathered_together(operand, place, arrays[operand.name])
        given = [pair for pair in given if pair not in together]
        lane = self.open_lanes(lanes)
        self.prepare(*values.values(), *(place.offset for _, place in given))
        for name, value in values.items():
            self.line(f"{arrays[name]}[{lane}][0] = {self.text(value)};")
        for operand, place in given:
            self.rows(operand, place, arrays[operand.name], lane, f"{arrays[operand.guard]}[{lane}][0]" if operand.guard else "", intrinsic.engine)
        self.close_lanes(lanes)
        result = arrays[taken[0][0].name]
        if intrinsic.meaning is moved:
            result = arrays[given[0][0].name]
        elif (text := intrinsic.text.get(INTERPRETER)) is not None:
            self.functions[self.need(text.function)] = Helper(text.source)
            self.line(text.line.format(**arrays))
        else:
            if intrinsic not in self.intrinsics:
                self.intrinsics.append(intrinsic)
            self.line(f"tw_call(s, meaning, {self.intrinsics.index(intrinsic)}, (void *[]){{{', '.join(arrays.values())}}});")
        lane = self.open_lanes(lanes)
        self.prepare(*(place.offset for _, place in taken))
        for operand, place in taken:
            self.rows(operand, place, result, lane, engine=intrinsic.engine, writes=True)
        self.close_lanes(lanes)

    def barrier(self, root: Invoke, lanes: int) -> None:
        """An instruction whose operand is a barrier in memory; several lanes agree on their operands."""
        ((_, place),) = root.places
        calls = {"initialise": "tw_initialise", "signal": "tw_signal", "wait": "tw_wait"}
        values = dict(root.values)
        block = values.pop(BLOCK, None)
        value = next(iter(values.values()), index_const(0))
        if lanes > 1:
            parts = [self.uniform(place.offset, "index"), self.uniform(value, "value")]
            self.line(f"s->thread = {self.first};")
        else:
            self.prepare(place.offset, value, *([] if block is None else [block]))
            parts = [self.text(place.offset), self.text(value)]
        last = f", {lanes}" if root.intrinsic.order == "wait" else ""
        barrier, first = self.barrier_of(place.buffer, "rank" if block is None else f"({self.text(block)})")
        self.line(f"{calls[root.intrinsic.order]}(s, {barrier}, {parts[0]}, {first}, {parts[1]}{last});")

    def barrier_of(self, name: str, rank: str) -> tuple[str, str]:
        """The array of barriers of a block of the cluster, and the number of its first barrier."""
        first, _ = self.barriers[name]
        if self.cluster == 1:
            return self.buffer(name)[0], str(first)
        return f"&{self.buffer(name)[0]}__all[{rank}]", f"{first} + {rank} * {number_of(self.barriers)}"

    def box(self, root: Invoke) -> None:
        """A copy of a box of a tensor, by the copy engine."""
        places = {operand.storage: (operand, place) for operand, place in root.places}
        (_, target), (_, barrier) = places["shared"], places["barrier"]
        named = dict(root.values)
        blocks = named.pop(BLOCKS, None)
        described, name, at = self.mapped(places["map"][1].buffer, target, list(named.values()), barrier.offset)
        where = f"{self.text(target.offset)}, {self.buffer(described.buffer)[0]}, &{name}, {at}"
        to, rank = self.buffer(target.buffer)[0], "rank"
        if blocks is not None:
            rank = self.fresh("each")
            self.line(f"for (int64_t {rank} = 0; {rank} < {self.text(blocks)}; ++{rank})")
            to = f"&{to}__all[{rank}]"
        at_barrier, first = self.barrier_of(barrier.buffer, rank)
        self.line(f"tw_copy_box(s, {to}, {where}, {at_barrier}, {self.text(barrier.offset)}, {first});")

    def stored_box(self, root: Invoke) -> None:
        """A store of a box of a tensor, by the copy engine."""
        places = {operand.storage: place for operand, place in root.places}
        source, target = places["shared"], places["global"]
        described, name, at = self.mapped(places["map"].buffer, source, list(root.values.values()))
        if described.buffer != target.buffer:
            raise ValueError(f"{self.name}: {described.name} is a map of {described.buffer}, not of {target.buffer}")
        self.line(f"tw_store_box(s, {self.buffer(source.buffer)[0]}, {self.text(source.offset)}, {self.buffer(target.buffer)[0]}, &{name}, {at});")

    def mapped(self, map_name: str, shared: Place, values: Sequence[Expr], *others: Expr) -> tuple[TensorMap, str, str]:
        """The map of a name, the name of its facts in C, and the coordinates in C, which are computed here with the place of the box in shared memory
        and other expressions."""
        described = self.maps[map_name]
        self.aligned(shared.buffer, max(8 * described.swizzle, COPY_ALIGNMENT))
        self.prepare(shared.offset, *others, *values)

        def numbers(given: Sequence[int]) -> str:
            return f"{{{', '.join(map(str, given))}}}"

        lower, upper = [corner for corner, _ in described.corners], [corner for _, corner in described.corners]
        name = self.fresh("map")
        facts = f"{len(described.extents)}, {size_of(described.dtype)}, {described.swizzle}, {described.offset}, {len(described.corners)}"
        lists = ", ".join(map(numbers, (described.extents, described.strides, described.box, lower or (0,), upper or (0,), described.steps or (0,))))
        self.line(f"static const tw_map {name} = {{{facts}, {lists}}};")
        at = ", ".join(self.text(value) for value in values)
        return described, name, f"(int64_t[{max(len(values), 5)}]){{{at}}}"

    def aligned(self, name: str, least: int) -> None:
        """Raises ValueError if a shared buffer is not aligned so."""
        buffer = self.buffer(name)[1]
        if buffer.alignment % least:
            raise ValueError(f"{self.name}: {name} is aligned to {buffer.alignment} bytes, where an engine needs {least}")

    def gathered_together(self, operand: Operand, place: Place, held: str) -> None:
        """Reads what an engine takes from shared memory on behalf of all lanes, which agree on the place."""
        self.aligned(place.buffer, max(8 * operand.swizzle, 16))
        where = self.uniform(place.offset, "where")
        self.line(f"s->thread = {self.first};")
        shape, strides = (f"(int64_t[]){{{', '.join(map(str, numbers))}}}" for numbers in (operand.shape, operand.strides))
        self.line(f"tw_gather(s, {held}, {self.buffer(place.buffer)[0]}, {where}, {len(operand.shape)}, {shape}, {strides}, {operand.swizzle});")

    def open_lanes(self, lanes: int) -> str:
        """Opens the loop over the lanes of a group; returns the lane's number as text."""
        self.hoisted = {}
        if lanes == 1:
            self.line("{")
        else:
            self.open_threads()
        self.push()
        return f"thread - {self.first}" if lanes > 1 else "0"

    def close_lanes(self, lanes: int) -> None:
        self.pop()
        if lanes == 1:
            self.line("}")
        else:
            self.close_threads()

    def rows(self, operand: Operand, place: Place, held: str, lane: str, guard: str = "", engine: str = "", writes: bool = False) -> None:
        """Copies one lane's operand from its place or to it."""
        text, buffer = self.buffer(place.buffer)
        if size_of(buffer.dtype) != size_of(operand.dtype):
            raise ValueError(f"{operand.name} is {operand.dtype}, not the {buffer.dtype} of {buffer.name}")
        conditions = [f"{lane} < {operand.lanes}"] if operand.lanes else []
        conditions += [guard] if guard else []
        where = self.fresh("where")
        self.line(f"const int64_t {where} = {self.text(place.offset)};")
        if conditions:
            self.line(f"if ({' && '.join(conditions)})")
        row = f"s, {text}, {where} + i * {operand.row_stride}, {operand.row}"
        here = f"{held}[{lane}] + i * {operand.row}"
        size = operand.row * size_of(operand.dtype)
        self.line(f"for (int64_t i = 0; i < {operand.rows}; ++i)")
        if writes:
            write = "tw_write_flying" if engine else "tw_copy" if operand.access == "begin" else "tw_write"
            self.line(f"    memcpy({write}({row}), {here}, {size});")
        else:
            read = "tw_read_flying" if engine else "tw_read_together" if lane != "0" and operand.storage != "fragment" else "tw_read"
            self.line(f"    memcpy({here}, {read}({row}), {size});")

    # --- pieces ---

    in_piece = False

    def region(self, members: Sequence[Statement]) -> None:
        """Prints statements in which the threads in lockstep do something together; pieces between these run for each thread in turn."""
        self.push()
        self.kept.append([])
        self.line("{")
        self.depth += 1
        pending: list[Statement] = []
        for member in members:
            if isinstance(member, With):
                member = _without_context(member)
            width = self.needs(member)
            if isinstance(member, Block) and width > 1:
                self.piece(pending)
                self.region(member.statements)
            elif width > 1:
                self.piece(pending)
                self.groups(member, width)
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
        """Prints the pending statements for each thread, and empties the list."""
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
        self.line(f"for (int64_t thread = {self.first}; thread < {self.until()}; ++thread) {{")
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
        """The name of a variable with a value on which all threads in lockstep agree; disagreement ends the kernel."""
        name = self.fresh(what)
        self.line(f"int64_t {name} = 0;")
        self.open_threads()
        self.push()
        self.prepare(value)
        self.line(f"const int64_t mine = {self.text(value)};")
        self.line(f"if (thread == {self.first}) {name} = mine;")
        self.line(f"else if ({name} != mine) {{ tw_report(s, TW_DIVERGENCE, -1, mine, {self.together}, {name}, 0); goto done; }}")
        self.pop()
        self.close_threads()
        return name

    def groups(self, member: Statement, width: int) -> None:
        """Prints a statement in which `width` threads do something together, for one such group after another."""
        if width == self.together:
            self.synchronised(member)
            return
        outer = self.first, self.together
        first = self.fresh("first")
        self.line(f"for (int64_t {first} = {self.first}; {first} < {self.until()}; {first} += {width}) {{")
        self.first, self.together = first, width
        self.depth += 1
        self.push()
        self.synchronised(member)
        self.pop()
        self.depth -= 1
        self.first, self.together = outer
        self.line("}")

    def synchronised(self, member: Statement) -> None:
        self.hoisted = {}
        if isinstance(member, Invoke):
            self.line("{")
            self.invoke(member)
            self.line("}")
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

    # --- strands ---

    functions_ahead: tuple[str, ...] = ()

    def strands(self, start: int, launch: Launch) -> None:
        """Makes the lines from `start` on, the body, a function for one strand, and runs it for all of them."""
        body, self.lines = self.lines[start:], self.lines[:start]
        names = [name for name in (*self.scopes[0].buffers.values(), *self.common) if name not in self.apart]
        blocks = [self.variable(Var(f"block_{axis}")).text for axis in "xyz"]
        scalars = [name for name in self.scopes[0].variables.values() if name not in blocks and not name.startswith("thread_")]
        ranks = []
        if self.cluster > 1:
            ranks = [f"const int64_t rank = first / {self.block_places}, {blocks[0]} = cluster_first + rank;"]
            ranks += [f"tw_buffer *const {name} = &{name}__all[rank];" for name in self.apart]
            names += [f"{name}__all" for name in self.apart]
            blocks[0] = "cluster_first"
        members = [("tw_state *", "s"), ("char *", "arena"), ("tw_meaning", "meaning"), *(("int64_t", name) for name in (*blocks, *scalars))]
        members += [("tw_buffer *", name) for name in dict.fromkeys(names)]
        self.functions_ahead = (
            "typedef struct {",
            *(f"    {kind} {name};" for kind, name in members),
            "} tw_environment;",
            "",
            "static void strand(const void *given, const int64_t first) {",
            *(f"    {kind} const {name} = ((const tw_environment *)given)->{name};" for kind, name in members),
            *(f"    {line}" for line in ranks),
            *body,
            "    return;",
            "done:",
            "    s->stopped = 1;",
            "}",
            "",
        )
        values = ", ".join(name for _, name in members)
        self.line(f"const tw_environment environment = {{{values}}};")
        self.line("tw_run_strands(s, strand, &environment, meaning);")
        self.line("if (s->stopped) goto done;")

    # --- the whole ---

    def checked(self, kernel: Kernel) -> str:
        """The C source."""
        self.cleanup: list[str] = []
        self.block_start: list[str] = []
        self.restored: list[str] = []
        self.thread_indices: list[str] = []
        self.push()
        # names used by the surrounding C code
        self.scopes[0].taken.update("s set arena thread block mine faults count meaning done state rank cluster_first first given".split())
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
                    self.thread_indices.append(f"const int64_t rank = thread / {self.block_places}, {name} = cluster_first + rank;")
                    self.thread_indices.append("s->rank = rank;")
                    if self.cooperative:
                        self.thread_indices.append("s->block = rank;")
                else:
                    self.line(f"for (int64_t {name} = 0; {name} < {extent}; ++{name})")
            below = 1
            for axis, extent in zip("xyz", launch.block, strict=True):
                name = self.declare(Var(f"thread_{axis}"))
                within = f"thread % {self.block_places}" if self.block_places > self.block_threads else "thread"
                self.thread_indices.append(f"const int64_t {name} = {within} / {below} % {extent};")
                below *= extent
            self.line("{")
            self.line(f"++s->block; ++s->epoch; ++s->meetings; tw_no_copies(s, {self.threads});")
            start = len(self.lines)
            self.region(kernel.body.statements if isinstance(kernel.body, Block) else (kernel.body,))
            if self.strand:
                self.strands(start, launch)
            self.lines[start:start] = self.block_start
            self.line("}")
        else:
            self.line("s->block = 0;")
            self.line("{")
            self.body(kernel.body)
            self.line("}")
        head = [
            *self.functions_ahead,
            "void run(void *const *arguments, const int64_t *scalars, uint8_t *const *set, tw_fault *faults, int64_t *count, tw_meaning meaning) {",
            "    tw_state *const s = calloc(1, sizeof *s);",
            "    s->faults = faults, s->block = -1;",
            f"    char *const arena = aligned_alloc(64, {max(self.arena, 64)});",
            *("    " + text for text in self.setup),
        ]
        if self.strand:
            barriers = number_of(self.barriers) * self.cluster
            head.append(f"    tw_start_clocks(s, {self.threads}, {self.strand}, {barriers}, {self.cluster});")
            self.cleanup.append("tw_end_clocks(s);")
        end = ("    *count = s->count;", "    free(arena);", "    free(s->copies);", "    free(s);", "}")
        tail = ["done:", *("    " + text for text in self.cleanup), *end]
        self.lines = [*head, *self.lines, *tail]
        return _runtime_text() + self.source()


def barriers_of(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """The number of the first barrier, and how many there are, of each shared buffer whose elements are barriers."""
    names = {place.buffer for s in statements(kernel.body) if isinstance(s, Invoke) for operand, place in s.places if operand.storage == "barrier"}
    result: dict[str, tuple[int, int]] = {}
    for statement in statements(kernel.body):
        if isinstance(statement, Allocate) and statement.buffer.name in names:
            result[statement.buffer.name] = (number_of(result), statement.buffer.size)
    return result


def number_of(barriers: Mapping[str, tuple[int, int]]) -> int:
    """How many there are in these arrays (`barriers_of`)."""
    return sum(count for _, count in barriers.values())


def blocks_together(kernel: Kernel) -> int:
    """Blocks that run in lockstep: of a cluster, or all that wait for one another at barriers of the grid."""
    return kernel.launch.grid[0] if kernel.launch and kernel.cooperative else kernel.cluster


def strand_of(kernel: Kernel) -> int:
    """Threads of a strand; 0 if all threads meet at the kernel's barriers."""
    invoked = [s.intrinsic for s in statements(kernel.body) if isinstance(s, Invoke)]
    if not any(one.engine or one.order in _CLOCKED or one.order == "barrier" and one.scope in LANES for one in invoked):
        return 0
    if kernel.cooperative or shares_places(kernel):
        raise ValueError(f"{kernel.name} has barriers in memory and of the grid, or shared buffers in one place: the interpreter has no such model")
    return LANES["warpgroup" if any(intrinsic.scope == "warpgroup" for intrinsic in invoked) else "warp"]


def places_of(kernel: Kernel) -> int:
    """Threads that meet at barriers of a GPU kernel. The last strand of a block may have fewer; the rest are places without a thread."""
    threads = prod(kernel.launch.block) if kernel.launch else 1
    strand = strand_of(kernel) or 1
    return -(-threads // strand) * strand * blocks_together(kernel)


def _without_context(root: With) -> Block:
    """The statements with ordinary buffers in place of the context's."""
    return Block((*map(Allocate, root.buffers), root.body))


@lru_cache(maxsize=1)
def _runtime_text() -> str:
    return (files(__package__) / "interpreter_runtime.h").read_text()
