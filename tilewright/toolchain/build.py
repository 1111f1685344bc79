"""Compiles many source files at once: cached ones at no cost, the others on all cores. Failures are values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

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


def compile_kernels(
    sources: Sequence[SourceFile],
    machine: Machine,
    cache: KernelCache | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    seconds: float | None = None,
) -> list[Built]:
    """Compiles the sources; returns their binaries in the same order.

    Cached kernels start neither a compiler nor a thread. The others are compiled on ``workers`` threads (default: the available cores): a C compiler
    is a process of its own, and NVRTC releases the interpreter's lock. Sources with the same key are compiled once. A compiler call that takes longer
    than ``seconds`` (default: the user's setting) is a failure of its kernel. ``progress`` is called with the number done and the total, from the
    calling thread.

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
    groups = sorted(pending.values(), key=lambda indices: len(sources[indices[0]].text), reverse=True)
    for language in {sources[indices[0]].language for indices in groups}:
        compilers[language].require()
    count = min(len(groups), workers or settings.available_cores())
    if count <= 1:
        for indices in groups:
            take(indices, build(indices[0]))
    else:
        pool = ThreadPoolExecutor(count, thread_name_prefix="tilewright-build")
        try:
            futures = {pool.submit(build, indices[0]): indices for indices in groups}
            for future in _as_completed(futures):
                take(futures[future], future.result())
        except BaseException:  # including interruptions: do not wait for compilations in progress
            for compiler in compilers.values():
                compiler.stop()
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
