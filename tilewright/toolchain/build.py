"""Compiles many source files at once: cached ones at no cost, the others on all cores, some before all are known. Failures are values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType

from tilewright import settings
from tilewright.errors import KernelFailed
from tilewright.hardware import Machine
from tilewright.toolchain.binary import Binary, SourceFile
from tilewright.toolchain.cache import KernelCache, kernel_key
from tilewright.toolchain.compilers import Compiler, compiler_for

POLL_SECONDS = 0.2
Built = Binary | KernelFailed


def default_cache() -> KernelCache:
    """The user's kernel cache."""
    return KernelCache(settings.cache_directory() / "kernels")


class Early:
    """Compiles source files of one machine on threads, while it is not yet known which others there are. `compile_kernels` takes what has begun; what
    is still compiled when the block ends by an exception is ended."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._cache = default_cache()
        self._pool = ThreadPoolExecutor(settings.available_cores(), thread_name_prefix="tilewright-early")
        self._compilers: dict[str, Compiler] = {}
        self._futures: dict[str, Future[Built]] = {}

    def begin(self, source: SourceFile) -> None:
        """Compiles the file, unless it is in the cache or has begun. Raises CompilerMissing."""
        if source.language not in self._compilers:
            self._compilers[source.language] = compiler_for(self._machine, source.language)
        compiler = self._compilers[source.language]
        key = kernel_key(source, compiler)
        if key not in self._futures and not self._cache.folder(key).exists():
            compiler.require()
            self._futures[key] = self._pool.submit(self._cache.get_or_build, source, compiler, self._machine)

    def begun(self, key: str) -> Future[Built] | None:
        """The compilation of a kernel that has begun; others do not begin any more."""
        future = self._futures.get(key)
        return None if future is None or future.cancel() else future

    def stop(self) -> None:
        """Ends compilations in progress."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for compiler in self._compilers.values():
            compiler.stop()

    def __enter__(self) -> Early:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self._pool.shutdown(wait=kind is not None, cancel_futures=True)


def compile_kernels(
    sources: Sequence[SourceFile],
    machine: Machine,
    cache: KernelCache | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    seconds: float | None = None,
    early: Early | None = None,
) -> list[Built]:
    """Compiles the sources; returns their binaries in the same order.

    Cached kernels start neither a compiler nor a thread. The others are compiled on ``workers`` threads (default: the available cores): a C compiler
    is a process of its own, and NVRTC releases the interpreter's lock. Sources with the same key are compiled once. A compiler call that takes longer
    than ``seconds`` (default: the user's setting) is a failure of its kernel. What ``early`` compiles already is waited for. ``progress``
    is called with the number done and the total, from the calling thread.

    Raises:
        CompilerMissing: if a compiler is missing; raised before anything is compiled.
        CacheError: if neither the cache nor the temporary folder can be written.
    """
    cache = cache or default_cache()
    compilers: dict[str, Compiler] = {}
    for source in sources:
        if source.language not in compilers:
            compiler = compiler_for(machine, source.language)
            compilers[source.language] = compiler if seconds is None else replace(compiler, seconds=seconds)
    results: list[Binary | KernelFailed | None] = []
    pending: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        key = kernel_key(source, compilers[source.language])
        found = cache.load(key, source, compilers[source.language]) if key not in pending else None
        results.append(found)
        if found is None:
            pending.setdefault(key, []).append(index)
    done = sum(result is not None for result in results)
    if progress is not None and done:
        progress(done, len(sources))

    def build(index: int) -> Built:
        source = sources[index]
        return cache.get_or_build(source, compilers[source.language], machine)

    def take(indices: list[int], result: Built) -> None:
        nonlocal done
        for index in indices:
            same = index == indices[0] or isinstance(result, KernelFailed)
            results[index] = result if same else build(index)  # a cache hit, with this source's own entries
            done += 1
        if progress is not None:
            progress(done, len(sources))

    # the longest first, so that at the end no thread waits long for another
    begun = {key: future for key in pending if early is not None and (future := early.begun(key)) is not None}
    groups = [indices for key, indices in pending.items() if key not in begun]
    groups.sort(key=lambda indices: len(sources[indices[0]].text), reverse=True)
    for language in {sources[indices[0]].language for indices in groups}:
        compilers[language].require()
    count = min(len(groups), workers or settings.available_cores())
    if count <= 1 and not begun:
        for indices in groups:
            take(indices, build(indices[0]))
    else:
        pool = ThreadPoolExecutor(max(count, 1), thread_name_prefix="tilewright-build")
        try:
            futures = {future: pending[key] for key, future in begun.items()}
            futures |= {pool.submit(build, indices[0]): indices for indices in groups}
            for future in _as_completed(futures):
                take(futures[future], future.result())
        except BaseException:  # including interruptions: do not wait for compilations in progress
            for compiler in compilers.values():
                compiler.stop()
            if early is not None:
                early.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [result for result in results if result is not None]


def _as_completed(futures: Iterable[Future[Built]]) -> Iterator[Future[Built]]:
    """As `concurrent.futures.as_completed`, for the main thread: a signal that another thread receives does not end a wait of the main thread, which
    handles it, so no wait is long."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
        yield from done
