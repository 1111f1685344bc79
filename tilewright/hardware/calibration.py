"""Constants fitted to measurements, by the machine they were measured on (`hardware/calibration/NAME.json`), and which machine uses which file.

A number that follows from counting instructions, or that a manual states, is not such a constant and stays in the code that uses it. A file gives the
value, unit and meaning of every constant, and names the entry of its `fits` that it comes from: command, data and commit. The constants for one part
of the models come from the first file that has this part: the machine's own (named after its target, or after the pipeline of its core), else those
that `fallbacks.json` lists for its kind, in order. A machine is therefore added by adding a file. The constants of a GPU that `tilewright calibrate`
has measured come from the file of that command instead, in a process that has read it (`in_use`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tilewright.errors import InvalidModel
from tilewright.files import first_line, json_of, reading
from tilewright.hardware.machine import Machine

FOLDER = Path(__file__).parent / "calibration"
FALLBACKS = "fallbacks"
REMEDY = "install Tilewright again, or write the entry as those of the other files in that folder are"

T = TypeVar("T")


@dataclass(frozen=True)
class Instructions:
    """Cost of address arithmetic, for all GPU schemas."""

    address: float
    division: float
    step: float


@dataclass(frozen=True)
class BlockSteps:
    """Constants of `kernels.gpu.steps`, and the latencies of a step in schemas with tiles in shared memory."""

    loaded_latency: float
    scheduler_imbalance: float
    unhidden: float
    overlap: float
    clustered_share_2: float
    clustered_share_4: float
    clustered_share_8: float
    split_traffic: float
    barrier_latencies: float
    multiply_add_cycles: float
    fragment_latencies: float
    end_latencies: float


@dataclass(frozen=True)
class Gemm:
    """Constants of `kernels.gpu.gemm`."""

    fragment_wavefronts: float


@dataclass(frozen=True)
class Direct:
    """Constants of `kernels.gpu.direct`."""

    overlap: float
    cached_cycles: float
    copy_lines: float


@dataclass(frozen=True)
class Winograd:
    """Constants of `kernels.gpu.winograd`."""

    later_launch: float


@dataclass(frozen=True)
class WinogradFused:
    """Constants of `kernels.gpu.winograd_fused`."""

    transform_instructions: float
    transform_cycles: float
    fragment_wavefronts: float
    store_wavefronts: float
    sum_wavefronts: float
    barrier_latencies: float


@dataclass(frozen=True)
class Window:
    """Constants of `kernels.gpu.window`."""

    issue_share: float
    loaded_latency: float
    part_latency: float
    block_cycles: float


@dataclass(frozen=True)
class Map:
    """Constants of `kernels.gpu.map`."""

    latency: float
    memory: float
    issue: float
    level_2: float
    block_cycles: float


@dataclass(frozen=True)
class RowReduction:
    """Constants of `kernels.gpu.row_reduction`."""

    latency: float
    tree: float
    kept_share: float
    line_cycles: float
    block_cycles: float


@dataclass(frozen=True)
class Gemv:
    """Constants of `kernels.gpu.gemv`."""

    latency: float
    tree: float
    issue: float
    split: float


@dataclass(frozen=True)
class Warpgroups:
    """Constants of `kernels.gpu.warpgroup`."""

    share: float
    copy_latencies: float
    copy_gain: float
    end_latencies: float
    store_share: float


@dataclass(frozen=True)
class Overheads:
    """Costs that counts do not show (`kernels.gpu.counted`), in cycles and instructions or as fractions of a machine's facts."""

    multiply_add_share: float
    step_instructions: float
    fill_instructions: float
    shared_cycles: float
    cached_cycles: float
    fill_cycles: float
    overlap: float
    latency: float
    latency_ahead: float
    multiply_add_latency: float
    shared_latency: float
    cached_latency: float
    fill_latency: float
    barrier_latency: float
    hiding: float
    wave_latency: float
    drain_cycles: float
    store_cycles: float
    sector_cycles: float
    write_factor: float
    launch: float


@dataclass(frozen=True)
class GpuCalibration:
    """Constants of the GPU models by part; the calibration files say what each one means."""

    instructions: Instructions
    steps: BlockSteps
    gemm: Gemm
    direct: Direct
    winograd: Winograd
    winograd_fused: WinogradFused
    window: Window
    map: Map
    row_reduction: RowReduction
    gemv: Gemv
    warpgroups: Warpgroups
    counted: Overheads


@dataclass(frozen=True)
class GpuChains:
    """Constants of `partition.tile_judge`: the time of a part of a tile by that which its schema predicts, and the cycles between parts. longest:
    predicted seconds of a chain's regions by themselves below which predictions may take it; 0 if they were not found to be right."""

    work: float
    turn: float
    longest: float = 0.0


UNFITTED_CHAINS = GpuChains(1.0, 0.0)
"""Of GPUs on which no chains were measured: the schemas' predictions as they are, and nothing between parts."""


