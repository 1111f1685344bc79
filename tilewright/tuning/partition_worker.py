"""A child process that checks and times whole programs in turns: `python -m tilewright.tuning.partition_worker --device N [--threads T]`.

Requests (see `tilewright.tuning.workers`), in this order; programs are artifacts:

    {"do": "start", "machine": plain form}            -> {"gpu", "driver", "torch"}
    {"do": "load", "path", "seed", "tf32"}            -> {"relative_error"} or {"error"}: loads one more program and compares its results with float64
    {"do": "time", "rounds"}                          -> {"times": [those of each program that was right: seconds of a call, one for each round],
                                                          "wrong": [for each of them why its results are wrong after that, or ""]}

All programs compute the same graph on the same random inputs; the first one's graph is evaluated in float64. A value that regions compute one after
another has the rounding errors of all of them, whose sum grows with the square root of their number if they are independent (Higham and Mary, "A New
Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019). So the first program may have the error that one value may have,
times the square root of the regions on its longest path; what it reaches is what rounding does to this network, and the others, which round other
values, may have a few times as much (`SPREAD`), and always what one value may have. In each round every program is called
several times; the round's time is the median. On a CPU one call before brings the program's weights into the caches, as far as these hold them; on a
GPU level 2 is filled with other data before each call, so that weights and inputs come from memory. An error that leaves the GPU's context unusable
ends the process.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
from collections.abc import Mapping, Sequence

import torch

from tilewright.errors import TilewrightError
from tilewright.hardware.host import read_cpu_identity
from tilewright.hardware.machine import Machine
from tilewright.runtime.artifact import load
from tilewright.runtime.driver import system_driver
from tilewright.runtime.examination import WholeCalls
from tilewright.runtime.executable import Executable
from tilewright.runtime.loadable import LoadableProgram
from tilewright.runtime.verify import AS_TF32, TOLERANCES, VerifiedValue, compare, narrow_tolerance, reference_values, stored_types
from tilewright.tuning import serialisation
from tilewright.tuning.trial_worker import CACHE_SIZES, drawn
from tilewright.tuning.workers import Fatal, Message, serve

ROUND_SECONDS, MOST_CALLS = 0.02, 50
"""Target time of a program's calls in a round, and their maximum."""
SPREAD = 4
"""Times the error of the first program that another one may have: errors that have 16 times as many roundings are so much larger."""


