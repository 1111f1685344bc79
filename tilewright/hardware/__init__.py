"""Facts about targets: the ``Machine`` type, the catalogue, and the identification of this host."""

from __future__ import annotations

import difflib

from tilewright import settings
from tilewright.errors import TargetNotPresent, UnknownTarget
from tilewright.hardware import measured_order
from tilewright.hardware.catalogue import catalogue as catalogue
from tilewright.hardware.device import host_gpu as host_gpu
from tilewright.hardware.device import read_device
from tilewright.hardware.host import host_cpu as host_cpu
from tilewright.hardware.host import identified_cpu as identified_cpu
from tilewright.hardware.machine import Cache as Cache
from tilewright.hardware.machine import Machine as Machine


def target_names() -> tuple[str, ...]:
    """Every name that ``machine`` accepts."""
    return ("native", "cuda", *catalogue())


def machine(target: str | Machine | None = None) -> Machine:
    """The machine of a target: None or "native" is this CPU, "cuda" the GPU of this host, and any other name one of the catalogue; this CPU and GPUs
    with what ``tilewright calibrate`` has stored of them. A `Machine` is itself, without the name of a GPU's calibration that this process does not
    use.

    Raises:
        UnknownTarget, TargetNotPresent, UnsupportedOption: as `identified_machine`.
        CacheError: if the calibration of the CPU or GPU is damaged.
    """
    if isinstance(target, Machine):
        return measured_order.as_used(target)
    if target in (None, "native"):
        return host_cpu()
    found = identified_machine(target)
    return measured_order.calibrated(found) if found.is_gpu else found


def identified_machine(target: str | None = None) -> Machine:
    """`machine` without what ``tilewright calibrate`` has stored: the package's constants and models are fitted to this machine and judged on it.

    Raises:
        UnknownTarget: if the catalogue lacks the name; it suggests the most similar ones.
        TargetNotPresent: for "cuda" if the driver shows no GPU for which code can be generated.
        UnsupportedOption: as `identified_cpu`.
    """
    if target in (None, "native"):
        return identified_cpu()
    if target == "cuda":
        found = host_gpu()
        if found is None:
            raise TargetNotPresent(
                "target 'cuda' is the GPU of this machine; the driver shows none of compute capability 7.0 or later",
                "name a catalogue target such as 'h200' to compile without the GPU, or 'native' for this CPU",
            )
        return found
    entries = catalogue()
    if target not in entries:
        near = difflib.get_close_matches(target.lower(), target_names(), n=3, cutoff=0.4)
        raise UnknownTarget(
            f"unknown target {target!r}",
            f"did you mean {' or '.join(near)}?" if near else f"known targets: {', '.join(target_names())}",
        )
    return entries[target]


def planned_threads(target: Machine, asked: int | None = None) -> int:
    """The threads for which CPU code is planned, and with which it runs: those asked for, here or by TILEWRIGHT_THREADS; else PyTorch's
    (`torch.get_num_threads()`), and for a CPU whose code cannot run here one for each of its cores.

    Raises:
        UnsupportedOption: where a variable is no number of threads.
    """
    asked = asked or settings.asked_threads()
    if asked is not None or not (target.is_gpu or is_present(target)):
        return asked or target.processors
    import torch  # late: the command line names targets without it

    return torch.get_num_threads()


def is_present(target: Machine) -> bool:
    """Whether code generated for the machine can run here.

    CPU: the same architecture with every instruction set of the target. GPU: a cubin runs on its own compute capability, and on later minor versions
    of the same major version unless it is built for an architecture-specific target ("sm_90a").
    """
    if not target.is_gpu:
        host = identified_cpu()
        return host.architecture == target.architecture and set(target.isa) <= set(host.isa)
    device = read_device()
    if device is None:
        return False
    if target.architecture.endswith("a"):
        return device.capability == target.compute_capability
    return device.major == target.compute_capability[0] and device.capability >= target.compute_capability
