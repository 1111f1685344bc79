"""The micro-benchmarks of ``tilewright calibrate``: one C file for a machine's vectors, compiled and loaded as kernels are.

Every function does a known amount of work on each of `threads` threads and writes the seconds that thread t spent on it to ``seconds[PADDING * t]``.
These are seconds of processor time, which do not count the time that other processes had the core, except for parallel regions.

| function | work of a thread |
|---|---|
| ``multiply_adds`` | ``count * multiply_adds(machine)`` independent vector multiply-adds on registers |
| ``dependent_steps`` | ``count * STEPS`` dependent integer operations of one cycle each, beside half as many multiply-adds |
| ``reads`` | reads ``bytes`` bytes from ``first + t * apart`` ``count`` times, after ``before`` times that do not count |
| ``link`` | writes one cycle of pointers from ``first + t * apart`` on, `spacing` bytes apart |
| ``chase`` | follows ``count`` of these pointers from ``first + t * apart`` |
| ``parallel_regions`` | an empty parallel region: the least time of ``count``, fewer if they take more than a millisecond |
"""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.toolchain.binary import SourceFile

STEPS = 64
PADDING = 16
"""Distance of two threads' results, so that no cache line holds two."""
UNROLLED_READS = 8
"""Vectors that `reads` reads in one turn of its loop; `bytes` must be a multiple of that many vectors."""
FUNCTIONS = ("multiply_adds", "dependent_steps", "reads", "link", "chase", "parallel_regions")
OTHER_REGISTERS = 5
"""Vector registers that do not accumulate: four factors, and one to spare."""


def _accumulators(machine: Machine) -> int:
    """Independent chains of multiply-adds: more than a core's latency times its ports, and few enough to stay in registers."""
    return machine.vector_registers - OTHER_REGISTERS


def multiply_adds(machine: Machine) -> int:
    """Vector multiply-adds in one turn of the loop of ``multiply_adds``: every accumulator with every pair of factors."""
    return 4 * _accumulators(machine)


def source(machine: Machine) -> SourceFile:
    """The C file for the machine's widest vectors."""
    count, vector_bytes = _accumulators(machine), machine.vector_bits // 8
    register = "w" if machine.architecture == "aarch64" else "v" if machine.vector_bits == 512 else "x"

    def multiply_add(number: int) -> str:  # an opaque factor: products can be neither shared nor moved out of the loop
        return f"a{number % count} += x{number % 2} * y{number // 2 % 2}; KEEP(x{number % 2});"

    def step(number: int) -> str:
        return f"chain ^= other; KEEP_INTEGER(chain);{f' {multiply_add(number // 2)}' if number % 2 else ''}"

    return SourceFile(
        "micro-benchmarks",
        _TEXT.format(
            vector_bytes=vector_bytes,
            lanes=vector_bytes // 4,
            register=register,
            padding=PADDING,
            accumulators=", ".join(f"a{number} = seeds + {number}" for number in range(count)),
            total=" + ".join(f"a{number}" for number in range(count)),
            multiply_adds="\n        ".join(multiply_add(number) for number in range(multiply_adds(machine))),
            steps="\n        ".join(map(step, range(STEPS))),
            unrolled=UNROLLED_READS,
            reads=" ".join(f"READ(from[{number}]);" for number in range(UNROLLED_READS)),
        ),
        "c",
        FUNCTIONS,
    )


