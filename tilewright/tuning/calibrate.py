"""Measures this host's CPU for ``tilewright calibrate``: compiles the micro-benchmarks, runs them in another process, and derives the facts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilewright import settings
from tilewright.errors import KernelFailed, UnsupportedOption
from tilewright.hardware.machine import Machine
from tilewright.hardware.measured_facts import Calibration, Fact
from tilewright.toolchain import CCompiler, compile_kernels
from tilewright.tuning import serialisation
from tilewright.tuning.micro_benchmarks import source
from tilewright.tuning.workers import Worker, WorkerLost

SECONDS = 1.0
"""Time that the micro-benchmarks share."""
LIMIT_SECONDS = 120.0
"""Time after which the process counts as hanging; most of what it needs is starting PyTorch and touching memory."""
QUANTILE = 0.25
"""Quantile of the repetitions' seconds that counts: others only ever disturb, but the very fastest may be a moment of an unusual clock."""
LEAST = frozenset({"parallel region"})
"""Benchmarks whose least time counts: a clock does not change it by much, and others' threads multiply it by thousands."""
DIGITS = 4
BUSY_SECONDS = 1e-3
"""A parallel region that takes longer has threads that wait for a core."""

Samples = Mapping[str, Sequence[float]]
"""Seconds of one unit of work, for each repetition, by benchmark."""


def calibrate(machine: Machine, threads: int) -> Calibration:
    """Measures the identified machine, which is this host's CPU, with so many threads.

    Raises:
        UnsupportedOption: for more threads than this process has cores.
        CompilerMissing: without a C compiler.
        KernelFailed: if the benchmarks do not compile, their process ends or hangs, or threads hardly ever had cores at the same time.
    """
    cores = settings.available_cores()
    if threads > cores:
        raise UnsupportedOption(f"{threads} threads cannot be measured at once on {cores} cores", f"measure with at most {cores} (--threads)")
    compiler = CCompiler.find(machine)
    binary = compile_kernels([source(machine)], machine)[0]
    if isinstance(binary, KernelFailed):
        raise binary
    worker = Worker(["-m", "tilewright.tuning.calibration_worker"])
    try:
        message = {"binary": str(binary.path), "machine": serialisation.encode(machine), "threads": threads, "seconds": SECONDS}
        answer = worker.ask(message, LIMIT_SECONDS)
    except WorkerLost as error:
        raise KernelFailed(f"the micro-benchmarks were lost: {error}", "try again; nothing was stored") from error
    finally:
        worker.close()
    if "error" in answer:
        raise KernelFailed(f"the micro-benchmarks failed: {answer['error']}", "nothing was stored; without a calibration the catalogue's facts serve")
    facts = facts_of(answer["samples"], machine, threads)
    if facts["parallel region"].value > BUSY_SECONDS:
        raise KernelFailed(f"this machine is too busy to measure {threads} threads at once", "calibrate while it is idle, or with fewer --threads")
    return Calibration(
        identity=machine.identity,
        machine=machine.description,
        threads=threads,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        compiler=compiler.identity.partition(": ")[2],
        openmp=answer["openmp"],
        facts=facts,
    )


def facts_of(samples: Samples, machine: Machine, threads: int) -> dict[str, Fact]:
    """The facts that the samples give, by the names of `measured_facts.assumed_facts`, and two of one core for information.

    A multiply-add port starts one vector a cycle, so that ports are a power of two: the one nearest to multiply-adds over dependent steps, which take
    one cycle each. The clock follows from the rate of multiply-adds on all threads and these ports, so that their product is the rate that was
    measured. Cycles of other facts are cycles of that clock.
    """
    seconds = {name: float(np.quantile(values, 0.0 if name in LEAST else QUANTILE)) for name, values in samples.items()}
    spreads = {name: float(np.subtract(*np.quantile(values, [0.75, 0.25]))) / seconds[name] for name, values in samples.items()}
    ports = 2.0 ** round(float(np.log2(seconds["step"] / seconds["multiply-add"])))
    clock = 1 / seconds["multiply-add"] / ports
    cores = min(threads, machine.processors)

    def fact(benchmark: str, unit: str, value: Callable[[float], float]) -> Fact:
        return Fact(float(f"{value(seconds[benchmark]):.{DIGITS}g}"), unit, float(f"{spreads[benchmark]:.2g}"))

    facts = {
        "clock": fact("multiply-add", "Hz", lambda each: 1 / each / ports),
        "multiply-add ports": fact("multiply-add", "vectors a cycle", lambda _: ports),
        "memory bandwidth": fact("memory byte", "B/s", lambda each: cores / each),
        "memory latency": fact("memory load", "cycles", lambda each: each * clock),
        "parallel region": fact("parallel region", "s", lambda each: each),
        "clock of one core": fact("multiply-add of one core", "Hz", lambda each: 1 / each / ports),
        "memory bandwidth of one core": fact("memory byte of one core", "B/s", lambda each: 1 / each),
    }
    for cache in machine.caches:
        facts[f"level {cache.level} bandwidth"] = fact(f"level {cache.level} byte", "B a cycle", lambda each: 1 / each / clock)
        facts[f"level {cache.level} latency"] = fact(f"level {cache.level} load", "cycles", lambda each: each * clock)
    return facts
