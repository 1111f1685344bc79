"""``DynamicExecutable``: a compiled model whose sizes may differ from call to call. Each set of sizes has a program of its own.

A call with sizes that have no program requests one, which a thread makes. Until it is there, such calls run eager, unless it is expected within the
time that a call may wait. While a sequence that grows nears the end of the range that its program serves, the next one is made.

Where sizes share kernels, the first program of new sizes has the schedules of others, whose kernels exist; that takes a fraction of the time. When no
new sizes came for a while, the program that is predicted best for these sizes takes its place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tilewright.errors import ExecutableClosed, InvalidInput, UnsupportedOperator, UnsupportedOption, warn_not_compiled
from tilewright.frontend.imported import report_unsupported, unsupported
from tilewright.frontend.ranged import Ranges
from tilewright.frontend.sized import Key, SizedModel
from tilewright.graph.ranges import Frame
from tilewright.runtime.builds import Build, Builds
from tilewright.runtime.executable import Executable, check_threads
from tilewright.runtime.plan import Plan
from tilewright.runtime.profile import Profile
from tilewright.runtime.signature import Signature
from tilewright.runtime.verify import Verification
from tilewright.stages import Progress

T = TypeVar("T")

MOST_PROGRAMS = 32
"""Programs that are kept. Each has working memory of its own; weights are shared."""
WAIT_SECONDS = 1.0
"""How long a call with new sizes waits for its program."""
REST_SECONDS = 5.0
"""How long no new sizes must have come before better programs are made, which compete with them for the processor."""


Built = tuple[Executable, Frame | None]
Served = tuple[Key, bool]
"""The sizes that a program is made for, and whether it serves smaller ones too."""


class _Program:
    """The executable for one set of sizes, with the number of calls that use it now; one that was evicted is closed after the last of them. `frame`:
    how it is called with smaller sizes. `as_before`: whether it has the schedules of other sizes. `unsupported`: its nodes that our kernels do not
    compute, until these were listed."""

    def __init__(self, executable: Executable, frame: Frame | None, as_before: bool) -> None:
        self.executable = executable
        self.frame = frame
        self.as_before = as_before
        self.unsupported = unsupported(executable.image.program.graph)
        self.users = 0
        self.evicted = False


class DynamicExecutable:
    """A model compiled for one machine, whose sizes may differ from call to call. Threads may call it at the same time.

    Raises, when called:
        InvalidInput: for sizes that the model does not allow, and as an Executable does.
        ExecutableClosed: after `close`.
        UnsupportedOperator: for sizes whose program would run operators through PyTorch, if these are an error.
        TilewrightError: as `compile`, for sizes that could not be compiled, if the model cannot run eager.
    """

    def __init__(
        self,
        model: SizedModel,
        ranges: Ranges | None,
        build: Callable[[Served, bool, Progress | None], Built],
        signature: Signature,
        first: tuple[Served, Built, bool],
        eager: torch.nn.Module | None = None,
        wait: float | bool = WAIT_SECONDS,
        programs: int = MOST_PROGRAMS,
        repeats: bool = False,
    ) -> None:
        """`build` compiles the program for checked sizes, and `first` is one of these programs; both say whether it has the schedules of other sizes,
        and `repeats` whether this is to be done. `ranges` rounds sizes up to those of programs that serve several. `signature`: how the model is
        called. `eager` is the module that was compiled; without it calls wait. `wait`: seconds that a call waits before it runs eager; True: as long
        as it takes. `programs`: the most that are kept."""
        self.wait = wait
        self.most_programs = programs
        self._model = model
        self._ranges = ranges
        self._eager = eager
        self._signature = signature
        served, built, as_before = first
        self._first, _ = built
        self._listed = {node.identity for node in unsupported(self._first.image.program.graph)}
        self._lock = threading.RLock()
        self._programs: OrderedDict[Served, _Program] = OrderedDict()
        self._failed: dict[Served, Exception] = {}
        self._told: set[Served] = set()
        self._before: Key | None = None
        self._ahead: set[Served] = set()
        self._closed = False
        self._threads: int | None = None
        self._check = self._first.check
        self._ran_eager = False
        self._build = build
        self._repeats = repeats
        self._builds: Builds[Served, _Program] = Builds(self._make, programs)
        self._better: Builds[Served, _Program | None] = Builds(self._make_better, programs, REST_SECONDS)
        # buffers of the module that calls change are the same for all sizes
        self._writing: AbstractContextManager[Any] = threading.RLock() if signature.states else nullcontext()
        self._keep(served, built, as_before)

    def _make(self, served: Served) -> _Program:
        return self._keep(served, self._build(served, self._repeats, None), self._repeats)

    def _make_better(self, served: Served) -> _Program | None:
        """The program that is predicted best for these sizes, in the place of the one with the schedules of others, if that is still there."""
        with self._lock:
            if served not in self._programs or not self._programs[served].as_before:
                return None
        return self._keep(served, self._build(served, False, self._better.check))

    # Calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._signature.leaves(args, kwargs)
        key = self._model.key(leaves)
        served = self._served(key)
        program = self._taken(served)
        if program is None:
            program = self._new(served, leaves)
        if program is None:
            return self._eagerly(served, args, kwargs)
        try:
            if program.frame is not None:
                self._look_ahead(key)
            with self._writing:
                return program.executable(*args, **kwargs) if program.frame is None else self._framed(program, program.frame, key, leaves)
        except InvalidInput:
            self._model.check(leaves)  # knows which sizes are free
            raise
        finally:
            self._release(program)

    def _eagerly(self, served: Served, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the module itself returns. Sizes that it does not allow either are an error of the input, which says so."""
        assert self._eager is not None
        error = self._failed.get(served)
        try:
            with self._writing, torch.no_grad():
                result = self._eager(*args, **kwargs)
        except Exception as refusal:
            if isinstance(error, InvalidInput):
                raise error from refusal
            raise
        if error is not None and served not in self._told:
            self._told.add(served)
            warn_not_compiled(f"calls with {self._described(served)} run eagerly, because they cannot be compiled: {error}")
        return result

    def _served(self, key: Key) -> Served:
        """What the program for these sizes is made for."""
        rounded = self._ranges.rounded(key) if self._ranges is not None else None
        return (key, False) if rounded is None else (rounded, True)

    def _look_ahead(self, key: Key) -> None:
        """Requests the next range's program, once, where a sequence that grows comes near it, so that no call waits for it or runs eager."""
        assert self._ranges is not None
        before, self._before = self._before, key
        following = self._ranges.following(key)
        if following is None or before is None or not self._ranges.grows(before, key) or self.most_programs < 2:
            return
        served = (following, True)
        with self._lock:
            if served in self._programs or served in self._failed or served in self._ahead:
                return
            self._ahead.add(served)
        self._builds.request(served)

    def _framed(self, program: _Program, frame: Frame, key: Key, leaves: Sequence[Any]) -> Any:
        count = self._count(key)
        result = program.executable(*self._padded(frame, count, leaves))
        outputs, tree = pytree.tree_flatten(result)
        return pytree.tree_unflatten(frame.cut(outputs, count), tree)

    def _padded(self, frame: Frame, count: int, leaves: Sequence[Any]) -> list[Any]:
        if not frame.fits(leaves, count):
            self._model.check(leaves)
        return frame.padded(leaves, count)

    def _count(self, key: Key) -> int:
        assert self._ranges is not None
        return key[self._ranges.position]

    def _taken(self, key: Served) -> _Program | None:
        """The program of these sizes, in use until it is released."""
        with self._lock:
            if self._closed:
                raise ExecutableClosed("this executable is closed", "compile it again")
            program = self._programs.get(key)
            if program is not None:
                self._list_unsupported(program)
                self._programs.move_to_end(key)
                program.users += 1
            return program

    def _list_unsupported(self, program: _Program) -> None:
        """Warns of the nodes of a program that run through PyTorch, and did not in any program used before. The call does so that uses the program:
        warnings of the thread that made it would not name the user's line."""
        if program.unsupported:
            new = [node for node in program.unsupported if node.identity not in self._listed]
            self._listed.update(node.identity for node in new)
            program.unsupported = ()
            report_unsupported(new, "warn")

    def _release(self, program: _Program) -> None:
        with self._lock:
            program.users -= 1
            idle = program.evicted and not program.users
        if idle:
            program.executable.close()

    def _new(self, key: Served, leaves: Sequence[Any]) -> _Program | None:
        """The program of sizes that had none, in use; None if the call is to run eager meanwhile."""
        self._model.check(leaves)
        eager = self._eager is not None and all(map(_is_plain, leaves)) and getattr(forward_ad, "_current_level", -1) < 0
        if eager and self._eager is not None and self._first.is_stale(self._eager):
            eager = False  # it would compute with other parameters
        if key in self._failed:
            if not eager or isinstance(self._failed[key], UnsupportedOperator):
                raise self._failed[key]
            return None
        while True:
            build = self._builds.request(key)
            patient = not eager or self.wait is True
            if patient or self._builds.seconds <= self.wait:
                build.done.wait(None if patient else float(self.wait))
            if build.error is not None and self._gave_way(key):
                return self._new(self._served(self._model.key(leaves)), leaves)
            if build.error is not None:
                self._fail(key, build.error, eager)
                return None
            program = self._taken(key)
            if program is not None:
                return program
            if not patient:
                self._warn_eager(key)
                return None

    def _warn_eager(self, key: Served) -> None:
        """Warns once that calls run eager while programs are made: such calls are all alike."""
        with self._lock:
            known, self._ran_eager = self._ran_eager, True
        if not known:
            warn_not_compiled(
                f"calls with {self._described(key)} run eagerly until their program is ready, which is made in the background, and so may calls with "
                'other new sizes; use wait=True (in torch.compile options={"wait": True}) to have them wait'
            )

    def _gave_way(self, served: Served) -> bool:
        """Whether sizes whose common program could not be built have programs of their own from now on: a table may hold fewer than the largest."""
        key, several = served
        if several and self._ranges is not None:
            self._ranges.refuse(key)
        return several

    def _fail(self, key: Served, error: Exception, eager: bool) -> None:
        self._failed[key] = error
        if not eager or isinstance(error, UnsupportedOperator):
            raise error

    def _keep(self, key: Served, built: Built, as_before: bool = False) -> _Program:
        """Adds a program, in the place of that for the same sizes; otherwise those used longest ago give way to it. One with the schedules of other
        sizes gives way to a better one later."""
        program = _Program(*built, as_before)
        idle = []
        with self._lock:
            program.executable.check = self._check
            if self._threads is not None:
                program.executable.threads = self._threads
            other = self._programs.get(key)
            if self._closed:
                idle.append(program)
            elif other is not None:
                self._programs[key] = program
                other.evicted = True
                idle += [] if other.users else [other]
            else:
                used = next(reversed(self._programs), None)
                self._programs[key] = program
                if key in self._ahead and used is not None:  # not used yet
                    self._ahead.remove(key)
                    self._programs.move_to_end(used)
                while len(self._programs) > self.most_programs:
                    old = self._programs.popitem(last=False)[1]
                    old.evicted = True
                    idle += [] if old.users else [old]
        for old in idle:
            old.executable.close()
        if as_before:
            self._better.request(key)
        return program

    # Everything else

    @property
    def signature(self) -> Signature:
        """How it is called; the shapes are those of the example inputs."""
        return self._signature

    @property
    def sizes(self) -> tuple[dict[str, int | range], ...]:
        """The sizes that have a program, those used last at the end. A program that serves a range was made for the last size of it."""
        with self._lock:
            return tuple(self._sizes_of(served) for served in self._programs)

    def _sizes_of(self, served: Served) -> dict[str, int | range]:
        key, rounded = served
        sizes: dict[str, int | range] = dict(self._model.sizes(key))
        if rounded and self._ranges is not None:
            name, last = self._model.names[self._ranges.position], self._count(key)
            sizes[name] = range(self._ranges.first(last), last + 1)
        return sizes

    def program(self, *args: Any, **kwargs: Any) -> Executable:
        """An executable of its own for the sizes of these inputs, which shares weights and kernels with this one; compiled now if need be.

        Raises:
            InvalidInput, TilewrightError: as a call.
        """
        leaves = self._signature.leaves(args, kwargs)
        served = (self._model.key(leaves), False)
        program = self._made(served, leaves)
        if program.as_before:
            self._release(program)
            self._keep(served, self._build(served, False, None))
            program = self._made(served, leaves)
        try:
            return program.executable.clone()
        finally:
            self._release(program)

    def _made(self, served: Served, leaves: Sequence[Any]) -> _Program:
        """A program in use, made now if need be."""
        program = self._taken(served)
        while program is None:
            self._model.check(leaves)
            build: Build[_Program] = self._builds.request(served)
            build.done.wait()
            if build.error is not None and self._gave_way(served):
                return self._made(self._served(self._model.key(leaves)), leaves)
            if build.error is not None:
                raise build.error
            program = self._taken(served)
        return program

    @property
    def plan(self) -> Plan:
        """The plan of the program used last."""
        with self._lock:
            return self._kept()[-1].executable.plan

    @property
    def compile_seconds(self) -> Mapping[str, float]:
        """As `Executable.compile_seconds`, of the first program; those of another one are `program(*inputs).compile_seconds`."""
        return self._first.compile_seconds

    @property
    def threads(self) -> int:
        """OpenMP threads of the CPU kernels of all programs, also of those that are made later."""
        with self._lock:
            return self._kept()[-1].executable.threads

    @threads.setter
    def threads(self, count: int) -> None:
        check_threads(count)
        with self._lock:
            for program in self._kept():
                program.executable.threads = count
            self._threads = count

    @property
    def check(self) -> bool:
        """Whether calls on a GPU wait for their results and raise IndexOutOfRange themselves, in all programs."""
        return self._check

    @check.setter
    def check(self, check: bool) -> None:
        with self._lock:
            self._check = check
            for program in self._programs.values():
                program.executable.check = check

    def _kept(self) -> list[_Program]:
        """All programs, the one used last at the end."""
        with self._lock:
            if self._closed:
                raise ExecutableClosed("this executable is closed", "compile it again")
            return list(self._programs.values())

    def synchronize(self) -> None:
        """As `Executable.synchronize`, for all programs. Without it an index out of range is raised by the next call that uses the same program."""
        with self._lock:
            programs = self._kept()
            for program in programs:
                program.users += 1
        try:
            for program in programs:
                program.executable.synchronize()
        finally:
            for program in programs:
                self._release(program)

    def verify(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> Verification:
        """As `Executable.verify`, for the program that a call with these inputs uses."""
        return self._examined(partial(Executable.verify, tolerance=tolerance), args, kwargs)

    def profile(self, *args: Any, repetitions: int = 30, **kwargs: Any) -> Profile:
        """As `Executable.profile`, for the program that a call with these inputs uses; padding inputs and cutting results are not measured."""
        return self._examined(partial(Executable.profile, repetitions=repetitions), args, kwargs)

    def _examined(self, examine: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """The result of a method of the program that a call with these inputs uses."""
        leaves = self._signature.leaves(args, kwargs)
        key = self._model.key(leaves)
        program = self._made(self._served(key), leaves)
        try:
            with self._writing:
                if program.frame is None:
                    return examine(program.executable, *args, **kwargs)
                return examine(program.executable, *self._padded(program.frame, self._count(key), leaves))
        finally:
            self._release(program)

    def is_stale(self, module: torch.nn.Module) -> bool:
        """As `Executable.is_stale`: programs for new sizes have the parameters of the first one."""
        return self._first.is_stale(module)

    def save(self, path: Any) -> str:
        """An artifact holds the program of one set of sizes: raises UnsupportedOption."""
        raise UnsupportedOption("an executable for several sizes cannot be saved", "save the program of one: executable.program(*inputs).save(path)")

    def clone(self) -> NoReturn:
        """Programs are made for all callers, with the module's own buffers: raises UnsupportedOption."""
        raise UnsupportedOption(
            "an executable for several sizes cannot be cloned: threads may call it at the same time",
            "where calls with the same sizes are to overlap, take clones of one program: executable.program(*inputs)",
        )

    __copy__ = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.clone()

    def __reduce__(self) -> str:
        raise UnsupportedOption("an executable cannot be pickled", "compile the model in the other process")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"programs for {len(self._programs)} sizes of {', '.join(self._model.names)}"
        return f"<DynamicExecutable: {state}>"

    def close(self) -> None:
        """Releases working memory and kernels once no call uses them; later calls raise. Closing twice is harmless."""
        self._builds.close()
        self._better.close()
        with self._lock:
            self._closed = True
            programs = list(self._programs.values())
            self._programs.clear()
            for program in programs:
                program.evicted = True
            idle = [program for program in programs if not program.users]
        for program in idle:
            program.executable.close()

    def __enter__(self) -> DynamicExecutable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _described(self, served: Served) -> str:
        numbers = ((name, f"{size[0]} to {size[-1]}" if isinstance(size, range) else size) for name, size in self._sizes_of(served).items())
        return ", ".join(f"{name} = {number}" for name, number in numbers)


def _is_plain(value: Any) -> bool:
    """Whether an input may be passed to PyTorch although an executable has not examined it."""
    if not isinstance(value, torch.Tensor):
        return True
    kind = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return kind and not (torch.is_grad_enabled() and value.requires_grad)