_TEXT = """\
// Micro-benchmarks of one core and of all; tilewright/tuning/micro_benchmarks.py says what each function does.
#include <stdint.h>
#include <time.h>

typedef float vector __attribute__((vector_size({vector_bytes})));
#define KEEP(x) __asm__ volatile("" : "+{register}"(x))
#define KEEP_INTEGER(x) __asm__ volatile("" : "+r"(x))
#define READ(x) __asm__ volatile("" : : "{register}"(x))
#define USE(x) __asm__ volatile("" : : "m"(x) : "memory")
#define ON_EACH_THREAD(before, work) \\
    _Pragma("omp parallel for schedule(static) if(threads > 1)") \\
    for (int64_t t = 0; t < threads; t++) {{ \\
        before; \\
        double start = now(CLOCK_THREAD_CPUTIME_ID); \\
        work; \\
        seconds[{padding} * t] = now(CLOCK_THREAD_CPUTIME_ID) - start; \\
    }}

static double now(clockid_t clock)
{{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}}

static vector started(int64_t thread)
{{
    vector seeds = {{0}};
    for (int lane = 0; lane < {lanes}; lane++) seeds[lane] = 1.0f + 0.01f * lane + 0.001f * thread;
    return seeds;
}}

static void multiply_adds_of_one(int64_t thread, int64_t count)
{{
    vector seeds = started(thread), x0 = seeds * 0.9f, x1 = seeds * 1.1f, y0 = seeds - 2.1f, y1 = 2.0f - seeds;
    vector {accumulators};
    for (int64_t i = 0; i < count; i++) {{
        {multiply_adds}
    }}
    vector total = {total};
    USE(total);
}}

void multiply_adds(int64_t threads, double *seconds, int64_t count)
{{
    ON_EACH_THREAD(, multiply_adds_of_one(t, count))
}}

static void dependent_steps_of_one(int64_t thread, int64_t count)
{{
    vector seeds = started(thread), x0 = seeds * 0.9f, x1 = seeds * 1.1f, y0 = seeds - 2.1f, y1 = 2.0f - seeds;
    vector {accumulators};
    uint64_t chain = (uint64_t)count, other = 0x9e3779b97f4a7c15u;
    KEEP_INTEGER(other);
    for (int64_t i = 0; i < count; i++) {{
        {steps}
    }}
    vector total = {total};
    USE(total);
    USE(chain);
}}

void dependent_steps(int64_t threads, double *seconds, int64_t count)
{{
    ON_EACH_THREAD(, dependent_steps_of_one(t, count))
}}

static void reads_of_one(const char *first, int64_t bytes, int64_t count)
{{
    for (int64_t i = 0; i < count; i++) {{
        const vector *from = (const vector *)first, *end = (const vector *)(first + bytes);
        for (; from != end; from += {unrolled}) {{
            {reads}
        }}
        __asm__ volatile("" : "+r"(first) : : "memory");
    }}
}}

void reads(int64_t threads, double *seconds, const char *first, int64_t apart, int64_t bytes, int64_t before, int64_t count)
{{
    ON_EACH_THREAD(reads_of_one(first + t * apart, bytes, before), reads_of_one(first + t * apart, bytes, count))
}}

// Each window holds `slots` pointers. The next one is a fixed, large step away, modulo the slots, which have no common factor with the step:
// prefetchers follow no step that leaves a page. After the last slot comes the next window, so that few pages are in use at a time.
static void link_one(char *own, int64_t windows, int64_t slots, int64_t spacing, int64_t step)
{{
    void **last = (void **)own;
    for (int64_t i = 0; i < windows * slots; i++) {{
        *last = own + (i / slots * slots + i % slots * step % slots) * spacing;
        last = *last;
    }}
    *last = own;
}}

void link(int64_t threads, double *seconds, char *first, int64_t apart, int64_t windows, int64_t slots, int64_t spacing, int64_t step)
{{
    ON_EACH_THREAD(, link_one(first + t * apart, windows, slots, spacing, step))
}}

static void chase_by_one(void *at, int64_t count)
{{
    for (int64_t i = 0; i < count; i++) at = *(void *volatile *)at;
    USE(at);
}}

void chase(int64_t threads, double *seconds, char *first, int64_t apart, int64_t count)
{{
    ON_EACH_THREAD(, chase_by_one(first + t * apart, count))
}}

void parallel_regions(int64_t threads, double *seconds, int64_t count)
{{
    double first = now(CLOCK_MONOTONIC), start = first;
    seconds[0] = 1;
    for (int64_t i = 0; i < count && start - first < 1e-3; i++) {{  // a thread that waits for a core takes milliseconds
#pragma omp parallel
        __asm__ volatile("");
        double end = now(CLOCK_MONOTONIC);
        if (end - start < seconds[0]) seconds[0] = end - start;
        start = end;
    }}
}}
"""
