"""Choosing by compiled code: if the models predict nearly the same time for a CPU contraction's first candidates, the score of their code decides.

The cheap stage, the models over the whole space in NumPy, passes its first candidates to the expensive one (`selection/search.py::rescored`). The
spaces of CPU contractions have at most some ten thousand candidates, so all are ranked and no evolutionary search is needed. Candidates are compiled
through the kernel cache, beside one another, so that the chosen one is not compiled again. Where the learned model (`selection/learned/cpu.py`) was
trained on measurements of this core and these vectors, it decides alone. If code cannot be read (no objdump for the target, data-dependent control
flow), the models decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any

from tilewright import settings
from tilewright.analysis.cpu.assembly import disassembled, disassembler
from tilewright.codegen.describe import prediction
from tilewright.errors import CompilerMissing, KernelFailed, TilewrightError, contained
from tilewright.hardware.machine import Machine
from tilewright.hardware.pipelines import PIPELINES
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.registry import lower_for_images
from tilewright.runtime.kernel_source import kernel_source
from tilewright.selection.code_score import MODELS, code_terms, coefficients_of, linear
from tilewright.selection.learned.cpu import decided
from tilewright.selection.ranking import Choice, Ranking
from tilewright.selection.search import rescored
from tilewright.toolchain import Binary, compile_kernels
from tilewright.toolchain.build import Built
from tilewright.toolchain.compilers import CCompiler, identity_of

FAVOURITES = 2
"""Maximum number of candidates to compile and score. With this and `CLOSE` fewest are compiled, and choices of measured problems are as good as with
more (`bench.code_choices`)."""
CLOSE = 0.01
"""Fraction by which a candidate's predicted time may exceed that of the first to be compiled and scored. In the order of the analytical models alone,
as on ARM, the choices with 0.05 took 0.4 % less time, for a third more candidates to compile."""
MARGIN = 0.05
"""Fraction by which another score must be better to replace the models' first choice."""
MOST_SECONDS = 45.0
"""Maximum time of a compiler call for a candidate, if the user's limit is not shorter: a program that hangs delays the plan once for each region."""
BY_CODE = "the score of its compiled code is better than that of the models' first candidate"
WORTH_SECONDS = 3e-5
"""Predicted time below which a region is left to the models: a better choice would save less than a kernel call costs."""


def reads_code(machine: Machine) -> bool:
    """Whether choosing by code is possible and enabled: for a CPU with a pipeline table and coefficients for its architecture."""
    return settings.read_code() and not machine.is_gpu and machine.pipeline in PIPELINES and (MODELS / f"cpu_{machine.architecture}.json").exists()


def tools(machine: Machine) -> str:
    """The programs that compile and read the code of candidates, with versions; missing programs are named as missing."""
    identities: tuple[Callable[[], str], ...] = (lambda: CCompiler.find(machine).identity, lambda: identity_of(disassembler(machine)))
    found = []
    for identity in identities:
        try:
            found.append(identity())
        except (CompilerMissing, OSError):
            found.append("none")
    return ", ".join(found)


def best(problem: Problem, ranking: Ranking, threads: int, count: int = FAVOURITES) -> tuple[Choice, bool]:
    """The candidate with the best score among those of the ranking's first `count` whose predictions are close. The ranking's first is kept if no
    other is close, if its score is within `MARGIN` of the best, if it has no score, if the region is too short, or if all are of schemas whose
    candidates scores do not order. On cores and vectors with which the learned model was trained, its order is better and decides alone. The second
    result is False if a program did not end in time, so that the choice may not be reproducible.

    Raises:
        Unsuitable: if no candidate is feasible.
    """
    favourite = ranking.first()
    if decided(ranking) or favourite.seconds < WORTH_SECONDS:
        return favourite, True
    close = [choice for choice in islice(ranking, count) if choice.seconds <= (1 + CLOSE) * favourite.seconds]
    if len(close) < 2 or not any(choice.schema.scored for choice in close):
        return favourite, True

    def compiled_ones() -> tuple[Mapping[Any, Sequence[Kernel]], Mapping[str, Built]] | None:
        """The kernels of each close candidate, and their binaries; None if there is nothing to compare."""
        try:
            kernels = {choice.schedule: printed(problem, choice, ranking.machine) for choice in close}
            if len({tuple(kernel.name for kernel in its) for its in kernels.values()}) < 2:  # loops of one iteration have no order
                return None
            return kernels, compiled(kernels, ranking.machine)
        except (Unsuitable, TilewrightError):  # they will be reported where the region is lowered and its kernel compiled
            return None

    made = contained(f"the candidates of region {problem.region.name}", "the models decide", compiled_ones, lambda _: None)
    if made is None:
        return favourite, True
    kernels, built = made
    hung = any(isinstance(result, KernelFailed) and result.hung for result in built.values())

    def score(schedule: Any) -> float:
        nonlocal hung
        try:
            attempt = partial(score_of, kernels[schedule], built, ranking.machine, threads)
            return contained(f"the code of {schedule}", "has no score", attempt, lambda _: inf)
        except TilewrightError as error:
            hung = hung or isinstance(error, KernelFailed) and error.hung
            return inf

    found = rescored(ranking, score, len(close))
    its = next((entry.score for entry in found if entry.choice.schedule == favourite.schedule), None)
    if its is None or found[0].score >= (1 - MARGIN) * its:
        return favourite, not hung
    return replace(found[0].choice, notes=(BY_CODE,)), not hung


def printed(problem: Problem, choice: Choice, machine: Machine) -> list[Kernel]:
    """The distinct kernels of a candidate, with the headers that they have in a plan."""
    lowered = lower_for_images(problem, choice.schedule, machine)
    said = prediction(choice.seconds, choice.terms, len(lowered.kernels))
    return [replace(kernel, header=f"{kernel.header}\n{said}") for kernel in {kernel.name: kernel for kernel in lowered.kernels}.values()]


def compiled(candidates: Mapping[Any, Sequence[Kernel]], machine: Machine) -> dict[str, Built]:
    """The binaries of all candidates' kernels, by name; a kernel that candidates share has the header of the first."""
    kernels: dict[str, Kernel] = {}
    for kernel in chain.from_iterable(candidates.values()):
        kernels.setdefault(kernel.name, kernel)
    sources = [kernel_source(kernel, machine) for kernel in kernels.values()]
    seconds = min(settings.compile_seconds(), MOST_SECONDS)
    return dict(zip(kernels, compile_kernels(sources, machine, seconds=seconds), strict=True))


def score_of(kernels: Sequence[Kernel], built: Mapping[str, Built], machine: Machine, threads: int) -> float:
    """The score of a candidate's kernels (`selection.code_score`). Raises TilewrightError if one did not compile or cannot be read."""
    pairs = []
    for kernel in kernels:
        binary = built[kernel.name]
        if not isinstance(binary, Binary):
            raise binary
        pairs.append((kernel, disassembled(binary.path, machine)))
    return linear(code_terms(pairs, machine, threads), coefficients_of(machine.architecture))