class Server:
    """State of the process: the reference results, the relative errors of the first program that was right, and the programs that were, each with
    what draws its inputs and its calls in a round."""

    def __init__(self, device: int, threads: int) -> None:
        self.index, self.threads, self.device = device, threads, torch.device("cpu")
        self.expected: Mapping[str, torch.Tensor] = {}
        self.reached: Mapping[str, float] = {}
        self.programs: list[tuple[Executable, Message]] = []
        self.other = torch.zeros(0)

    def __call__(self, message: Message) -> Message:
        try:
            return {"start": self.start, "load": self.load, "time": self.time}[message["do"]](message)
        except (RuntimeError, TilewrightError) as error:
            if self.device.type == "cuda":
                _recover(self.device, error)
            raise

    def start(self, message: Message) -> Message:
        machine: Machine = serialisation.decode(message["machine"])
        if machine.is_gpu:
            self.device = torch.device("cuda", self.index)
            torch.cuda.set_device(self.device)
            self.other = torch.zeros(CACHE_SIZES * torch.cuda.get_device_properties(self.device).L2_cache_size // 4, device=self.device)
            gpu, driver = torch.cuda.get_device_name(self.device), "{}.{}".format(*system_driver().version)
        else:
            torch.set_num_threads(self.threads)
            name = read_cpu_identity().properties.get("model name", platform.machine())
            gpu, driver = f"{name}, {self.threads} threads", platform.release()
        return {"gpu": gpu, "driver": driver, "torch": torch.__version__}

    def load(self, message: Message) -> Message:
        executable = load(message["path"])
        if not executable.image.machine.is_gpu:
            executable.threads = self.threads
        if not self.expected:
            graph = executable.image.program.graph
            self.expected = reference_values(graph, self.inputs(executable, message["seed"]), frozenset(graph.outputs))
        found = self.checked(executable, message)
        wrong = _first_wrong(found)
        if wrong is not None:
            return {"error": _wrong("wrong result", wrong), "wrong": True}
        if not self.programs:
            self.reached = {value.value: value.relative_error for value in found}
        self.programs.append((executable, message))
        return {"relative_error": max((value.relative_error for value in found), default=0.0)}

    def time(self, message: Message) -> Message:
        calls = [WholeCalls(executable, self.inputs(executable, loaded["seed"])) for executable, loaded in self.programs]
        counts = [max(1, min(MOST_CALLS, math.ceil(ROUND_SECONDS / max(min(call.seconds(2)), 1e-6)))) for call in calls]
        times: list[list[float]] = [[] for _ in calls]
        for number in range(message["rounds"]):
            for place in range(len(calls)):
                which = (place + number) % len(calls)
                calls[which].seconds(1)
                times[which].append(statistics.median(calls[which].seconds(counts[which], self.displace)))
        after = [_first_wrong(self.checked(executable, loaded)) for executable, loaded in self.programs]
        return {"times": times, "wrong": ["" if wrong is None else _wrong("wrong result when repeated", wrong) for wrong in after]}

    def displace(self) -> None:
        """Fills the GPU's level 2 with other data; does nothing on a CPU."""
        if self.device.type == "cuda":
            self.other.sum()

    def inputs(self, executable: Executable, seed: int) -> list[torch.Tensor]:
        """The graph's inputs: random, but for the module's buffers, which are as they were stored."""
        graph = executable.image.program.graph
        generator = torch.Generator(self.device).manual_seed(seed)
        states = {state.input: tensor for state, tensor in zip(executable.signature.states, executable._states, strict=True)}
        return [states[name].clone() if name in states else drawn(graph.values[name], generator, self.device) for name in graph.inputs]

    def checked(self, executable: Executable, message: Message) -> list[VerifiedValue]:
        """A call's results with their relative errors and tolerances."""
        program = executable.image.program
        types = stored_types(program.storage.values()) | ({AS_TF32} if message["tf32"] else set())
        several = math.sqrt(longest_path(program))
        results = WholeCalls(executable, self.inputs(executable, message["seed"])).results()
        found = []
        for name, got in results.items():
            value = program.graph.values[name]
            one = narrow_tolerance(types) or TOLERANCES.get(value.dtype, 0.0)
            tolerance = max(one, SPREAD * self.reached[name]) if self.reached else several * one
            found.append(compare("", 0, value, got, self.expected[name], tolerance))
        return found


def _recover(device: torch.device, error: BaseException) -> None:
    """Raises Fatal if an error has left the GPU's context unusable. Otherwise returns the memory that what failed has left."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as fault:
        raise Fatal(f"{(str(error).strip() or 'no message').splitlines()[0]} ({str(fault).splitlines()[0]})") from error


def longest_path(program: LoadableProgram) -> int:
    """The number of regions on the longest path from inputs to a result, at least 1; those of a loop count for each of its steps."""
    before: dict[str, int] = {}
    for region in program.regions:
        steps = max((program.nodes[name].attributes["length"] for name in region.nodes if region.kind == "loop"), default=1)
        number = max((before.get(program.root(name), 0) for name in region.inputs), default=0) + steps
        for name in region.outputs:
            root = program.root(name)
            before[root] = max(number, before.get(root, 0))
    return max((1, *before.values()))


def _first_wrong(values: Sequence[VerifiedValue]) -> VerifiedValue | None:
    return next((value for value in values if not value.passed), None)


def _wrong(what: str, value: VerifiedValue) -> str:
    return f"{what}: {value.value} has the relative error {value.relative_error:.2e} > {value.tolerance:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times whole programs in turns; see the module's text.")
    parser.add_argument("--device", type=int, default=0, metavar="N")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    serve(Server(options.device, options.threads))


if __name__ == "__main__":
    main()