@dataclass(frozen=True)
class GpuRecurrence:
    """Constants of `kernels.gpu.recurrence`. barrier_seconds: from the last block's arrival at a barrier of the grid to what follows it;
    cluster_barrier_seconds: the same of a barrier of a cluster of eight blocks, assumed where the file has only the other."""

    barrier_seconds: float
    cluster_barrier_seconds: float = 0.25e-6


@dataclass(frozen=True)
class GpuVariants:
    """Constants of `selection.variants`: for each axis of variants the part of the logarithm of predicted gains that measurements confirmed, nothing
    where the file has none of `meeting`, `order` or `sent`. Of some gains less is believed (`selection.variants.believed`)."""

    layout: float
    loop: float
    table: float
    meeting: float = 0.0
    order: float = 0.0
    sent: float = 0.0


UNCONFIRMED_VARIANTS = GpuVariants(0.0, 0.0, 0.0)
"""Of GPUs on which no variants were measured: no predicted gain is believed."""
ASSUMED_RECURRENCE = GpuRecurrence(1.2e-6)
"""Assumed for GPUs on which they were not measured: a fence, an atomic addition in level 2, and on average one and a half reads of the counter; and
a message to the blocks of a cluster and back."""


@dataclass(frozen=True)
class MeasuredGpu:
    """A calibration of a GPU (`hardware/measured_order.py`)."""

    name: str
    constants: GpuCalibration
    model: bytes
    """The learned correction, an .npz file; empty if constants alone rank."""


@dataclass(frozen=True)
class CpuContraction:
    """Constants of `kernels.cpu.contraction`."""

    overlap: float
    transfers: float
    shared_line: float
    tile_overhead_cycles: float
    copy_cycles_along_n: float
    copy_cycles_across_n: float


@dataclass(frozen=True)
class CpuWinograd:
    """Constants of `kernels.cpu.winograd`."""

    tile_overhead_cycles: float
    streamed_share: float


@dataclass(frozen=True)
class CpuDepthwise:
    """Constants of `kernels.cpu.depthwise`."""

    tile_overhead_cycles: float
    task_overhead_cycles: float
    visible: float
    scattered: float
    wide_tile: float


@dataclass(frozen=True)
class CpuAmx:
    """Constants of `kernels.cpu.amx`."""

    product_cycles: float
    level_2_share: float
    streamed_share: float
    strided: float
    epilogue_cycles: float
    block_cycles: float


@dataclass(frozen=True)
class CpuChains:
    """Constants of `partition.strip_judge`."""

    stored: float
    start_cycles: float


@dataclass(frozen=True)
class CpuCalibration:
    """Constants of the CPU models by part; the calibration files say what each one means."""

    contraction: CpuContraction
    winograd: CpuWinograd
    depthwise: CpuDepthwise
    amx: CpuAmx
    chains: CpuChains


_assumed: dict[str, Any] = {}
"""Constants that hold instead of the files', by machine: for GPUs GpuCalibration, for CPUs CpuCalibration."""
_in_use: dict[str, MeasuredGpu] = {}
"""What `tilewright calibrate` has found of the GPUs that this process identified, by the calibration's name."""


def use(found: MeasuredGpu) -> None:
    """From now on this process ranks the candidates of GPUs that name this calibration by it."""
    _in_use[found.name] = found


def in_use(machine: Machine) -> MeasuredGpu | None:
    """What ranks the GPU's candidates instead of the package's constants and models; None if it names no calibration, or, as the machine of a loaded
    artifact may, one that this process has not read."""
    return _in_use.get(machine.calibration)


def name_in_use(machine: Machine) -> str:
    """The name of the GPU's calibration if it is in use; empty if the package's constants and models rank."""
    found = in_use(machine)
    return found.name if found else ""


def constants_of(parts: Mapping[str, Mapping[str, float]]) -> GpuCalibration:
    """The constants of a GPU from their values by part and name.

    Raises:
        ValueError, KeyError, TypeError: if parts or names are others than those of this release, or a value is not a positive number.
    """
    types = get_type_hints(GpuCalibration)
    if set(parts) != set(types) or not all(type(value) is float and 0 < value < math.inf for part in parts.values() for value in part.values()):
        raise ValueError("it has no valid constants")
    return GpuCalibration(**{part: types[part](**values) for part, values in parts.items()})


@contextmanager
def assumed(machine: Machine, constants: GpuCalibration | CpuCalibration) -> Iterator[None]:
    """Inside the context, estimates for the machine use these constants: for fitting them."""
    before = _assumed.get(machine.name)
    _assumed[machine.name] = constants
    try:
        yield
    finally:
        del _assumed[machine.name]
        if before is not None:
            _assumed[machine.name] = before


def gpu_calibration(machine: Machine) -> GpuCalibration:
    """The constants for a GPU. Raises InvalidModel if a file is damaged or no file has a part."""
    measured = in_use(machine)
    known = _assumed.get(machine.name) or (measured and measured.constants)
    found: GpuCalibration = known or _calibration(GpuCalibration, machine.measured_as, machine.pipeline, machine.kind, FOLDER)
    return found


def cpu_calibration(machine: Machine) -> CpuCalibration:
    """The constants for a CPU. Raises InvalidModel if a file is damaged or no file has a part."""
    found: CpuCalibration = _assumed.get(machine.name) or _calibration(CpuCalibration, machine.name, machine.pipeline, machine.kind, FOLDER)
    return found


def gpu_chains(machine: Machine, half: bool = False) -> GpuChains | None:
    """The constants for chains on a GPU, which only the file of its chip can hold (part "chains", or "half_chains" for those of 16-bit values); None
    if they were not measured on it."""
    return _own(GpuChains, "half_chains" if half else "chains", machine)


def gpu_recurrence(machine: Machine) -> GpuRecurrence | None:
    """The constants for recurrent layers in one kernel of a GPU, which only the file of its chip can hold (part "recurrent"); None if they were not
    measured on it."""
    return _own(GpuRecurrence, "recurrent", machine)


def gpu_variants(machine: Machine) -> GpuVariants | None:
    """What measurements confirmed of predicted gains of variants on a GPU, which only the file of its chip can hold (part "variants"); None if no
    variants were measured on it."""
    return _own(GpuVariants, "variants", machine) if machine.is_gpu else None


def _own(kind: Callable[..., T], part: str, machine: Machine) -> T | None:
    """A part of the file of the machine's chip, for which no other stands in; None without it."""
    path = FOLDER / f"{machine.measured_as}.json"
    values = (parts_of(path) or {}).get(part)
    return None if values is None else _made(kind, values, part, path)


def _made(kind: Callable[..., T], values: Mapping[str, float], part: str, path: Path) -> T:
    """The constants of a part of a file. Raises InvalidModel if they are others."""
    try:
        return kind(**values)
    except TypeError as error:
        wanted = ", ".join(entry.name for entry in fields(kind))  # type: ignore[arg-type]
        raise InvalidModel(f"{path}, {part!r}: its constants are not {wanted} ({first_line(error)})", REMEDY) from None


@lru_cache(maxsize=64)
def _calibration(kind: type[T], name: str, pipeline: str, machine_kind: str, folder: Path) -> T:
    names = [*dict.fromkeys((name, pipeline, *fallbacks(folder).get(machine_kind, ())))]
    files = [(folder / f"{each}.json", parts) for each in names if (parts := parts_of(folder / f"{each}.json")) is not None]
    found: dict[str, Any] = {}
    for part, its in get_type_hints(kind).items():
        path, constants = next(((path, parts[part]) for path, parts in files if part in parts), (None, None))
        if path is None or constants is None:
            raise InvalidModel(f"no file in {folder} has the part {part!r} of the machine {name}", REMEDY)
        found[part] = _made(its, constants, part, path)
    return kind(**found)


def fallbacks(folder: Path = FOLDER) -> Mapping[str, tuple[str, ...]]:
    """For each kind of machine, the files that serve machines without one of their own, closest first."""
    path = folder / f"{FALLBACKS}.json"
    with reading(path, InvalidModel, REMEDY):
        return {str(kind): tuple(map(str, names)) for kind, names in json_of(path.read_bytes()).items()}


def parts_of(path: Path) -> dict[str, dict[str, float]] | None:
    """The constants of one file by part and name; None if there is no such file.

    Raises:
        InvalidModel: if it cannot be read, or an entry lacks its value or the source of that value.
    """
    if path.stem in ("", FALLBACKS) or not path.is_file():
        return None
    with reading(path, InvalidModel, REMEDY):
        content = json_of(path.read_bytes())
        fits = content["fits"]
        for name, fit in fits.items():
            _require_texts(fit, ("command", "data_note", "commit"), f"fit {name!r}")
        return {part: {name: _value(entry, fits, f"{part}.{name}") for name, entry in entries.items()} for part, entries in content["parts"].items()}


def _value(entry: Mapping[str, Any], fits: Mapping[str, Any], place: str) -> float:
    _require_texts(entry, ("unit", "meaning", "fit"), place)
    if entry["fit"] not in fits:
        raise ValueError(f"{place} was found by {entry['fit']!r}, which is not among its fits")
    if not isinstance(entry.get("value"), int | float) or isinstance(entry["value"], bool):
        raise ValueError(f"{place} has no number as its value")
    return float(entry["value"])


def _require_texts(entry: Any, names: tuple[str, ...], place: str) -> None:
    """Raises ValueError if one of the names is missing or empty."""
    missing = [name for name in names if not isinstance(entry, dict) or not isinstance(entry.get(name), str) or not entry[name].strip()]
    if missing:
        raise ValueError(f"{place} lacks {', '.join(missing)}")
